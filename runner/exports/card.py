"""README.md of an export: what the model is, what goes in and comes out, and how it is run; made of what export.json says."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any, Final

from samewise.runner.secrets import printable

_RUN: Final = {
    "pt2": "torch.export.load('{file}').module()({inputs})  # Python, torch {torch}",
    "aoti": "torch._inductor.aoti_load_package('{file}')({inputs})  # Python or C++, with torch {torch} and this kind of CPU",
    "onnx-int8": "onnxruntime.InferenceSession('{file}').run(None, {{{feeds}}})  # Python; likewise in Node, Java, C#, C++ and browsers",
    "executorch": "executorch.runtime.Runtime.get().load_program('{file}').load_method('forward').execute([{inputs}])  # likewise in C++, Kotlin and Swift",
    "onnx": "onnxruntime.InferenceSession('{file}').run(None, {{{feeds}}})  # Python; likewise in Node, Java, C#, C++ and browsers",
}
_SHOWN: Final = 100
"""Classes that are named."""


def card(said: Mapping[str, Any]) -> str:
    """The page, as Markdown.

    Args:
        said: What export.json says.
    """
    return "\n".join(_lines(said)) + "\n"


def _lines(said: Mapping[str, Any]) -> Iterator[str]:
    yield from (
        f"# {_cell(said['experiment'])}",
        "",
        f"A model trained and exported by samewise: run `{said['run']}`, step {said['step']:,}.",
        "",
        "| | |",
        "|---|---|",
    )
    environment = said.get("environment") or {}
    facts = {
        "model": said["model"].get("_target_", "") + (f", its `{said['module']}`" if said["module"] else ""),
        "data": "; ".join(f"{split}: {data.get('name')}, {data.get('size', 0):,} samples" for split, data in (said.get("data") or {}).items()),
        "metrics": ", ".join(f"{name} {value:.4g}" for name, value in said["metrics"].items() if name != "step"),
        "trained with": ", ".join(f"{name} {version}" for name, version in (environment.get("versions") or {}).items()),
        "on": str((environment.get("cpu") or {}).get("model") or ""),
        "weights": f"`weights.safetensors`, SHA-256 `{said['files'].get('weights.safetensors', '')}`",
    }
    yield from (f"| {name} | {_cell(value)} |" for name, value in facts.items() if value)
    yield from ("", "## What goes in and comes out", "", "| | dtype | shape of the example |", "|---|---|---|")
    for kind in ("inputs", "outputs"):
        yield from (f"| {kind[:-1]} `{_cell(name)}` | {form['dtype']} | {form['shape']} |" for name, form in said[kind].items())
    yield ""
    batch, sample = said["transforms"].get("batch") or [], said["transforms"].get("sample") or []
    if said["whole"]:
        yield "The files take a batch as the data set gives it: what comes before the model (`transforms.batch` in `export.json`) is in them."
    elif batch:
        yield from ("Before the files, a batch goes through these transforms:", "", "```json", json.dumps(batch, indent=2), "```")
    if sample:
        yield from ("Before that, each sample goes through these transforms, which are not in the files:", "", "```json", json.dumps(sample, indent=2), "```")
    if said.get("gives"):
        yield from ("", f"What comes out: {said['gives']}. The settings are under `recipe` in `export.json`.")
    if classes := said.get("classes"):
        names = ", ".join(f"{number} {_cell(name)}" for number, name in enumerate(classes[:_SHOWN]))
        yield from ("", f"Classes: {names}" + (f" and {len(classes) - _SHOWN:,} more, in `export.json`" if len(classes) > _SHOWN else ""))
    yield from ("", "## To run it", "")
    inputs, feeds = ", ".join(_plain(name) for name in said["inputs"]), ", ".join(f"'{name.replace('.', '_')}': {_plain(name)}" for name in said["inputs"])
    version = (environment.get("versions") or {}).get("torch", "")
    for name, form in said["formats"].items():
        if any(kind.startswith("torchvision.") for kind in form["operators"]):
            yield from ("`import torchvision` comes before this: some of its operators are that library's.", "")
        needs = f"Operators: {', '.join(form['operators'])}" if form["operators"] else ""
        if lost := form.get("accuracy"):
            words = f"in int8 {lost['metric']} is {lost['quantised']:.4g}, in float32 {lost['exact']:.4g}"
            yield from (f"On {lost['samples']:,} samples of the validation split, {words}; ranges of numbers are from samples of the training split.", "")
        yield from (
            "```python",
            _RUN[name].format(file=form["file"], inputs=inputs, feeds=feeds, torch=version),
            "```",
            "",
            f"{form['compared']}",
            "",
            needs,
            "",
        )
    yield "`vectors.safetensors` holds an input and what the model gives for it; `samewise verify FOLDER` runs it in every runtime that is here."


def _cell(text: str) -> str:
    return printable(str(text)).replace("|", "\\|").replace("\n", " ")


def _plain(name: str) -> str:
    return name.replace(".", "_")
