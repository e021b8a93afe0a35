"""The table of docs/measurements.md: each recipe's model in each format, exported and run on this machine. It takes a quarter of an hour.

python tests/docs/exports_table.py                                    print it
python tests/docs/exports_table.py --write                            put it into the page
python tests/docs/exports_table.py --write --formats onnx ConvTasNet  put this cell into the page, and leave the others

--executorch and --flatbuffers name checkouts of their sources: each model's selective build is made of these, run, and its size given.
Formats whose packages or compiler are missing say so. What does not end within the limit says that.
"""

import argparse
import json
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

PAGE = Path(__file__).resolve().parents[2] / "docs" / "measurements.md"
BEGIN, END = "<!-- exports: python tests/docs/exports_table.py --write -->\n", "<!-- /exports -->"
LIMIT_S = 600
MODELS = {
    "ResNet-18": ("resnet18_digits", ()),
    "Wav2Letter, from the recording on": ("wav2letter_spoken_digits", ()),
    "Wav2Letter, `--bare`": ("wav2letter_spoken_digits", ("--bare",)),
    "ConvTasNet": ("conv_tasnet_spoken_digits", ()),
    "the GAN's generator": ("gan_digits", ()),
    "ResNet-18 of recordings": ("audio_classification_spoken_digits", ()),
    "RetinaNet": ("retinanet_bccd", ()),
    "RetinaNet, `--module backbone`": ("retinanet_bccd", ("--module", "backbone")),
    "WaveRNN, `--module conditioning`": ("wavernn_spoken_digits", ("--module", "conditioning")),
    "WaveRNN, `--module step`": ("wavernn_spoken_digits", ("--module", "step")),
}
FORMATS = ("pt2", "aoti", "onnx", "executorch", "executorch_portable")


def cell(run: Path, form: str, options: list[str], out: Path, sources: list[str]) -> dict[str, Any]:
    """One export, in this process: what verify says of it, its size, milliseconds a sample beside eager's, and its operators."""
    import torch

    from samewise.runner.commands import add_arguments, export
    from samewise.runner.config import saved
    from samewise.runner.exports import folder, formats
    from samewise.runner.exports.of_run import calls_of_run
    from samewise.runner.processes.variables import prepare

    parser = argparse.ArgumentParser()
    add_arguments(parser, export.ARGUMENTS)
    args = parser.parse_args([str(run), "--out", str(out), "--trust", *options])
    found = saved.find(str(run), run_root=Path("runs"))
    composed = saved.config_in(found.config, ["device=cpu"])
    prepare(composed.cfg.reproducibility)
    chosen = {name: getattr(args, name) for name in ("weights", "module", "bare")}
    (call,), about = calls_of_run(found, composed, composed.project, **chosen)
    folder.write(out, call, to=[form], tolerance=1e-4, about=about)
    held = [one for one in folder.run_test_vectors(out, trusted=True) if one.format == form and one.sound is not None]
    load = formats.FORMATS[form].load(out / formats.FORMATS[form].file)
    samples = len(next(iter(call.inputs.values())))

    def eager() -> object:
        with torch.no_grad():
            return call.function(*call.inputs.values())

    built = _selective(out, sources) if form == "executorch_portable" and sources else {}
    times = [_milliseconds(one) / samples for one in (eager, lambda: load(call.inputs))]
    one = held[0]
    said = {"Python": "the same bits" if one.same else f"{one.difference.relative:.1e}" if one.difference else f"refused: {one.description}"}
    if built:
        said["C++"] = built["said"]
    size = (out / formats.FORMATS[form].file).stat().st_size
    return {
        "said": said,
        "size": size,
        "eager": times[0],
        "here": times[1],
        "operators": len(formats.FORMATS[form].kinds(out / formats.FORMATS[form].file)),
        "built": built.get("size"),
    }


def _selective(out: Path, sources: list[str]) -> dict[str, Any]:
    """The result and the size of docs/examples/executorch, built for this export."""
    build = out.parent / "selective"  # one folder for all exports, so that shared kernels are built once
    folders = [f"-DEXPORT={out}", f"-DEXECUTORCH={sources[0]}", f"-DFLATBUFFERS={sources[1]}", f"-DPYTHON={sys.executable}"]
    for command in (["cmake", "-S", str(PAGE.parent / "examples" / "executorch"), "-B", str(build), *folders], ["cmake", "--build", str(build)]):
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    done = subprocess.run([str(build / "verify"), str(out)], capture_output=True, text=True, check=False)
    if done.returncode == 2:
        return {"said": done.stderr.strip(), "size": (build / "verify").stat().st_size}
    apart = [float(one) for one in re.findall(r"differs by (\S+) of", done.stdout)]
    return {"said": f"{max(apart):.1e}" if apart else "the same bits", "size": (build / "verify").stat().st_size}


def _milliseconds(call: Callable[[], object]) -> float:
    """The median time of several calls after the first."""
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
    built = f", built alone {found['built'] / 1e6:.2f} MB" if found["built"] else ""
    return f"{said}{languages}; {found['size'] / 1e6:.2f} MB; {_short(found['here'])} ms, eager {_short(found['eager'])}{operators}{built}"


def _short(number: float) -> str:
    return f"{number:.2g}" if number < 100 else f"{number:.0f}"


def compute_cells(models: list[str], kinds: list[str], sources: list[str], keep: Callable[[str, str, str], None]) -> None:
    """Compute each cell of these models and formats in a separate process, and pass it on at once."""
    with tempfile.TemporaryDirectory(prefix="samewise-exports-") as temporary:
        root, runs = Path(temporary), dict[str, Path]()
        for number, name in enumerate(models):
            experiment, options = MODELS[name]
            if experiment not in runs:
                tiny = [f"experiment={experiment}", "debug=tiny", "max_steps=8", "evaluate.pictures=false", "tracking=none", f"run_root={root / 'runs'}"]
                subprocess.run([sys.executable, "-m", "samewise", "train", *tiny], check=True, capture_output=True)
                runs[experiment] = next(root.glob(f"runs/{experiment}/*"))
            for kind in kinds:
                keep(name, kind, _in_a_process(runs[experiment], kind, options, root / f"{number}-{kind}", sources))


def read() -> dict[str, dict[str, str]]:
    """The cells of the page, by model and format."""
    lines = PAGE.read_text(encoding="utf-8").partition(BEGIN)[2].partition(END)[0].splitlines()
    rows = [[one.strip() for one in re.split(r"(?<!\\)\|", line)[1:-1]] for line in lines]
    columns = [one.strip("`") for one in rows[0][1:]]
    return {row[0]: dict(zip(columns, row[1:], strict=True)) for row in rows[2:]}


def write(cells: dict[str, dict[str, str]]) -> None:
    """Write the cells into the page."""
    lines = ["| model | " + " | ".join(f"`{one}`" for one in FORMATS) + " |", "|---" * (1 + len(FORMATS)) + "|"]
    lines += [f"| {name} | " + " | ".join(cells.get(name, {}).get(kind, "") for kind in FORMATS) + " |" for name in MODELS]
    before, _, rest = PAGE.read_text(encoding="utf-8").partition(BEGIN)
    PAGE.write_text(before + BEGIN + "\n".join(lines) + "\n" + END + rest.partition(END)[2], encoding="utf-8")


def _in_a_process(run: Path, form: str, options: tuple[str, ...], out: Path, sources: list[str]) -> str:
    command = [sys.executable, __file__, "--cell", json.dumps([str(run), form, list(options), str(out), sources])]
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
    parser.add_argument("--formats", help="some of them, with commas")
    for name in ("executorch", "flatbuffers"):
        parser.add_argument(f"--{name}", type=Path, help=f"a checkout of {name}'s sources")
    parser.add_argument("models", nargs="*", choices=[*MODELS, []], metavar="MODEL")
    args = parser.parse_args()
    if args.cell:
        from samewise.runner.errors import ConfigError

        run, form, options, out, sources = json.loads(args.cell)
        try:
            print(json.dumps(cell(Path(run), form, options, Path(out), sources)))
        except ConfigError as error:
            print(f"refused: {error.problems[0].message}", file=sys.stderr)
            return 2
        return 0
    cells = read()

    def keep(name: str, kind: str, words: str) -> None:
        cells.setdefault(name, {})[kind] = words
        print(f"{name}, {kind}: {words}", flush=True)
        if args.write:
            write(cells)

    sources = [str(args.executorch.resolve()), str(args.flatbuffers.resolve())] if args.executorch and args.flatbuffers else []
    compute_cells(args.models or list(MODELS), args.formats.split(",") if args.formats else list(FORMATS), sources, keep)
    return 0


if __name__ == "__main__":
    sys.exit(main())
