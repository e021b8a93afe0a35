"""The table of docs/export.md: each recipe's model in each format, exported and run on this machine. It takes a quarter of an hour.

python tests/docs/exports_table.py            print it
python tests/docs/exports_table.py --write    put it into the page
python tests/docs/exports_table.py ConvTasNet print the line of this model

Formats whose packages or compiler are missing say so. What does not end within the limit says that.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

PAGE = Path(__file__).resolve().parents[2] / "docs" / "export.md"
BEGIN, END = "<!-- exports: python tests/docs/exports_table.py --write -->\n", "<!-- /exports -->"
LIMIT_S = 150
MODELS = {
    "ResNet-18": ("resnet18_digits", ()),
    "Wav2Letter, from the recording on": ("wav2letter_spoken_digits", ()),
    "ConvTasNet": ("conv_tasnet_spoken_digits", ()),
    "the GAN's generator": ("gan_digits", ()),
    "ResNet-18 of recordings": ("audio_classification_spoken_digits", ()),
    "RetinaNet": ("retinanet_bccd", ()),
    "RetinaNet, `--module backbone`": ("retinanet_bccd", ("--module", "backbone")),
    "WaveRNN, one pass over known samples": ("wavernn_spoken_digits", ()),
}
FORMATS = ("pt2", "aoti", "onnx", "executorch")


def cell(run: Path, form: str, options: list[str], out: Path) -> dict[str, Any]:
    """One export, in this process: what verify says of it in each language, its size, milliseconds a sample beside eager's, and its operators."""
    import torch

    from samewise.runner.commands import export
    from samewise.runner.config import saved
    from samewise.runner.exports import clients, folder, formats
    from samewise.runner.training.determinism import prepare

    parser = argparse.ArgumentParser()
    export.configure(parser)
    args = parser.parse_args([str(run), "--out", str(out), "--trust", *options])
    found = saved.find(str(run), run_root=Path("runs"))
    composed = saved.config_of(found, ["device=cpu", "evaluate.batch_size=2"])
    prepare(composed.cfg.reproducibility)
    call, about = export._model(args, found, composed)
    folder.write(out, call, to=[form], tolerance=1e-4, about=about)
    held = [one for one in folder.verify(out, trusted=True) if one.format == form and one.sound is not None]
    load = formats.FORMATS[form].load(out / formats.FORMATS[form].file)
    samples = len(next(iter(call.inputs.values())))

    def eager() -> object:
        with torch.no_grad():
            return call.function(*call.inputs.values())

    times = [_milliseconds(one) / samples for one in (eager, lambda: load(call.inputs))]
    assert {one.language for one in clients.CLIENTS} >= {one.language for one in held} - {"Python"}
    said = {one.language: "the same bits" if one.same else f"{one.apart.relative:.1e}" if one.apart else one.words for one in held}
    size = (out / formats.FORMATS[form].file).stat().st_size
    return {"said": said, "size": size, "eager": times[0], "here": times[1], "operators": len(formats.FORMATS[form].kinds(out / formats.FORMATS[form].file))}


def _milliseconds(call: Callable[[], object]) -> float:
    """The median of some calls after the first."""
    call()
    taken = list[float]()
    for _ in range(15):
        began = time.perf_counter()
        call()
        taken.append(time.perf_counter() - began)
    return 1e3 * statistics.median(taken)


def in_words(found: dict[str, Any]) -> str:
    """One cell of the table."""
    agree = set(found["said"].values())
    said = next(iter(agree)) if len(agree) == 1 else ", ".join(f"{language} {words}" for language, words in found["said"].items())
    languages = f" ({', '.join(found['said'])})" if len(agree) == 1 and len(found["said"]) > 1 else ""
    operators = f", {found['operators']} operators" if found["operators"] else ""
    return f"{said}{languages}; {found['size'] / 1e6:.2f} MB; {found['here']:.2g} ms, eager {found['eager']:.2g}{operators}"


def table(models: list[str]) -> str:
    """The lines of these models, each in a process of its own."""
    lines = ["| model | " + " | ".join(f"`{one}`" for one in FORMATS) + " |", "|---" * (1 + len(FORMATS)) + "|"]
    with tempfile.TemporaryDirectory(prefix="samewise-exports-") as temporary:
        root, runs = Path(temporary), dict[str, Path]()
        for name, (experiment, options) in ((one, MODELS[one]) for one in models):
            if experiment not in runs:
                tiny = [f"experiment={experiment}", "debug=tiny", "max_steps=8", "evaluate.pictures=false", "tracking=none", f"run_root={root / 'runs'}"]
                subprocess.run([sys.executable, "-m", "samewise", "train", *tiny], check=True, capture_output=True)
                runs[experiment] = next(root.glob(f"runs/{experiment}/*"))
            cells = [_in_a_process(runs[experiment], form, options, root / f"{len(lines)}-{form}") for form in FORMATS]
            lines.append(f"| {name} | " + " | ".join(cells) + " |")
            print(lines[-1], file=sys.stderr, flush=True)
    return "\n".join(lines) + "\n"


def _in_a_process(run: Path, form: str, options: tuple[str, ...], out: Path) -> str:
    command = [sys.executable, __file__, "--cell", json.dumps([str(run), form, list(options), str(out)])]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_S, check=False)
    except subprocess.TimeoutExpired:
        return f"not done within {LIMIT_S} s"
    if done.returncode == 0:
        return in_words(json.loads(done.stdout.splitlines()[-1]))
    said = [line for line in done.stderr.splitlines() if line.startswith("refused: ")]
    return (said[-1] if said else f"refused: {done.stderr.strip().splitlines()[-1]}").partition(" (http")[0].replace("|", "\\|")[:200]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true")
    parser.add_argument("--cell", help=argparse.SUPPRESS)
    parser.add_argument("models", nargs="*", choices=[*MODELS, []], metavar="MODEL")
    args = parser.parse_args()
    if args.cell:
        from samewise.runner.errors import ConfigError

        run, form, options, out = json.loads(args.cell)
        try:
            print(json.dumps(cell(Path(run), form, options, Path(out))))
        except ConfigError as error:
            print(f"refused: {error.problems[0].message}", file=sys.stderr)
            return 2
        return 0
    made = table(args.models or list(MODELS))
    if args.write:
        before, _, rest = PAGE.read_text(encoding="utf-8").partition(BEGIN)
        PAGE.write_text(before + BEGIN + made + END + rest.partition(END)[2], encoding="utf-8")
    else:
        print(made)
    return 0


if __name__ == "__main__":
    sys.exit(main())
