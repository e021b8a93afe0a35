"""An export's folder as an MLflow model of the flavour `onnx`: MLflow's loader runs it in
onnxruntime, without samewise and without code.
"""

from __future__ import annotations

import shutil
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from samewise.runner.exports.folder import VECTORS
from samewise.runner.exports.formats import FORMATS
from samewise.runner.records.tensor_file import read_tensors

if TYPE_CHECKING:
    from mlflow import MlflowClient

_OPTIONS: Final = {
    "intra_op_num_threads": 1,
    "inter_op_num_threads": 1,
    "execution_mode": "sequential",
}
"""As `samewise verify` runs the file: one thread has one order of sums."""
_PACKAGES: Final = ("mlflow", "onnx", "onnxruntime")


def log(
    client: MlflowClient,
    export: Path,
    name: str,
    *,
    step: int,
    run_id: str,
    register: str | None = None,
) -> dict[str, str]:
    """Log an export with its run.

    Returns `model`, the logged model's id; with `register` also `registered` and `version`. Raises
    whatever the client raises when the store cannot be reached.
    """
    from samewise.runner.tracking import logged_model

    model = logged_model.create(
        client,
        f"{name}-onnx",
        run_id=run_id,
        step=step,
        write=partial(write, export=export, run_id=run_id),
    )
    if not register:
        return {"model": model}
    return {
        "model": model,
        "registered": register,
        "version": logged_model.register(client, register, model_id=model, run_id=run_id),
    }


def write(
    path: Path, *, export: Path, model_id: str | None = None, run_id: str | None = None
) -> None:
    """Write an MLflow model: the export's folder with MLmodel, requirements and an input example.

    `samewise verify` still runs its vectors.
    """
    import onnx
    from mlflow import pyfunc
    from mlflow.models import Model, ModelSignature
    from mlflow.types import Schema, TensorSpec

    file = FORMATS["onnx"].file
    graph = onnx.load(str(export / file), load_external_data=False).graph

    def schema(values: Any) -> Schema:
        forms = {one.name: one.type.tensor_type for one in values}
        sizes = {
            name: tuple(
                size.dim_value if size.HasField("dim_value") else -1 for size in one.shape.dim
            )
            for name, one in forms.items()
        }
        return Schema(
            [
                TensorSpec(onnx.helper.tensor_dtype_to_np_dtype(one.elem_type), sizes[name], name)
                for name, one in forms.items()
            ]
        )

    vectors = {
        name.removeprefix("input/").replace(".", "_"): tensor
        for name, tensor in read_tensors(export / VECTORS).items()
        if name.startswith("input/")
    }
    model = Model(model_id=model_id, run_id=run_id)
    model.add_flavor(
        "onnx",
        onnx_version=onnx.__version__,
        data=file,
        providers=["CPUExecutionProvider"],
        onnx_session_options=_OPTIONS,
        code=None,
    )
    pyfunc.save_model(
        str(path),
        loader_module="mlflow.onnx",
        mlflow_model=model,
        signature=ModelSignature(schema(graph.input), schema(graph.output)),
        input_example={one.name: vectors[one.name].numpy() for one in graph.input},
        pip_requirements=[f"{name}=={version(name)}" for name in _PACKAGES],
    )
    model.flavors["python_function"]["data"] = (
        file  # save_model would copy it into a separate folder
    )
    shutil.copytree(export, path, dirs_exist_ok=True)
    model.model_size_bytes = sum(one.stat().st_size for one in path.iterdir())
    model.save(str(path / "MLmodel"))
