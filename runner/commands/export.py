"""Write a run's model for other runtimes, and compare each file with the model."""

import argparse
import shlex
from dataclasses import asdict
from pathlib import Path

from samewise.runner.commands import (
    CHANGES,
    CHECKPOINT,
    JSON,
    PACKAGES,
    RUN_ROOT,
    TRUST,
    note_weights,
)
from samewise.runner.config import project
from samewise.runner.exports.card import requirements
from samewise.runner.exports.names import DESCRIPTION, KINDS, require_sound
from samewise.runner.processes.variables import prepare
from samewise.runner.records.files import read_json, require_writable
from samewise.runner.records.found import RUN
from samewise.runner.records.json_text import to_json

EXAMPLES = """examples:
  samewise export 3f2a --out digits                         weights.safetensors and model.pt2
  samewise export 3f2a --to onnx --out digits               weights.safetensors and model.onnx; needs the extra `export`
  samewise export 3f2a --to pt2,onnx --weights ema --out digits
  samewise verify digits                                    run its test vectors in every installed runtime

formats: safetensors  weights alone, by the model's names; written with every other format
         pt2          torch.export's program, for Python, and the starting point for ExecuTorch
         aoti         AOTInductor's package, compiled for this kind of CPU, for C++ and Python; needs a C++ compiler
         onnx         for onnxruntime in Python, C++, Java, C#, Node and browsers
         executorch   for phones and small devices, with XNNPACK's kernels; needs the extra `executorch`
         executorch_portable   the same with portable kernels alone, which are slow and small
"""

ARGUMENTS = {
    "run": {"metavar": "RUN", "help": RUN},
    **CHANGES,
    "--to": {
        "default": "pt2",
        "metavar": "FORMATS",
        "help": f"one or more of {', '.join(KINDS)}, separated by commas (default: pt2)",
    },
    "--out": {
        "type": Path,
        "required": True,
        "metavar": "FOLDER",
        "help": "the folder to write: a new or an empty one",
    },
    **CHECKPOINT,
    "--weights": {
        "metavar": "NAME",
        "help": "use the weights kept by this callback, such as ema (default: the trained weights)",
    },
    "--module": {
        "metavar": "NAME",
        "help": "export this module of the model, such as backbone (default: the model that the "
        "recipe calls)",
    },
    "--bare": {
        "action": "store_true",
        "help": "leave out the batch transforms before the model, such as normalisation (default: "
        "include them)",
    },
    "--tolerance": {
        "type": float,
        "default": 1e-4,
        "metavar": "SHARE",
        "help": "refuse a format whose results differ from the model's by more than this share of the "
        "largest number (default: 1e-4)",
    },
    **RUN_ROOT,
    **PACKAGES,
    **TRUST,
    **JSON,
}


def run(args: argparse.Namespace) -> int:
    from samewise.runner.config import saved

    to = require_sound(args.to.split(","), args.tolerance)
    require_writable("--out", args.out)
    folder = saved.find(args.run, run_root=args.run_root)
    composed = saved.trusted_config_of(folder, [*args.overrides, "device=cpu"], trust=args.trust)
    prepare(composed.cfg.reproducibility)
    note_weights(composed, args)
    # Imports torch, which must come after the variables
    from samewise.runner.exports.formats import FORMATS
    from samewise.runner.exports.of_run import calls_of_run, export_run

    calls, about = calls_of_run(
        folder,
        composed,
        project.find(packages=args.package),
        **{
            name: getattr(args, name)
            for name in ("overrides", "checkpoint", "weights", "module", "bare")
        },
    )
    exported = export_run(args.out, calls, about, to=to, tolerance=args.tolerance)
    if args.json:
        # The formats of the only part, or of each part by name
        formats = {
            part.module: [asdict(runtime) for runtime in part.formats] for part in exported.parts
        }
        entry = (
            {"parts": formats} if len(formats) > 1 else {"formats": next(iter(formats.values()))}
        )
        facts = {name: getattr(exported, name) for name in ("folder", "run", "step", "average")}
        print(to_json(facts | entry))
        return 0
    for part in exported.parts:
        files = {FORMATS[runtime.format].file: runtime.description for runtime in part.formats}
        details = "".join(f", its {name}" for name in (exported.average, part.module) if name)
        print(f"{part.folder}: {exported.experiment}, step {exported.step:,}{details}")
        for name, comparison in {
            "weights.safetensors": "by the model's own names",
            **files,
        }.items():
            size = (part.folder / name).stat().st_size / 1e6
            print(f"  {name:<22} {size:8.2f} MB  {comparison}")
        for form in read_json(part.folder / DESCRIPTION)["formats"].values():
            if needs := requirements(form):
                print(f"{form['file']} needs {needs}")
    print(
        "next:",
        *(f"  samewise verify {shlex.quote(str(part.folder))}" for part in exported.parts),
        sep="\n",
    )
    return 0
