"""ArrayRecord files of Grain and TensorFlow Datasets, whose records are `tf.train.Example`s."""

import os
from collections.abc import Iterator, Sequence
from functools import lru_cache
from typing import Any, final

from samewise.runner.errors import ConfigError, DataError, Problem
from samewise.runner.shards import storage
from samewise.runner.shards.reader import KEY, Label, Reader, Sample, require_column

# tensorflow/core/example/feature.proto: a list has the number of its kind
_LISTS = """
message_type { name: "Values"
  field { name: "bytes" number: 1 type: TYPE_BYTES label: LABEL_REPEATED } }
message_type { name: "Floats"
  field { name: "floats" number: 1 type: TYPE_FLOAT label: LABEL_REPEATED } }
message_type { name: "Integers"
  field { name: "integers" number: 1 type: TYPE_INT64 label: LABEL_REPEATED } }
message_type { name: "Feature"
  field { name: "bytes" number: 1 type: TYPE_MESSAGE type_name: "Values" }
  field { name: "floats" number: 2 type: TYPE_MESSAGE type_name: "Floats" }
  field { name: "integers" number: 3 type: TYPE_MESSAGE type_name: "Integers" } }
message_type { name: "Entry"
  field { name: "key" number: 1 type: TYPE_STRING }
  field { name: "value" number: 2 type: TYPE_MESSAGE type_name: "Feature" } }
message_type { name: "Features"
  field { name: "entries" number: 1 type: TYPE_MESSAGE type_name: "Entry" label: LABEL_REPEATED } }
message_type { name: "Example"
  field { name: "features" number: 1 type: TYPE_MESSAGE type_name: "Features" } }
"""


@final
class ArrayRecord(Reader):
    """Reads a record by its number. A feature with a single value is that value, else a list."""

    def scan(self, path: str, label: Label) -> Iterator[Sequence[Sample]]:
        rows = list[Sample]()
        for number in range(_opened(path, os.getpid()).num_records()):
            fields = _features(path, number)
            key = str(fields.get(KEY, f"{os.path.basename(path)}/{number}"))
            rows.append(Sample(key, number, 1, label.text(fields, f"{path}, record {number}")))
        yield rows

    def read(
        self, path: str, offset: int, length: int, fields: Sequence[str], *, units: int
    ) -> dict[str, Any]:
        features = _features(path, offset)
        for name in fields:
            require_column(path, name, features)
        return {KEY: f"record {offset}"} | features


# The threads of a reader do not outlive a fork
@lru_cache(maxsize=64)
def _opened(path: str, process: int) -> Any:
    try:
        from array_record.python.array_record_module import (  # pyright: ignore[reportMissingImports]
            ArrayRecordReader,
        )
    except ImportError as error:
        raise ConfigError(Problem(path, str(error), hint="pip install array_record")) from None
    reason, expected = "is not read from an object store", "a copy on the local disk"
    DataError.raise_if(storage.is_remote(path), path, reason, expected=expected)
    return ArrayRecordReader(path)


@lru_cache(maxsize=1)
def _example() -> Any:
    """Return the class of `tf.train.Example`."""
    from google.protobuf import descriptor_pb2, descriptor_pool, message_factory, text_format

    file = text_format.Parse(_LISTS, descriptor_pb2.FileDescriptorProto(name="example.proto"))
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    return message_factory.GetMessageClass(pool.FindMessageTypeByName("Example"))


def _features(path: str, number: int) -> dict[str, Any]:
    """Return the features of a record by name."""
    from google.protobuf.message import DecodeError

    try:
        example = _example().FromString(_opened(path, os.getpid()).read([number])[0])
    except DecodeError:
        raise ValueError(f"record {number} is not a tf.train.Example") from None
    features = dict[str, Any]()
    for entry in example.features.entries:
        for _, values in entry.value.ListFields():
            (_, values), *_ = values.ListFields() or [(None, [])]
            features[entry.key] = values[0] if len(values) == 1 else list(values)
    return features
