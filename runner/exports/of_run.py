"""Export a run's model: call it on samples of its data, write it, and compare."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from omegaconf import OmegaConf

from samewise.runner.config.compose import Composed
from samewise.runner.config.project import Project
from samewise.runner.data import streams
from samewise.runner.data.dataset import without_transforms
from samewise.runner.exports import folder as exports
from samewise.runner.exports.call import Call, call_in_form, observe
from samewise.runner.optim.parametrise import merge
from samewise.runner.records import kept_checkpoints, shapes, sources
from samewise.runner.records.files import read_json
from samewise.runner.records.folder import RunFolder
from samewise.runner.results import Exported, ExportedPart
from samewise.runner.torch_private import pytree
from samewise.runner.training.evaluation import first_batch, models_to_evaluate
from samewise.runner.training.restored import at_checkpoint


def export_run(
    out: Path,
    calls: Sequence[Call],
    about: Mapping[str, Any],
    *,
    to: Sequence[str],
    tolerance: float,
) -> Exported:
    """Write what `calls_of_run` returns, all of it or nothing.

    Args:
        out: A new or an empty folder.
        calls: The model, or its forms.
        about: Facts about the run.
        to: Formats besides the weights, from `kinds.require_sound`.
        tolerance: The largest relative error that is accepted.

    Raises:
        ConfigError: The folder is not empty, a package is missing, an exporter refuses the model,
            or a format's results are further off than `tolerance`.
    """
    parts = list[ExportedPart]()
    try:
        for call in calls:
            folder = out / call.part if len(calls) > 1 else out
            formats = exports.write(folder, call, to=to, tolerance=tolerance, about=about)
            parts.append(ExportedPart(folder, call.part, formats))
    except BaseException:
        # A part alone is of no use, and would be in the way of the next attempt
        for part in parts:
            exports.discard(part.folder)
        raise
    return Exported(out, about["experiment"], about["run"], about["step"], about["average"], parts)


def calls_of_run(
    folder: RunFolder,
    composed: Composed,
    project: Project,
    *,
    overrides: Sequence[str] = (),
    checkpoint: str = "best",
    weights: str | None = None,
    module: str | None = None,
    bare: bool = False,
) -> tuple[list[Call], dict[str, Any]]:
    """Call a run's model, or its forms, on the first samples of the validation split.

    Args:
        folder: The run's folder.
        composed: The run's config, on the CPU.
        project: Project with the packages that the config may name.
        overrides: The user's overrides, for the export's description.
        checkpoint: best, last, a step, or a monitored metric.
        weights: Name of the callback whose weights to use; None: the trained ones.
        module: Module of the model, or form, to export alone; None: all that the recipe calls.
        bare: Leave out the batch transforms before the model.

    Returns:
        The calls, and facts about the run.
    """
    run, step = at_checkpoint(composed, project, folder, checkpoint)
    model, transform = (
        next(iter(models_to_evaluate(run, weights).values())).eval(),
        run.transforms["eval"],
    )
    merge(model)
    # AOTInductor's code assumes the example's strides without a check; other programs, and tensors
    # from files, have contiguous ones
    loaded = pytree.tree_map_only(
        torch.Tensor, torch.Tensor.contiguous, first_batch(run, "valid", run.recipe.export_samples)
    )
    streams.enter(run.seed, "eval", 0)
    with torch.no_grad():
        forms = run.recipe.forms(model, transform(loaded))
    streams.enter(run.seed, "eval", 0)
    chosen_forms = {name: form for name, form in forms.items() if module is None or name == module}
    calls = [
        call_in_form(form, name, model, loaded, transform, whole=not bare)
        for name, form in chosen_forms.items()
    ]
    if not calls:
        call = observe(run.recipe, model, loaded, transform, module=module, whole=not bare)
        # The recipe may call the model for one sample after the other
        if not (call.whole or bare or module):
            sample = pytree.tree_map_only(
                torch.Tensor, torch.Tensor.contiguous, first_batch(run, "valid", 1)
            )
            sample_call = observe(run.recipe, model, sample, transform)
            call = sample_call if sample_call.whole else call
        calls = [call]
    # Metrics of the trained weights (valid/loss) and of averages (ema/valid/loss)
    checkpoint_metrics = (
        kept_checkpoints.choose_checkpoint(folder.checkpoints, str(step)).metrics or {}
    )
    metrics = {
        name: value
        for name, value in checkpoint_metrics.items()
        if name.startswith(f"{weights}/valid/" if weights else "valid/")
    }
    environment, preparation = (
        read_json(folder.environment, shapes.ENVIRONMENT) or {},
        getattr(without_transforms(run.splits["valid"].dataset), "preparation", None),
    )
    data: dict[str, Any] = environment.get("data", {})
    cfg: Any = OmegaConf.to_container(composed.cfg, resolve=True, enum_to_str=True)
    about = {
        "experiment": composed.name,
        "run": folder.path.name,
        "step": step,
        "average": weights,
        "metrics": {**metrics, "step": step} if metrics else {},
        "changed": [*sources.list_changes(folder.sources), *overrides],
        "data": {
            split: {name: value for name, value in sample.items() if name != "classes"}
            for split, sample in data.items()
        },
        "environment": {
            name: environment[name] for name in ("python", "versions", "cpu") if name in environment
        },
        "classes": data.get("train", {}).get("classes", []),
        "gives": run.recipe.gives,
        "model": cfg["model"],
        "preparation": dict(preparation) if isinstance(preparation, Mapping) else {},
        "transforms": cfg["transforms"]["eval"],
        "recipe": cfg["recipe"],
        "precision": cfg["precision"],
    }
    return calls, about
