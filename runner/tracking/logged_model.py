"""Logs a finished run's best checkpoint as an MLflow model for `mlflow models serve`.

A checkpoint's folder holds what `samewise predict` needs of a run, as data: no pickled object, no
code. `samewise.runner.serving` loads it. Imports mlflow, and torch to make an example.
"""

import contextlib
import io
import os
import re
import shutil
import struct
import tempfile
import wave
from collections.abc import Mapping
from importlib.metadata import version
from pathlib import Path
from typing import Any

import mlflow
from mlflow import MlflowClient
from mlflow.entities import LoggedModelOutput
from mlflow.exceptions import MlflowException

import samewise
from samewise.runner.config import project
from samewise.runner.errors import ConfigError, Problem, SamewiseError
from samewise.runner.records import trust
from samewise.runner.records.checkpoint import files_of
from samewise.runner.records.files import read_text
from samewise.runner.records.folder import RunFolder
from samewise.runner.records.found import chosen_checkpoint
from samewise.runner.secrets import redact_file

LOADER = "samewise.runner.serving"
_PACKAGES = ("mlflow", "torch", "torchvision", "torchaudio")
_RATE = 8000


def log(
    client: MlflowClient,
    folder: RunFolder,
    *,
    run_id: str,
    experiment_id: str,
    config: Mapping[str, Any],
    step: int,
) -> str:
    """Log the model, continuing an interrupted attempt; return its id."""
    # MLflow refuses these characters
    name = re.sub(r"[/:.%\"']", "_", folder.path.absolute().parent.name)
    models = client.search_logged_models(
        [experiment_id],
        filter_string=f"source_run_id = '{run_id}' AND name = '{name}'",
        max_results=1,
    )
    model = (
        models[0]
        if models
        else client.create_logged_model(experiment_id, name=name, source_run_id=run_id)
    )
    if str(model.status) != "READY":
        # On the run's disk, so that the checkpoint's files are linked and not copied
        with tempfile.TemporaryDirectory(prefix=".model-", dir=folder.path) as place:
            _write(Path(place) / "model", folder, config, model_id=model.model_id, run_id=run_id)
            client.log_model_artifacts(model.model_id, str(Path(place) / "model"))
        client.finalize_logged_model(model.model_id, "READY")
    client.log_outputs(run_id, [LoggedModelOutput(model.model_id, step)])
    return model.model_id


def register(client: MlflowClient, name: str, *, model_id: str, run_id: str) -> str:
    """Make a logged model the next version of a registered model, once; return the version.

    The registered model is created if necessary.
    """
    try:
        client.create_registered_model(name)
    except MlflowException as error:
        if error.error_code != "RESOURCE_ALREADY_EXISTS":
            raise
    # The registry's store looks for the model at the global address
    mlflow.set_tracking_uri(client.tracking_uri)
    source = f"models:/{model_id}"
    versions = client.search_model_versions(f"name = '{name}'")
    version = next((x for x in versions if x.source == source), None)
    if version is None:
        version = client.create_model_version(name, source, run_id, model_id=model_id)
    return str(version.version)


def _write(
    path: Path, folder: RunFolder, config: Mapping[str, Any], *, model_id: str, run_id: str
) -> None:
    """Write the model's folder: MLmodel, the signature, an example, requirements, and the run."""
    from mlflow.models import Model, ModelSignature
    from mlflow.pyfunc import save_model
    from mlflow.types import ColSpec, ParamSchema, ParamSpec, Schema

    inputs = Schema([ColSpec("binary", "file"), ColSpec("string", "name", required=False)])
    params = ParamSchema(
        [ParamSpec("threshold", "double", 0.0), ParamSpec("files", "boolean", False)]
    )
    save_model(
        str(path),
        loader_module=LOADER,
        mlflow_model=Model(model_id=model_id, run_id=run_id),
        signature=ModelSignature(inputs, params=params),
        input_example=_example(folder, config),
        pip_requirements=[
            f"samewise=={samewise.__version__}",
            *(f"{name}=={version(name)}" for name in _PACKAGES),
        ],
    )
    copy = RunFolder(path / "run")
    copy.path.mkdir()
    add_checkpoint(folder, copy)
    for source, target in (
        (folder.config, copy.config),
        (folder.environment, copy.environment),
        (folder.sources, copy.sources),
    ):
        if (text := read_text(source)) is not None:
            target.write_text(redact_file(source.name, text), encoding="utf-8")
    if trust.is_signed(folder.config):
        trust.sign(copy.config)


def add_checkpoint(folder: RunFolder, copy: RunFolder) -> None:
    """Link the files of the best checkpoint (else the newest), and no others, into a folder.

    Copies them if the disk has no links.

    Raises:
        ConfigError: There is no checkpoint, one of its files is a link or no regular file, or it is
            outside a folder that this user has neither made nor trusted.
    """
    checkpoint = chosen_checkpoint(folder, "best")
    files = files_of(checkpoint) if checkpoint else []
    if checkpoint is None or not files:
        raise ConfigError(
            Problem(str(folder.checkpoints), "has no checkpoint that could be logged as a model")
        )
    ConfigError.raise_if(
        not checkpoint.is_relative_to(folder.path.resolve()) and not trust.is_signed(folder.config),
        str(folder.checkpoints),
        "is a link to a folder elsewhere, from which nothing is sent",
        str(checkpoint),
        hint="put a copy there",
    )
    for file in files:
        target = copy.checkpoints / checkpoint.name / file.relative_to(checkpoint)
        target.parent.mkdir(parents=True, exist_ok=True)
        try:
            os.link(file, target)
        except OSError:
            shutil.copy2(file, target)


def _example(folder: RunFolder, config: Mapping[str, Any]) -> Any:
    """Return an input of the run's recipe: a grey picture, or half a second of silence, or None."""
    # Without a signature the recipe may be a stranger's
    if not trust.is_signed(folder.config):
        return None
    import pandas

    from samewise.runner.config.instantiate import instantiate

    extensions: tuple[str, ...] = ()
    with contextlib.suppress(SamewiseError, AttributeError):
        extensions = tuple(
            instantiate(config["recipe"], "recipe", allowed=project.find().packages).extensions
        )
    if ".png" in extensions:
        from PIL import Image

        buffer, name = io.BytesIO(), "grey.png"
        Image.new("L", (32, 32), 128).save(buffer, "PNG")
    elif ".wav" in extensions:
        buffer, name = io.BytesIO(), "silence.wav"
        with wave.open(buffer, "wb") as file:
            file.setparams((1, 2, _RATE, _RATE // 2, "NONE", ""))
            file.writeframes(struct.pack("<h", 0) * (_RATE // 2))
    else:
        return None
    return pandas.DataFrame({"file": [buffer.getvalue()], "name": [name]})
