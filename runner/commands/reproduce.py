"""Train a bundle's run again in a rebuilt environment, and report whether the bits are the same."""

import argparse
import contextlib
import re
import sys
import tempfile
from collections.abc import Generator
from pathlib import Path
from typing import Any

from samewise.runner.bundles.archive import CODE, DATA, FACTS, LOCK, RUN, Contents
from samewise.runner.commands import JSON, TRUST, add_arguments, verify
from samewise.runner.errors import ConfigError, NotTrusted, Problem
from samewise.runner.records import shapes
from samewise.runner.records.files import (
    damaged_file,
    parse_json,
    read_json,
    require_shape,
    require_writable,
)
from samewise.runner.records.folder import RunFolder

EXAMPLES = """examples:
  samewise reproduce result.bundle                                  check all parts, describe the bundle, run nothing
  samewise reproduce result.bundle --expect 5d1e...a9 --trust       check it, install its packages into a new environment, train, compare
  samewise reproduce result.bundle --here --trust                   with the packages and the samewise installed here
  samewise reproduce result.bundle --trust dataset.root=/data/coco  your copy of the data is here

exit codes: 0 the same bits; 1 they differ, or the environments cannot be compared; 2 the input was wrong, such as an altered bundle;
4 the bundle is intact, but nothing was run without --trust
"""

ARGUMENTS = {
    "bundle": {"type": Path, "metavar": "BUNDLE", "help": "a file that `samewise bundle` wrote"},
    "overrides": {
        "nargs": "*",
        "default": [],
        "metavar": "KEY=VALUE",
        "help": "values to change in the run's config, such as where the data are",
    },
    "--expect": {
        "metavar": "DIGEST",
        "help": "the identity that the bundle must have, as its author gave it",
    },
    "--out": {
        "type": Path,
        "metavar": "FOLDER",
        "help": "unpack and rebuild the bundle in this folder, and keep it (default: a temporary "
        "folder)",
    },
    "--here": {
        "action": "store_true",
        "help": "use the packages and the samewise installed here; rebuild nothing",
    },
    "--steps": {"type": int, "help": "how many steps to compare (default: all)"},
    "--anyway": {
        "action": "store_true",
        "help": "train and compare even if the environment would change the bits",
    },
    **TRUST,
    **JSON,
}


def run(args: argparse.Namespace) -> int:
    from samewise.runner.bundles import archive, data_files, rebuilding
    from samewise.runner.config import saved

    ConfigError.raise_if(
        args.steps is not None and args.steps < 1,
        "--steps",
        "is too small",
        args.steps,
        "at least 1",
    )
    with _place(args.out) as folder:
        contents = archive.unpack(args.bundle, folder, expect=args.expect)
        facts = _facts(folder, args.bundle, contents)
        print(
            f"{args.bundle}: all {len(contents.parts)} parts match the manifest; identity "
            f"{contents.identity}",
            file=sys.stderr,
        )
        # After the bundle is checked, so that the result is known without --trust too
        _require_trust(args, facts)
        run = RunFolder(folder / archive.RUN)
        files = data_files.require(
            _data(folder)["files"], saved.config_in(run.config, args.overrides).whole
        )
        print(
            f"the data match: {files} files; the fingerprints of the samples are compared "
            "during training",
            file=sys.stderr,
        )
        arguments = _verify_arguments(args, run, folder)
        if args.here:
            with rebuilding.importable(folder):
                return _verify_here(arguments, run)
        interpreter = rebuilding.make_environment(folder, python=facts["python"])
        return rebuilding.train_in(interpreter, folder, arguments)


@contextlib.contextmanager
def _place(out: Path | None) -> Generator[Path]:
    """Yield the folder to unpack the bundle into."""
    if out is None:
        with tempfile.TemporaryDirectory(prefix="samewise-reproduce-") as temporary:
            yield Path(temporary, "bundle")
        return
    ConfigError.raise_if(
        out.exists() and (not out.is_dir() or any(out.iterdir())),
        "--out",
        "already exists and is not overwritten",
        str(out),
        "a new or an empty folder",
    )
    require_writable("--out", out)
    yield out


def _facts(folder: Path, bundle: Path, contents: Contents) -> dict[str, Any]:
    """Return the bundle's facts about its run.

    Raises:
        ConfigError: A part is missing, or the facts differ from the run's summary.
    """
    needed = (
        FACTS,
        DATA,
        LOCK,
        f"{CODE}/pyproject.toml",
        f"{RUN}/config.yaml",
        f"{RUN}/summary.json",
        f"{RUN}/trace.jsonl",
    )
    ConfigError.raise_all(
        Problem(f"{bundle}: {name}", "is missing: this is not a bundle of a run")
        for name in needed
        if name not in contents.parts
    )
    # The version becomes a part of an interpreter's name, and may be a stranger's text
    python = re.compile(r"\d{1,2}\.\d{1,3}[\w.+-]{0,40}")
    shape = {
        "name": str,
        "label": str,
        "steps": int,
        "level": str,
        "weights_sha256": shapes.SHA256,
        "python": python,
        "packages": [str],
    }
    facts, summary = (
        read_json(folder / FACTS, shape),
        read_json(folder / RUN / "summary.json", shapes.SUMMARY),
    )
    # What is shown before the user trusts the bundle must be what is verified afterwards
    for name in ("steps", "level", "weights_sha256"):
        ConfigError.raise_if(
            facts[name] != summary[name],
            f"{bundle}: {FACTS}: {name}",
            f"is not that of {RUN}/summary.json",
            facts[name],
            str(summary[name]),
        )
    return facts


def _data(folder: Path) -> dict[str, Any]:
    """Return the manifest of the data."""
    # Without the limit of `read_json`: the manifest lists each file of the data
    try:
        value = parse_json((folder / DATA).read_bytes())
    except ValueError as error:
        raise damaged_file(folder / DATA, str(error)) from None
    return require_shape(
        folder / DATA, value, {"files": {str: {str: {"bytes": int, "sha256?": shapes.SHA256}}}}
    )


def _require_trust(args: argparse.Namespace, facts: dict[str, Any]) -> None:
    """Refuse to run or install anything from a bundle without --trust."""
    # An identity proves whose bundle it is, not that it is harmless
    installs = "" if args.here else "installs the packages that it names and "
    summary = (
        f"{facts['label'] or facts['name']}: {facts['steps']} steps, level {facts['level']}, "
        f"weights {facts['weights_sha256'][:16]}..."
    )
    code = (
        f"its own code ({', '.join(facts['packages'])})"
        if facts["packages"]
        else "no code of its own but samewise's"
    )
    NotTrusted.raise_if(
        not args.trust,
        str(args.bundle),
        f"is intact, but nothing was run: a bundle needs --trust ({summary})",
        hint=f"with --trust this command {installs}runs what is in it: {code}. Add --trust if you trust "
        "whoever made the bundle",
    )


def _verify_arguments(args: argparse.Namespace, run: RunFolder, folder: Path) -> list[str]:
    options = [
        *(["--steps", str(args.steps)] if args.steps else []),
        *(["--anyway"] if args.anyway else []),
        *(["--json"] if args.json else []),
    ]
    return [str(run.path), *args.overrides, "--trust", "--project", str(folder / CODE), *options]


def _verify_here(line: list[str], run: RunFolder) -> int:
    parser = argparse.ArgumentParser()
    add_arguments(parser, verify.ARGUMENTS)
    args = parser.parse_args(line)
    return verify.print_verdict(args, run, verify.request_of(args))
