"""Logs a finished run's best checkpoint as an MLflow model for `mlflow models
serve`. Imports mlflow; torch to make an example.

A checkpoint's folder holds what `samewise predict` needs of a run, as data: no pickled object, no
code. `samewise.runner.serving` loads it.
"""

from __future__ import annotations

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
_FOLDER = "run"
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
    """Log the model; return its id. An interrupted earlier attempt is continued."""
    name = _model_name(folder.path.absolute().parent.name)
    found = client.search_logged_models(
        [experiment_id],
        filter_string=f"source_run_id = '{run_id}' AND name = '{name}'",
        max_results=1,
    )
    model = (
        found[0]
        if found
        else client.create_logged_model(experiment_id, name=name, source_run_id=run_id)
    )
    if str(model.status) != "READY":
        with tempfile.TemporaryDirectory(prefix=".model-", dir=folder.path) as place:
            _write(Path(place) / "model", folder, config, model_id=model.model_id, run_id=run_id)
            client.log_model_artifacts(model.model_id, str(Path(place) / "model"))
        client.finalize_logged_model(model.model_id, "READY")
    client.log_outputs(run_id, [LoggedModelOutput(model.model_id, step)])
    return model.model_id


def _model_name(name: str) -> str:
    # MLflow's own rule
    return re.sub(r"[/:.%\"']", "_", name)


def register(client: MlflowClient, name: str, *, model_id: str, run_id: str) -> str:
    """Make a logged model the next version, which is returned, of a registered model, created if
    necessary; only once for each model.
    """
    try:
        client.create_registered_model(name)
    except MlflowException as error:
        if error.error_code != "RESOURCE_ALREADY_EXISTS":
            raise
    # Where the registry's store looks for the model
    mlflow.set_tracking_uri(client.tracking_uri)
    source = f"models:/{model_id}"
    known = [
        one for one in client.search_model_versions(f"name = '{name}'") if one.source == source
    ]
    return str(
        (
            known[0]
            if known
            else client.create_model_version(name, source, run_id, model_id=model_id)
        ).version
    )


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
    copy = RunFolder(path / _FOLDER)
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

    Copy them if the disk has no links.

    ConfigError if there is none, or one of its files is a link or no regular file, or it is
    elsewhere in a folder that this user has neither made nor trusts.
    """
    kept = chosen_checkpoint(folder, "best")
    files = files_of(kept) if kept else []
    if kept is None or not files:
        raise ConfigError(
            Problem(str(folder.checkpoints), "has no checkpoint that could be logged as a model")
        )
    if not kept.is_relative_to(folder.path.resolve()) and not trust.is_signed(folder.config):
        raise ConfigError(
            Problem(
                str(folder.checkpoints),
                "is a link to a folder elsewhere, from which nothing is sent",
                str(kept),
                hint="put a copy there",
            )
        )
    for file in files:
        target = copy.checkpoints / kept.name / file.relative_to(kept)
        target.parent.mkdir(parents=True, exist_ok=True)
        try:
            os.link(file, target)
        except OSError:
            shutil.copy2(file, target)


def _example(folder: RunFolder, config: Mapping[str, Any]) -> Any:
    """A file of the kind that the run's recipe reads: a grey picture, or half a second of silence.

    None for other kinds.
    """
    if not trust.is_signed(folder.config):
        # Otherwise its recipe may be a stranger's
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

        made, name = io.BytesIO(), "grey.png"
        Image.new("L", (32, 32), 128).save(made, "PNG")
    elif ".wav" in extensions:
        made, name = io.BytesIO(), "silence.wav"
        with wave.open(made, "wb") as file:
            file.setparams((1, 2, _RATE, _RATE // 2, "NONE", ""))
            file.writeframes(struct.pack("<h", 0) * (_RATE // 2))
    else:
        return None
    return pandas.DataFrame({"file": [made.getvalue()], "name": [name]})
