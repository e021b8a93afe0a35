"""Write README.md of an export from export.json: the model, its inputs, how to run it."""

from collections.abc import Mapping, Sequence
from typing import Any, Final

from samewise.runner.secrets import printable

_TEMPLATES: Final = {
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
_RUN: Final = {**_TEMPLATES, "executorch_portable": _TEMPLATES["executorch"]}
_UNCHECKED: Final = ("aoti", "executorch", "executorch_portable")
"""Formats that lack the checks of sizes that torch.export's program has."""


def card(description: Mapping[str, Any]) -> str:
    """Return the page, as Markdown."""
    average = description.get("average")
    environment: Mapping[str, Any] = description.get("environment") or {}
    versions: Mapping[str, str] = environment.get("versions") or {}
    metrics = [(name, x) for name, x in description["metrics"].items() if name != "step"]
    facts = {
        "run": f"{description['run']}, step {description['step']:,}",
        "weights": f"the average `{average}` of those in training" if average else "as trained",
        "model": str(description["model"].get("_target_", "")),
        "module": description["module"],
        "data": "; ".join(
            f"{split}: {data.get('name')}, {data.get('size', 0):,} samples"
            for split, data in (description.get("data") or {}).items()
        ),
        "metrics": ", ".join(f"{name} {value:.4g}" for name, value in metrics)
        or "none, since these weights were not evaluated at this step",
        "trained with": ", ".join(f"{name} {version}" for name, version in versions.items()),
        "changed since": "; ".join(description.get("changed") or ()),
        "output": description.get("gives"),
    }
    forms = [
        (kind[:-1], name, form)
        for kind in ("inputs", "outputs")
        for name, form in description[kind].items()
    ]
    transforms = "contain" if description["whole"] else "do not contain"
    return "\n".join(
        [
            f"# {_cell(description['experiment'])}",
            "\nA model trained and exported by samewise.\n\n| | |\n|---|---|",
            *(f"| {name} | {_cell(value)} |" for name, value in facts.items() if value),
            "\n## Inputs and outputs\n\n| | dtype | shape of the example |\n|---|---|---|",
            *(
                f"| {kind} `{_cell(name)}` | {form['dtype']} | {form['shape']} |"
                for kind, name, form in forms
            ),
            f"\nThe files {transforms} the transforms of a batch before the model. `export.json` has "
            "these, and what comes first: `transforms`, and `preparation`, how the data set makes a "
            "sample of a file. It also has the classes by number, the recipe's settings and the "
            "sizes that each input may have.\n\n## How to run it\n",
            *(
                _usage(name, form, list(description["inputs"]), versions.get("torch", ""))
                for name, form in description["formats"].items()
            ),
            "`vectors.safetensors` contains an input and the model's output for it; `samewise "
            "verify FOLDER` runs it in every runtime that is installed.\n",
        ]
    )


def requirements(form: Mapping[str, Any]) -> str:
    """Return what a format's program needs on a device; "" if it plans no memory."""
    return (
        f"{form['memory'] / 1e6:.2f} MB of planned memory and {', '.join(form['operators'])}"
        if form["memory"] is not None
        else ""
    )


def _usage(name: str, form: Mapping[str, Any], inputs: Sequence[str], torch: str) -> str:
    """Return how to run a format's file, and how it compares with the model."""
    # In Python and in ONNX, names have "_" in place of "."
    plain = [entry.replace(".", "_") for entry in inputs]
    needs_torchvision = any(kind.startswith("torchvision.") for kind in form["operators"])
    place, code = (
        template.format(
            file=form["file"],
            inputs=", ".join(plain),
            feeds=", ".join(f"'{entry}': {entry}" for entry in plain),
            torch=torch,
            also=", torchvision  # some of the operators are that library's" * needs_torchvision,
        )
        for template in _RUN[name]
    )
    needs = f" Needs {requirements(form)}." if requirements(form) else ""
    unchecked = " It does not check the inputs' sizes: a wrong one may give wrong results."
    return (
        f"### `{form['file']}`\n\n{form['bytes'] / 1e6:.2f} MB. {place}:\n\n```python\n{code}\n```\n\n"
        f"On the test vectors, compared with the model itself: {form['compared']}.{needs}"
        f"{unchecked * (name in _UNCHECKED)}\n"
    )


def _cell(text: object) -> str:
    # A bar would end the table's cell
    return printable(str(text)).replace("|", "\\|").replace("\n", " ")
