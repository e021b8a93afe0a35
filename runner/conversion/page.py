"""A page that shows a data set: its size, its labels, and some samples to look at or listen to."""

import base64
import io
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import suppress
from html import escape
from itertools import pairwise
from typing import Any

import numpy as np
import soundfile
from PIL import Image

from samewise.runner.conversion.shards import size_of, spaced_samples
from samewise.runner.errors import truncate
from samewise.runner.interfaces import class_names

_HEAD = """<!DOCTYPE html><meta charset="utf-8"><title>{title}</title><style>
body {{font: 14px sans-serif; margin: 2em}} td {{padding: 0 1em 0 0}} meter {{width: 20em}}
figure {{display: inline-block; margin: 4px; vertical-align: top; max-width: 320px}}
figcaption {{overflow-wrap: anywhere}} rect {{fill: none; stroke: red; stroke-width: .5%}}
text {{paint-order: stroke; stroke: white; fill: red}}
</style><h1>{title}</h1>"""


def describe(dataset: Any) -> dict[str, Any]:
    """Return what the page says of a data set, in plain values.

    Returns:
        `samples`, their number; `shards`, the number of samples of each shard or row group, if
        there are any; `labels`, the number of samples of each class, or of objects in the measured
        samples; `bytes`, the sizes of up to 1,000 samples, evenly spaced.
    """
    measured = [fields for _, fields in spaced_samples(dataset, 1000)]
    numbers, classes = np.asarray(getattr(dataset, "labels", ())), class_names(dataset)
    objects = [x["category"] for fields in measured for x in fields.get("objects", ())]
    # Labels that are not whole numbers are no classes
    labels = objects or [classes[x] for x in numbers.tolist() if isinstance(x, int)]
    return {
        "samples": len(dataset),
        "shards": np.asarray(getattr(dataset, "shard_sizes", ())).tolist(),
        "labels": dict(Counter(labels).most_common()),
        "bytes": [*map(size_of, measured)],
    }


def page(title: str, splits: Mapping[str, Any], facts: Mapping[str, Mapping[str, Any]]) -> str:
    """Return the page as HTML, complete in one file.

    Args:
        title: Its title.
        splits: The data sets by name, each with a method `fields`.
        facts: What `describe` says of each.
    """
    return _HEAD.format(title=escape(title)) + "\n".join(
        f"<h2>{escape(name)}: {facts[name]['samples']:,} samples</h2>"
        + _bars("Labels", facts[name]["labels"])
        + _bars("Bytes of a sample", _histogram(facts[name]["bytes"]))
        + _bars("Samples of a shard, or of a row group of it", _histogram(facts[name]["shards"]))
        + "".join(_figure(*sample) for sample in spaced_samples(dataset, 24))
        for name, dataset in splits.items()
    )


def _histogram(values: Sequence[int]) -> dict[str, int]:
    """Return the numbers of values in ranges of one width."""
    counts, edges = np.histogram(values, bins=min(16, len({*values}) or 1))
    ranges = (f"{low:,.0f} to {high:,.0f}" for low, high in pairwise(edges.tolist()))
    return {x: count for x, count in zip(ranges, counts.tolist(), strict=True) if count}


def _bars(title: str, counts: Mapping[str, int]) -> str:
    """Return a table of numbers with bars; nothing if there are none."""
    rows = "".join(
        f"<tr><td>{escape(name)}<td>{count:,}"
        f"<td><meter max={max(counts.values())} value={count}></meter>"
        for name, count in counts.items()
    )
    return f"<h3>{title}</h3><table>{rows}</table>" if rows else ""


def _figure(key: str, fields: Mapping[str, Any]) -> str:
    """Return a sample: its image with boxes, its recording with a waveform, its text."""
    texts = [key, *(str(fields[x]) for x in ("label", "text") if x in fields)]
    shown = ""
    # Arrays, and what else is no usual image or recording, have only a caption
    with suppress(OSError, soundfile.LibsndfileError):
        if "image" in fields:
            shown = _image(fields["image"], fields.get("objects", ()))
        elif "audio" in fields:
            shown = _recording(fields["audio"])
    return (
        f"<figure>{shown}<figcaption>{'<br>'.join(escape(truncate(x, 500)) for x in texts)}"
        "</figcaption></figure>"
    )


def _image(content: bytes, objects: Sequence[Mapping[str, Any]]) -> str:
    image, small = Image.open(io.BytesIO(content)).convert("RGB"), io.BytesIO()
    width, height = image.size
    image.thumbnail((320, 320))
    image.save(small, "JPEG")
    boxes = "".join(
        f'<rect x="{x}" y="{y}" width="{w}" height="{h}"/>'
        f'<text x="{x}" y="{y}" dy="1em" font-size="{width / 20}">'
        f"{escape(str(item['category']))}</text>"
        for item in objects
        for x, y, w, h in [item["bbox"]]
    )
    return (
        f'<svg viewBox="0 0 {width} {height}" width="{image.width}" height="{image.height}">'
        f'<image href="data:image/jpeg;base64,{base64.b64encode(small.getvalue()).decode()}" '
        f'width="{width}" height="{height}"/>{boxes}</svg>'
    )


def _recording(content: bytes) -> str:
    (samples, rate), sound = soundfile.read(io.BytesIO(content), always_2d=True), io.BytesIO()
    soundfile.write(sound, samples[: 20 * rate], rate, format="WAV")
    peaks = [50 * np.abs(x).max(initial=0) for x in np.array_split(samples, 320)]
    lines = "".join(f"M{x} {50 - y:.1f}v{2 * y:.1f}" for x, y in enumerate(peaks))
    return (
        f'<svg width="320" height="100"><path d="{lines}" stroke="black"/></svg><audio controls '
        f'src="data:audio/wav;base64,{base64.b64encode(sound.getvalue()).decode()}"></audio>'
    )
