"""Train a run again, and report whether the bits are the same or where they diverge."""

import argparse
from dataclasses import asdict
from pathlib import Path

from samewise.runner.commands import CHANGES, JSON, PACKAGES, RUN_ROOT, TRUST
from samewise.runner.config import project as projects
from samewise.runner.errors import ConfigError
from samewise.runner.processes.variables import prepare, use_own_inductor_cache
from samewise.runner.records.folder import RunFolder
from samewise.runner.records.json_text import to_json
from samewise.runner.verify.request import Request

EXAMPLES = """examples:
  samewise verify runs/resnet18_digits/3f2a9c81d0b4        train it all again and compare every step
  samewise verify 3f2a --steps 50                          the first 50 steps
  samewise verify 3f2a --audit                             three parts, each from one kept checkpoint to the next
  samewise verify 3f2a loader.num_workers=3                with three workers: the same bits
  samewise verify 3f2a seed=1                              another seed: diverges at step 1
  samewise verify 61df...0b --uri http://tracking:5000     by its MLflow run id, from MLflow alone: its folder may be gone
  samewise verify result.bundle                            a bundle from `samewise bundle`, with the code installed here
  samewise verify digits                                   an export, in every runtime that is installed

exit codes: 0 the same bits; 1 they differ, or the environments cannot be compared; 2 the input was wrong
"""

ARGUMENTS = {
    "run": {
        "metavar": "RUN",
        "help": "a run's folder or name, the start of its fingerprint, its MLflow run id or page, "
        "a bundle's file, or an export's folder",
    },
    **CHANGES,
    "--steps": {
        "type": int,
        "help": "how many steps to compare, with --audit of each part (default: all)",
    },
    "--audit": {
        "nargs": "?",
        "const": 3,
        "type": int,
        "metavar": "N",
        "help": "train only N parts of the run (default: 3), each from one kept checkpoint to the "
        "next; the same parts each time",
    },
    "--coarse": {
        "action": "store_true",
        "help": "stop at the first step that differs; without this, the step is repeated to name "
        "the first tensor that differs",
    },
    "--anyway": {
        "action": "store_true",
        "help": "train and compare even if the environment would change the bits",
    },
    **RUN_ROOT,
    "--uri": {
        "help": "take the run from this MLflow store (sqlite:///FILE, http://HOST:5000); MLflow's "
        "tokens are sent there"
    },
    "--project": {
        "type": Path,
        "metavar": "FOLDER",
        "help": "the folder of the pyproject.toml with your own packages (default: the current one)",
    },
    **PACKAGES,
    **TRUST,
    **JSON,
}


def run(args: argparse.Namespace) -> int:
    from samewise.runner.bundles.received import open_received
    from samewise.runner.exports.names import UNFINISHED, is_unfinished

    request = request_of(args)
    if Path(args.run, "export.json").is_file():
        return _verify_export(args)
    ConfigError.raise_if(
        is_unfinished(Path(args.run)),
        "RUN",
        f"is {UNFINISHED}",
        args.run,
        hint="delete it, and run `samewise export` again",
    )
    with open_received(args.run, run_root=args.run_root, uri=args.uri, trust=args.trust) as folder:
        return print_verdict(args, folder, request)


def request_of(args: argparse.Namespace) -> Request:
    """Return the request that the arguments make."""
    return Request(**{name: getattr(args, name) for name in Request.__dataclass_fields__})


def print_verdict(args: argparse.Namespace, folder: RunFolder, request: Request) -> int:
    """Verify a run and print the result; return the command's exit code."""
    composed = request.config_of(folder, trust=args.trust)
    prepare(composed.cfg.reproducibility)
    # Imports torch, which must come after the variables
    from samewise.runner.verify.verdict import verify_run

    verdict = verify_run(
        folder, composed, projects.find(args.project, packages=args.package), request
    )
    print(to_json(asdict(verdict)) if args.json else "\n".join(verdict.messages))
    return 0 if verdict.same else 1


def _verify_export(args: argparse.Namespace) -> int:
    """Run an export's files on its test vectors."""
    # Before torch is imported, which would name a folder in /tmp that others can fill with code
    use_own_inductor_cache()
    from samewise.runner.exports.folder import run_test_vectors

    ConfigError.raise_if(
        args.overrides or args.steps or args.uri or args.audit,
        "verify",
        "an export is verified by its test vectors: nothing is trained",
        expected="samewise verify FOLDER",
    )
    runtimes = run_test_vectors(Path(args.run), trusted=args.trust)
    if args.json:
        print(
            to_json(
                {"same": all(x.same for x in runtimes), "formats": [asdict(x) for x in runtimes]}
            )
        )
    else:
        for x in runtimes:
            mark = "not run" if x.sound is None else "sound" if x.sound else "WRONG"
            print(f"{x.format:<12} {mark:<8} {x.description}")
    return 1 if any(x.sound is False for x in runtimes) else 0
