"""Create a project that is ready for `samewise train`; with --from, of a run's code and config."""

import argparse
import importlib.util
import keyword
import re
import shlex
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path

from samewise.runner.commands import RUN_ROOT, TRUST
from samewise.runner.config.project import Project, find
from samewise.runner.errors import ConfigError, Problem
from samewise.runner.launchers.snapshot import settings_text
from samewise.runner.records import kept_sources, sources, trust
from samewise.runner.records.files import damaged_file
from samewise.runner.records.found import RUN

STARTER = Path(__file__).with_name("starter")
"""Template of a project; `mylab` stands for the package's name."""

ARGUMENTS = {
    "folder": {
        "type": Path,
        "metavar": "FOLDER",
        "help": "the project's folder: a new one, or one that is empty",
    },
    "--package": {
        "metavar": "NAME",
        "help": "the name of the project's package (default: the folder's name)",
    },
    "--from": {
        "dest": "source",
        "metavar": "RUN",
        "help": f"make the project from this run's code and config: {RUN}",
    },
    **RUN_ROOT,
    **TRUST,
}
EXCLUSIVE = ("--package", "--from")
EXAMPLES = """\
examples:
  samewise init shapes            a project in ./shapes with the package `shapes`
  samewise init . --package lab   in the current folder, if it is empty
  samewise init again --from 3f2a the code and config of a run: `samewise train` there gives its bits

what it creates without --from:
  pyproject.toml          [tool.samewise]: the package that configs may name, the folder of configs, the experiment that plain `samewise train` trains
  NAME/data.py, model.py  a data set and a model of your own
  configs/                a choice for each of them, and the experiment `first`
  .schema/, .vscode/      for editors, which then complete and check the configs; `samewise schema` writes .schema/ again
  tests/, Makefile        `make test` trains a tiny version twice and compares the weights

then:
  cd shapes
  samewise train
  samewise train optimizer.lr=0.005"""


def run(args: argparse.Namespace) -> int:
    folder: Path = args.folder.expanduser()
    if args.source:
        return _write_run(args, folder)
    package = args.package or re.sub(
        r"\W+", "_", folder.resolve().name.lower(), flags=re.ASCII
    ).strip("_")
    _require_empty(folder)
    _require_name(package, args.package)
    _report(folder, lambda: make(folder, package))
    _write_schema(folder)
    _say_next(folder)
    return 0


def _write_run(args: argparse.Namespace, folder: Path) -> int:
    """Write a project with the code and the config of a run."""
    from samewise.runner.config import as_experiment, saved
    from samewise.runner.config.fingerprint import targets

    _require_empty(folder)
    source = saved.find(args.source, run_root=args.run_root)
    composed, name = saved.config_in(source.config), source.path.absolute().parent.name
    trust.require(
        source.config, trust=args.trust, uses="writes its code, for `samewise train` to run"
    )
    texts, files = kept_sources.texts_of(source.sources), dict[str, str]()
    for label, text in texts.items():
        library_file = sources.place(label)
        if library_file is not None and sources.is_library(library_file):
            continue
        # A received record may name any place to write to
        if Path(label).is_absolute() or ".." in Path(label).parts:
            raise damaged_file(source.sources, f"{label} is outside of a project")
        if text is None:
            raise ConfigError(
                Problem(
                    label,
                    kept_sources.NOT_KEPT,
                    str(source.path),
                    hint="earlier versions kept none; environment.json names git's commit, if there was one",
                )
            )
        files[label] = text
    modules = {label.partition("/")[0].removesuffix(".py") for label in texts}
    packages = sorted({target.partition(".")[0] for target in targets(composed.whole)} & modules)
    for file_name in (".gitignore", "Makefile"):
        files.setdefault(file_name, (STARTER / file_name).read_text(encoding="utf-8"))
    files.setdefault(
        "README.md",
        f"# {folder.resolve().name}\n\nThe code and config of the run {name}/{source.path.name}. "
        "`samewise train` gives its bits; `make` lists more.\n",
    )
    files["pyproject.toml"] = settings_text(packages, configs="configs", experiment=name)
    files[f"configs/experiment/{name}.yaml"] = as_experiment.render_whole(
        composed, project=Project(folder), head=[f"From the run {name}/{source.path.name}"]
    )

    def check(project_folder: Path) -> None:
        as_experiment.require_same(composed, name=name, project=find(project_folder))

    _report(folder, lambda: _write(folder, files, check))
    _say_next(folder)
    return 0


def _report(folder: Path, write: Callable[[], list[str]]) -> None:
    """Write files, and print their names.

    Raises:
        ConfigError: The files cannot be written.
    """
    try:
        names = write()
    except OSError as error:
        raise ConfigError(
            Problem(
                "FOLDER",
                f"cannot be written: {error.strerror}",
                str(error.filename or folder),
                "a place that you can write to",
                "nothing was written",
            )
        ) from None
    print(f"made {folder}:")
    print("\n".join(f"  {name}" for name in names))


def _say_next(folder: Path) -> None:
    print(
        "\nnext:"
        + (f"\n  cd {shlex.quote(str(folder))}" if folder.resolve() != Path.cwd() else "")
        + "\n  samewise train"
    )


def make(folder: Path, package: str) -> list[str]:
    """Write the starter as `_write` does."""
    files = dict[str, str]()
    for source in sorted(STARTER.rglob("*")):
        if source.is_file() and "__pycache__" not in source.parts:
            name, text = str(source.relative_to(STARTER)), source.read_text(encoding="utf-8")
            files[name.replace("mylab", package)] = text.replace("mylab", package)
    return _write(folder, files)


def _write(
    folder: Path,
    files: Mapping[str, str],
    check: Callable[[Path], None] = lambda names: None,
) -> list[str]:
    """Write a project, all of it or nothing, and return its files' names.

    Args:
        folder: The project's folder.
        files: Texts by path.
        check: Called with the files' folder before they are moved; an error stops the command.

    Raises:
        OSError: The files cannot be written.
    """
    target_folder = folder.resolve()
    existing = next(parent for parent in (target_folder, *target_folder.parents) if parent.is_dir())
    # On the same disk as the project, so that all files are moved there by renaming
    with tempfile.TemporaryDirectory(prefix=".samewise-init-", dir=existing) as temporary:
        for name, text in files.items():
            target = Path(temporary, name)
            target.parent.mkdir(parents=True, exist_ok=True)
            # Line ends stay as the run's files had them
            target.write_text(text, encoding="utf-8", newline="")
        check(Path(temporary))
        names = sorted(
            str(path.relative_to(temporary))
            for path in Path(temporary).rglob("*")
            if path.is_file()
        )
        folder.mkdir(parents=True, exist_ok=True)
        for entry in Path(temporary).iterdir():
            entry.rename(folder / entry.name)
    return names


def _write_schema(folder: Path) -> None:
    """Write the JSON Schemas that .vscode/settings.json and the configs' first lines name."""
    from samewise.runner.config.json_schema import write

    print("  .schema/ (for editors)", flush=True)
    write(find(folder), folder / ".schema")


def _require_empty(folder: Path) -> None:
    ConfigError.raise_if(
        folder.exists() and (not folder.is_dir() or any(folder.iterdir())),
        str(folder),
        "is not empty" if folder.is_dir() else "is a file",
        expected="a folder that does not exist yet, or is empty",
        hint=f"`samewise init {shlex.quote(str(folder / 'new'))}` makes a project; move what "
        "you need of it here",
    )


def _require_name(package: str, option: str | None) -> None:
    """Require that a name can be the package's."""
    path, hint = (
        ("--package", "") if option else ("FOLDER", "--package NAME gives the package another name")
    )
    ConfigError.raise_if(
        not re.fullmatch(r"[A-Za-z][A-Za-z0-9_]*", package)
        or keyword.iskeyword(package)
        or package in ("tests", "configs"),
        path,
        "is not a valid name for the package",
        package,
        "letters, digits and _, beginning with a letter; no keyword of Python, nor the name "
        "of another folder in the project",
        hint,
    )
    # The project's folder comes last on the path, so an existing module would hide the package
    spec = importlib.util.find_spec(package)
    origin = spec and spec.origin
    ConfigError.raise_if(
        origin is not None,
        path,
        f"is the name of an existing package or module, in {origin}",
        package,
        "a name that is not taken",
        hint,
    )
