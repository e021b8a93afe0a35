"""Write a run's model for other runtimes, and compare each file with the model."""

from __future__ import annotations

import argparse
import shlex
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from samewise.runner.commands import add_checkpoint, add_packages, add_trust, note_weights
from samewise.runner.config import project
from samewise.runner.errors import ConfigError, Problem, nearest
from samewise.runner.processes.variables import prepare
from samewise.runner.records import shapes, sources
from samewise.runner.records.files import read_json, require_writable
from samewise.runner.records.found import RUN
from samewise.runner.records.json_text import to_json

if TYPE_CHECKING:
    from samewise.runner.config.compose import Composed
    from samewise.runner.exports.call import Call
    from samewise.runner.exports.runtimes import Runtime
    from samewise.runner.records.folder import RunFolder

KINDS = ("safetensors", "pt2", "aoti", "onnx", "executorch")

EXAMPLES = """examples:
  samewise export 3f2a --out digits                         weights.safetensors and model.pt2
  samewise export 3f2a --to onnx --out digits               weights.safetensors and model.onnx; needs samewise[export]
  samewise export 3f2a --to pt2,onnx --weights ema --out digits
  samewise verify digits                                    run its test vectors in every installed runtime

formats: safetensors  weights alone, by the model's names; written with every other format
         pt2          torch.export's program, for Python, and the starting point for ExecuTorch
         aoti         AOTInductor's package, compiled for this kind of CPU, for C++ and Python; needs a C++ compiler
         onnx         for onnxruntime in Python, C++, Java, C#, Node and browsers
         executorch   for phones and small devices; needs the package executorch
"""


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run", metavar="RUN", help=RUN)
    parser.add_argument(
        "overrides", nargs="*", metavar="KEY=VALUE", help="values to change in the run's config"
    )
    parser.add_argument(
        "--to",
        default="pt2",
        metavar="FORMATS",
        help=f"one or more of {', '.join(KINDS)}, separated by commas (default: pt2)",
    )
    parser.add_argument(
        "--out",
        type=Path,
        required=True,
        metavar="FOLDER",
        help="the folder to write: a new or an empty one",
    )
    add_checkpoint(parser)
    parser.add_argument(
        "--weights",
        metavar="NAME",
        help="use the weights kept by this callback, such as ema (default: the trained weights)",
    )
    parser.add_argument(
        "--module",
        metavar="NAME",
        help="export this module of the model, such as backbone (default: the model that the "
        "recipe calls)",
    )
    parser.add_argument(
        "--bare",
        action="store_true",
        help="leave out the batch transforms before the model, such as normalisation (default: "
        "include them)",
    )
    help_ = (
        "refuse a format whose results differ from the model's by more than this share of the "
        "largest number (default: 1e-4)"
    )
    parser.add_argument("--tolerance", type=float, default=1e-4, metavar="SHARE", help=help_)
    parser.add_argument(
        "--run-root", type=Path, default=Path("runs"), help="where to look for runs (default: runs)"
    )
    add_packages(parser)
    add_trust(parser)
    parser.add_argument("--json", action="store_true", help="print a JSON object")


def run(args: argparse.Namespace) -> int:
    from samewise.runner.config import saved

    to = [name for name in _kinds(args.to) if name != "safetensors"]
    if not 0 <= args.tolerance < 1:
        raise ConfigError(
            Problem(
                "--tolerance", "is not a valid share", args.tolerance, "at least 0 and less than 1"
            )
        )
    require_writable("--out", args.out)
    folder = saved.find(args.run, run_root=args.run_root)
    composed = saved.trusted_config_of(folder, [*args.overrides, "device=cpu"], trust=args.trust)
    prepare(composed.cfg.reproducibility)
    calls, about = _model(args, folder, composed)
    from samewise.runner.exports import folder as exports

    places = {call.part if len(calls) > 1 else "": call for call in calls}
    options: dict[str, Any] = {"to": to, "tolerance": args.tolerance, "about": about}
    found: dict[str, list[Runtime]] = {}
    try:
        for place, call in places.items():
            found[place] = exports.write(args.out / place, call, **options)
    except BaseException:  # a part alone is of no use, and would be in the way of the next attempt
        for place in found:
            exports.discard(args.out / place)
        raise
    if args.json:
        said = {place: [asdict(one) for one in formats] for place, formats in found.items()}
        formats = {"formats": said[""]} if "" in said else {"parts": said}
        print(
            to_json(
                {
                    "folder": str(args.out),
                    **{name: about[name] for name in ("run", "step", "average")},
                    **formats,
                }
            )
        )
        return 0
    for place, call in places.items():
        out, held = (
            args.out / place,
            {exports.formats.FORMATS[one.format].file: one.words for one in found[place]},
        )
        named = "".join(f", its {one}" for one in (about["average"], call.part) if one)
        print(f"{out}: {about['experiment']}, step {about['step']:,}{named}")
        for name, words in {"weights.safetensors": "by the model's own names", **held}.items():
            print(f"  {name:<22} {out.joinpath(name).stat().st_size / 1e6:8.2f} MB  {words}")
    print(
        "next:",
        *(f"  samewise verify {shlex.quote(str(args.out / place))}" for place in places),
        sep="\n",
    )
    return 0


def _kinds(given: str) -> list[str]:
    asked = [one.strip() for one in given.split(",") if one.strip()]
    for one in asked:
        if one not in KINDS:
            hint = (
                "TorchScript is deprecated: pt2 is for Python and C++, onnx for other runtimes"
                if "script" in one
                else nearest(one, KINDS)
            )
            raise ConfigError(
                Problem(
                    "--to",
                    "is not a format that models are exported to",
                    one,
                    ", ".join(KINDS),
                    hint,
                )
            )
    return list(dict.fromkeys(asked))


def _model(
    args: argparse.Namespace, folder: RunFolder, composed: Composed
) -> tuple[list[Call], dict[str, Any]]:
    """The model, or its forms, called on the first samples of the validation split.

    And facts about it.
    """
    import torch
    from omegaconf import OmegaConf

    from samewise.runner.data import streams
    from samewise.runner.data.dataset import without_transforms
    from samewise.runner.exports.call import call_in_form, observe
    from samewise.runner.optim.parametrise import merge
    from samewise.runner.records import kept_checkpoints
    from samewise.runner.torch_private import pytree
    from samewise.runner.training.evaluation import first_batch, models_to_evaluate
    from samewise.runner.training.restored import at_checkpoint

    note_weights(composed, args)
    run, step = at_checkpoint(
        composed, project.find(packages=args.package), folder, args.checkpoint
    )
    model, transform = (
        next(iter(models_to_evaluate(run, args.weights).values())).eval(),
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
    wanted = {
        name: form for name, form in forms.items() if args.module is None or name == args.module
    }
    calls = [
        call_in_form(form, name, model, loaded, transform, whole=not args.bare)
        for name, form in wanted.items()
    ]
    if not calls:
        call = observe(
            run.recipe, model, loaded, transform, module=args.module, whole=not args.bare
        )
        if not (
            call.whole or args.bare or args.module
        ):  # perhaps because the recipe calls the model for one sample after the other
            one = pytree.tree_map_only(
                torch.Tensor, torch.Tensor.contiguous, first_batch(run, "valid", 1)
            )
            alone = observe(run.recipe, model, one, transform)
            call = alone if alone.whole else call
        calls = [call]
    # of the trained weights (valid/loss) and of averages (ema/valid/loss)
    measured = kept_checkpoints.choose_checkpoint(folder.checkpoints, str(step)).metrics or {}
    metrics = {
        name: value
        for name, value in measured.items()
        if name.startswith(f"{args.weights}/valid/" if args.weights else "valid/")
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
        "average": args.weights,
        "metrics": {**metrics, "step": step} if metrics else {},
        "changed": [*sources.list_changes(folder.sources), *args.overrides],
        "data": {
            split: {name: value for name, value in one.items() if name != "classes"}
            for split, one in data.items()
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
