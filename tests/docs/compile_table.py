"""The table of docs/measurements.md: whether each recipe keeps its bits where it is compiled, or laid out channels_last, and how long a step takes then.

python tests/docs/compile_table.py                 print it
python tests/docs/compile_table.py --write         put it into the page
python tests/docs/compile_table.py classification  print the line of this recipe

A step is taken with and without, from the same state, and looked at closely, as `samewise verify` does. Where the bits differ, the modules of the model are
compiled one by one, in the order in which they are called, on what they are given without: the first that differs is named. Six minutes on two quiet cores.
"""

import argparse
import copy
import json
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

PAGE = Path(__file__).resolve().parents[2] / "docs" / "measurements.md"
BEGIN, END = "<!-- compile: python tests/docs/compile_table.py --write -->\n", "<!-- /compile -->"
LIMIT_S = 1800
RECIPES = {
    "classification": ("experiment=resnet18_digits", "model.width=8"),
    "audio_classification": ("experiment=audio_classification_spoken_digits", "model.width=8"),
    "detection": ("experiment=retinanet_bccd", "batch_size=2"),
    "speech_recognition": ("experiment=wav2letter_spoken_digits", "model.width=16", "model.top_width=32"),
    "separation": ("experiment=conv_tasnet_spoken_digits",),
    "vocoder": ("experiment=wavernn_spoken_digits",),
    "adversarial": ("experiment=gan_digits", "~callbacks.ema", "evaluate.monitor=valid/energy_distance"),
}
ALWAYS = ("debug=tiny", "device=cpu", "tracking=none", "callbacks=none", "evaluate.pictures=false", "loader.num_workers=0", "max_steps=40")
COLUMNS = {"compile=default": ("compile=default",), "compile=max": ("compile=max",), "memory_format=channels_last": ("memory_format=channels_last",)}
STEPS = 12


def cell(recipe: str, options: Sequence[str]) -> str:
    """What the options do to the bits and the time of a recipe's step, in words."""
    import torch

    from samewise.runner.records.digest import value_digest
    from samewise.runner.training.same_bits.compiled import Compiled
    from samewise.runner.training.state import state_of
    from samewise.runner.verify import step_inspection

    def by_values(value: Any) -> int | str:
        return value_digest(value.contiguous() if isinstance(value, torch.Tensor) else value)

    step_inspection.value_digest = by_values  # otherwise a tensor with another memory layout counts as different
    with tempfile.TemporaryDirectory() as folder:
        plain = _built([*RECIPES[recipe], "memory_format=contiguous"], Path(folder) / "plain")
        other = _built([*RECIPES[recipe], "memory_format=contiguous", *options], Path(folder) / "other")
        before = copy.deepcopy(state_of(plain))  # a step changes the weights in place
        without, found = (step_inspection.inspect_step(run, copy.deepcopy(before))[0] for run in (plain, other))
        first = _first(without, found)
        where = ""
        if first is not None and isinstance(other.network, Compiled):
            where = _module(_built(RECIPES[recipe], Path(folder) / "looked_into"), other)
        same = "the same bits" if first is None else f"other bits, from {first} on" + (f"; alone, {where}" if where else "")
        return f"{same}; {_ratio(plain, other):.2f} of the time"


def _built(overrides: Sequence[str], folder: Path) -> Any:
    from samewise.runner.config.compose import compose
    from samewise.runner.config.project import Project
    from samewise.runner.processes.variables import prepare
    from samewise.runner.records.folder import RunFolder
    from samewise.runner.training.build import build

    project = Project(Path())
    composed = compose([*overrides[:1], *ALWAYS, *overrides[1:]], project=project)
    prepare(composed.cfg.reproducibility)
    folder.mkdir()
    return build(composed, project, RunFolder(folder))


def _first(without: Sequence[Any], found: Sequence[Any]) -> str | None:
    """The first difference of a step among the values that both inspections show: the inside of a compiled model cannot be inspected."""
    said: dict[str, Any] = {}
    for one in without:
        said.setdefault(_name(one), []).append(one.value)
    for one in found:
        values = said.get(_name(one))
        if values and one.value != values.pop(0):
            return _name(one)
    return None


def _name(noted: Any) -> str:
    return str(noted) if not noted.name.startswith("model (") else str(noted).partition(" (")[0].replace("module model", "whole model")


def _module(run: Any, compiled: Any) -> str:
    """The first of the model's modules that gives other bits or gradients when compiled alone; submodules come before their parents."""
    import torch
    from torch import Tensor

    from samewise.runner.training.batches import TrainingBatches
    from samewise.runner.training.loop import train_step

    called = list[tuple[str, Any, Any, Any]]()

    def note(name: str, module: Any, given: Any, named: Any, output: Any) -> None:
        if isinstance(output, Tensor) and not named and all(isinstance(one, Tensor) for one in given):
            called.append((name, module, [one.detach().clone() for one in given], torch.default_generator.get_state()))

    hooks = [
        module.register_forward_hook(lambda module, given, named, output, name=name: note(name, module, given, named, output), with_kwargs=True)
        for name, module in run.model.named_modules()
    ]
    train_step(run, next(TrainingBatches(run)))
    for hook in hooks:
        hook.remove()
    tried = set[str]()
    for name, module, given, generator in called:
        form = f"{module} {[(tuple(one.shape), one.stride()) for one in given]}"
        if form in tried or not name:
            continue
        tried.add(form)
        results = list[list[Tensor]]()
        for call in (module, compiled.strategy.compiled(module)):
            torch.default_generator.set_state(generator)
            inputs = [one.clone().requires_grad_(one.is_floating_point()) for one in given]
            module.zero_grad()
            output = call(*inputs)
            output.backward(torch.linspace(-1, 1, output.numel()).view(output.shape))
            gradients = [one.grad.clone() for one in (*inputs, *module.parameters()) if one.grad is not None]
            results.append([output.detach(), *gradients])
        same = [torch.equal(one, two) for one, two in zip(*results, strict=True)]
        if not all(same):
            return f"{name} ({type(module).__name__}) gives other {'values' if not same[0] else 'gradients'}"
    return "every module keeps its bits"


def _ratio(plain: Any, other: Any) -> float:
    """The median time of a step with the options, divided by that without them, measured alternately."""
    from samewise.runner.training.batches import TrainingBatches
    from samewise.runner.training.loop import train_step

    batches, taken = [TrainingBatches(run) for run in (plain, other)], (list[float](), list[float]())
    for turn in range(STEPS + 1):
        for place in (0, 1) if turn % 2 else (1, 0):
            batch = next(batches[place])
            began = time.perf_counter()
            train_step((plain, other)[place], batch)
            taken[place].append(time.perf_counter() - began)
    return statistics.median(taken[1][1:]) / statistics.median(taken[0][1:])


def table(recipes: Sequence[str]) -> str:
    """The lines of these recipes, each cell computed in a separate process."""
    lines = ["| recipe | " + " | ".join(f"`{one}`" for one in COLUMNS) + " |", "|---" * (1 + len(COLUMNS)) + "|"]
    for recipe in recipes:
        cells = [_in_a_process(recipe, options) for options in COLUMNS.values()]
        lines.append(f"| `{recipe}` | " + " | ".join(cells) + " |")
        print(lines[-1], file=sys.stderr, flush=True)
    return "\n".join(lines) + "\n"


def _in_a_process(recipe: str, options: Sequence[str]) -> str:
    command = [sys.executable, __file__, "--cell", json.dumps([recipe, list(options)])]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_S, check=False)
    except subprocess.TimeoutExpired:
        return f"not done within {LIMIT_S} s"
    if done.returncode == 0:
        return done.stdout.splitlines()[-1]
    said = [line for line in done.stderr.splitlines() if line.startswith("refused: ")]
    message = said[-1] if said else f"fails: {done.stderr.strip().splitlines()[-1]}"
    return re.sub(r"[^\s(]*/site-packages/", "", message).replace("|", "\\|")[:240]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true")
    parser.add_argument("--cell", help=argparse.SUPPRESS)
    parser.add_argument("recipes", nargs="*", choices=[*RECIPES, []], metavar="RECIPE")
    args = parser.parse_args()
    if args.cell:
        from samewise.runner.errors import SamewiseError

        try:
            print(cell(*json.loads(args.cell)))
        except SamewiseError as error:
            print(f"refused: {getattr(error.problems[0], 'message', error.problems[0])}", file=sys.stderr)
            return 2
        return 0
    made = table(args.recipes or list(RECIPES))
    if args.write:
        before, _, rest = PAGE.read_text(encoding="utf-8").partition(BEGIN)
        PAGE.write_text(before + BEGIN + made + END + rest.partition(END)[2], encoding="utf-8")
    else:
        print(made)
    return 0


if __name__ == "__main__":
    sys.exit(main())
