"""The model that `mlflow models serve` loads: files in, predictions out, as `samewise predict`.

The model is data alone: a run's config, environment and checkpoint (`tracking/logged_model.py`).
Nothing in it is code or a pickle of objects; the classes that its config names are samewise's,
torch's and those of your own packages, and are made where the user has made or trusts the run.
"""

import base64
import os
import tempfile
import threading
from collections.abc import Mapping
from pathlib import Path, PurePath
from typing import Any

from samewise.runner import api
from samewise.runner.errors import SamewiseError

TRUST = "SAMEWISE_TRUST_MODEL"
"""1: `mlflow models serve` serves models that another user, or you on another machine, logged."""
FOLDER = "run"
"""The run in the model's folder."""


class ServedModel:
    """A model as MLflow serves it."""

    def __init__(self, run: api.LoadedRun) -> None:
        self._run = run
        # Torch's settings and random streams are global to the process
        self._one_at_a_time = threading.Lock()

    def predict(
        self, model_input: Any, params: Mapping[str, Any] | None = None
    ) -> list[dict[str, Any]]:
        """Predict each file separately: the values that `samewise predict --json` prints.

        Args:
            model_input: A pandas.DataFrame with a row for each file: its bytes as `file` and, optionally, its name as
                `name`.
            params: `threshold`, the least score; `files`, to have pictures and sounds in the
                answer, as base64 by name.

        Raises:
            MlflowException: A file cannot be read, or is not what the model takes: for the
                client, with the file's name.
        """
        chosen = dict(params or {})
        names = model_input["name"].tolist() if "name" in model_input else [None] * len(model_input)
        with self._one_at_a_time:
            return [
                self._answer(content, name or "", chosen)
                for content, name in zip(model_input["file"].tolist(), names, strict=True)
            ]

    def _answer(self, content: bytes, name: str, params: Mapping[str, Any]) -> dict[str, Any]:
        safe_name = PurePath(str(name).replace("\\", "/")).name or "file"
        with tempfile.TemporaryDirectory(prefix="samewise-") as folder:
            # Of the client's name only the extension gets into a path
            file, out = (
                Path(folder) / f"file{PurePath(safe_name).suffix[:16]}",
                Path(folder) / "out",
            )
            file.write_bytes(content)
            try:
                (prediction,) = api.predict(
                    self._run,
                    file,
                    output=out if params.get("files") else None,
                    threshold=params.get("threshold") or None,
                )
            except SamewiseError as error:
                from mlflow.exceptions import MlflowException

                raise MlflowException.invalid_parameter_value(
                    "; ".join(str(problem) for problem in error.problems).replace(
                        str(file), safe_name
                    )
                ) from None
            values = prediction.values()
            if params.get("files"):
                values["files"] = (
                    {
                        path.name: base64.b64encode(path.read_bytes()).decode()
                        for path in sorted(out.iterdir())
                    }
                    if out.exists()
                    else {}
                )
            return values


def _load_pyfunc(path: str) -> ServedModel:  # pyright: ignore[reportUnusedFunction] (MLflow calls it by this name)
    """Load a model from MLflow's folder.

    ConfigError if this user has not made it and `SAMEWISE_TRUST_MODEL` is not 1, or if a part of it
    cannot be made.
    """
    return ServedModel(api.load(Path(path) / FOLDER, trust=os.environ.get(TRUST) == "1"))
