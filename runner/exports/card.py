"""Write README.md of an export from export.json: the model, its inputs, how to run it."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any, Final

from samewise.runner.secrets import printable

_RUN: Final = {
    "pt2": (
        "Python, torch {torch}",
        "import torch{also}\n\ntorch.export.load('{file}').module()({inputs})",
    ),
    "aoti": (
        "Python or C++, with torch {torch} and the kind of CPU that it was compiled for",
        "import torch, torchvision\n\ntorch._inductor.aoti_load_package('{file}')({inputs})",
    ),
    "onnx": (
        "Python; likewise Node, Java, C#, C++ and browsers",
        "import onnxruntime\n\nonnxruntime.InferenceSession('{file}').run(None, {{{feeds}}})",
    ),
    "executorch": (
        "Python; likewise C++, Kotlin and Swift",
        "from executorch.runtime import "
        "Runtime\n\nRuntime.get().load_program('{file}').load_method('forward').execute([{inputs}])",
    ),
}
_UNCHECKED: Final = ("aoti", "executorch")
"""Formats that lack the checks of sizes that torch.export's program has."""
_MAX_CLASSES: Final = 100
"""Number of classes to name."""


def card(description: Mapping[str, Any]) -> str:
    """Return the page, as Markdown."""
    return "\n".join(_lines(description)) + "\n"


def _lines(description: Mapping[str, Any]) -> Iterator[str]:
    yield from (
        f"# {_cell(description['experiment'])}",
        "",
        f"A model trained and exported by samewise: run `{description['run']}`, step "
        f"{description['step']:,}.",
        "",
    )
    if average := description.get("average"):
        name = _cell(average)
        yield from (
            f"The weights are the average `{name}` of those in training, not the trained "
            f"weights themselves. Its metrics begin with `{name}/`.",
            "",
        )
    yield from (
        "| | |",
        "|---|---|",
    )
    environment, metrics = (
        description.get("environment") or {},
        {name: value for name, value in description["metrics"].items() if name != "step"},
    )
    facts = {
        "model": description["model"].get("_target_", "")
        + (f", its `{description['module']}`" if description["module"] else ""),
        "data": "; ".join(
            f"{split}: {data.get('name')}, {data.get('size', 0):,} samples"
            for split, data in (description.get("data") or {}).items()
        ),
        "metrics": ", ".join(f"{name} {value:.4g}" for name, value in metrics.items())
        or "none, since these weights were not evaluated at this step",
        "trained with": ", ".join(
            f"{name} {version}" for name, version in (environment.get("versions") or {}).items()
        ),
        "on": str((environment.get("cpu") or {}).get("model") or ""),
        "weights": "`weights.safetensors`, SHA-256 "
        f"`{description['files'].get('weights.safetensors', '')}`",
    }
    yield from (f"| {name} | {_cell(value)} |" for name, value in facts.items() if value)
    if changed := description.get("changed"):
        moment = (
            "the metrics were measured, so they may not be this model's"
            if metrics
            else "the training"
        )
        yield from ("", f"Changed since {moment}: {'; '.join(map(_cell, changed))}.")
    yield from (
        "",
        "## Inputs and outputs",
        "",
        "| | dtype | shape of the example |",
        "|---|---|---|",
    )
    for kind in ("inputs", "outputs"):
        yield from (
            f"| {kind[:-1]} `{_cell(name)}` | {form['dtype']} | {form['shape']} |"
            for name, form in description[kind].items()
        )
    if description["formats"]:
        yield from _size_lines(description["formats"])
    yield ""
    batch, sample = (
        description["transforms"].get("batch") or [],
        description["transforms"].get("sample") or [],
    )
    if description["whole"]:
        yield (
            "The files take a batch as the data set gives it: they contain the transforms "
            "before the model (`transforms.batch` in `export.json`)."
        )
    elif batch:
        yield from (
            "Apply these transforms to a batch first; they are not in the files:",
            "",
            "```json",
            json.dumps(batch, indent=2),
            "```",
        )
    if sample:
        yield from (
            "Before that, apply these transforms to each sample; they are not in the files:",
            "",
            "```json",
            json.dumps(sample, indent=2),
            "```",
        )
    if preparation := description.get("preparation"):
        yield from (
            "",
            "The data set makes a sample of a file as follows, which comes first and is "
            "not in the files either (`preparation` in `export.json`):",
            "",
        )
        yield from (
            f"- {_cell(name).replace('_', ' ')}: {_cell(value)}"
            for name, value in preparation.items()
        )
    if description.get("gives"):
        yield from (
            "",
            f"Output: {description['gives']}. The settings are under `recipe` in `export.json`.",
        )
    if classes := description.get("classes"):
        names = ", ".join(f"`{_cell(name)}`" for name in classes[:_MAX_CLASSES])
        yield from (
            "",
            f"Classes, by number from 0: {names}"
            + (
                f" and {len(classes) - _MAX_CLASSES:,} more, in `export.json`"
                if len(classes) > _MAX_CLASSES
                else ""
            ),
        )
    yield from ("", "## How to run it", "")
    inputs, feed_dict = (
        ", ".join(_plain(name) for name in description["inputs"]),
        # The ONNX file's names have "_" in place of "."
        ", ".join(f"'{name.replace('.', '_')}': {_plain(name)}" for name in description["inputs"]),
    )
    version = (environment.get("versions") or {}).get("torch", "")
    for name, form in description["formats"].items():
        imports = (
            ", torchvision  # some of the operators are that library's"
            if any(kind.startswith("torchvision.") for kind in form["operators"])
            else ""
        )
        place, code = (
            template.format(
                file=form["file"], inputs=inputs, feeds=feed_dict, torch=version, also=imports
            )
            for template in _RUN[name]
        )
        yield from (f"### `{form['file']}`", "", f"{place}:", "", "```python", code, "```", "")
        yield from (f"On the test vectors, compared with the model itself: {form['compared']}.", "")
        if form["operators"]:
            yield from (f"Operators: {', '.join(form['operators'])}", "")
    yield (
        "`vectors.safetensors` contains an input and the model's output for it; `samewise "
        "verify FOLDER` runs it in every runtime that is installed."
    )


def _cell(text: str) -> str:
    # A bar would end the table's cell
    return printable(str(text)).replace("|", "\\|").replace("\n", " ")


def _size_lines(formats: Mapping[str, Mapping[str, Any]]) -> Iterator[str]:
    rule = (
        "a number is fixed; a name such as n1 can vary, as far as the model allows; the same "
        "name is the same size"
    )
    yield from ("", f"Sizes of the inputs that each file takes: {rule}.", "")
    for form in formats.values():
        yield f"- `{form['file']}`: " + ", ".join(
            f"`{_cell(name)}` [{', '.join(map(str, sizes))}]"
            for name, sizes in form["sizes"].items()
        )
    for name in _UNCHECKED:
        if name in formats and any(
            isinstance(size, str) for sizes in formats[name]["sizes"].values() for size in sizes
        ):
            warning = (
                "does not check sizes that can vary: at one that the model does not allow, its "
                "results may be wrong without an error"
            )
            yield from ("", f"`{formats[name]['file']}` {warning}.")


def _plain(name: str) -> str:
    return name.replace(".", "_")
