"""The user's project: packages a config may name, config folders, and the default experiment.

Never read from a composed config.
"""

import importlib.util
import os
import re
import stat
import sys
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from samewise.runner.errors import ConfigError, Problem, nearest
from samewise.runner.records.shapes import describe_misfit

_KEYS = ("packages", "configs", "experiment")
_SHAPE = {"packages?": [str], "configs?": str, "experiment?": str}


@dataclass(frozen=True)
class Project:
    """Declarations of the user, not of a config: what is trusted besides samewise.

    Args:
        root: The folder of the project's pyproject.toml, or else the current folder.
        packages: Importable packages that a `_target_` may name.
        configs: Config folders, searched before samewise's own.
        outside_configs: Folders of `--config-dir` among them, which need not be the user's own.
        experiment: The choice of `experiment=` if the command line makes none; empty: none.
    """

    root: Path
    packages: tuple[str, ...] = ()
    configs: tuple[Path, ...] = ()
    outside_configs: tuple[Path, ...] = ()
    experiment: str = ""

    def with_experiment(self, overrides: Sequence[str]) -> list[str]:
        """Return the overrides after the project's default experiment, unless they choose one."""
        chosen = not self.experiment or any(
            re.match(r"[+~]*experiment($|[=@])", text) for text in overrides
        )
        return [*([] if chosen else [override_of_experiment(self.experiment)]), *overrides]


def override_of_experiment(name: str) -> str:
    """The override that chooses an experiment, in quotes if Hydra's grammar needs them."""
    return f"experiment={name}" if name.isascii() else f"experiment='{name}'"


def find(
    start: Path | None = None, *, packages: Sequence[str] = (), configs: Sequence[str | Path] = ()
) -> Project:
    """The project around `start`: the nearest pyproject.toml above it with `[tool.samewise]`.

    If that declares packages, its folder is added to `sys.path`.

        [tool.samewise]
        packages = ["my_lab"]
        configs = "configs"
        experiment = "mine"  # what `samewise train` trains here by default

    ConfigError if the file cannot be read, names what does not exist, or has keys that are not
    known.

    Args:
        start: Where to begin; the current folder if not given.
        packages: Further packages (the `--package` option).
        configs: Further config folders (the `--config-dir` option), before the project's.
    """
    here = (start or Path.cwd()).resolve()
    root, settings, problems = here, cast(Mapping[str, Any], {}), list[Problem]()
    for folder in (here, *here.parents):
        file = folder / "pyproject.toml"
        table = _table(file) if file.is_file() else None
        if table is not None:
            root, settings = folder, table
            problems += [*_wrong_settings(file, table), *_foreign_file(file, here)]
            break
    # Before anything of the file is used: the packages that it names would be run
    ConfigError.raise_all(problems)

    package_names = (*packages, *settings.get("packages", ()))
    if package_names and str(root) not in sys.path:
        # Last, so that a project's folder can shadow neither the standard library nor an installed
        # package
        sys.path.append(str(root))
    config_folders = [Path(folder).expanduser().resolve() for folder in configs]
    folders = [
        # Before the project's, since the first folder that has a file counts
        *config_folders,
        *([(root / settings["configs"]).resolve()] if "configs" in settings else []),
    ]
    missing = [_missing_package(name, root) for name in package_names if not _importable(name)]
    ConfigError.raise_all(
        [
            *missing,
            *(
                Problem(
                    str(folder),
                    "this config folder does not exist",
                    hint="make it, or correct `configs` or --config-dir",
                )
                for folder in folders
                if not folder.is_dir()
            ),
        ]
    )
    return Project(
        root,
        tuple(dict.fromkeys(package_names)),
        tuple(dict.fromkeys(folders)),
        tuple(config_folders),
        settings.get("experiment", ""),
    )


def _table(file: Path) -> Mapping[str, Any] | None:
    """The file's `[tool.samewise]`, or None."""
    try:
        read = tomllib.loads(file.read_text(encoding="utf-8"))
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(Problem(str(file), f"is not valid TOML: {error}")) from None
    except OSError as error:
        raise ConfigError(Problem(str(file), f"cannot be read: {error.strerror}")) from None
    return read.get("tool", {}).get("samewise")


def _wrong_settings(file: Path, table: Mapping[str, Any]) -> list[Problem]:
    where = f"{file}: tool.samewise"
    problems = [
        Problem(f"{where}.{key}", "no such setting", table[key], hint=nearest(key, _KEYS))
        for key in table
        if key not in _KEYS
    ]
    if misfit := describe_misfit(table, _SHAPE):
        problems.append(Problem(where, misfit))
    return problems


def _foreign_file(file: Path, here: Path) -> list[Problem]:
    """Return the problem if another user owns the project file where anyone can write, as in /tmp.

    Its packages would be run.
    """
    owner, is_anybodys = file.stat().st_uid, bool(file.parent.stat().st_mode & stat.S_IWOTH)
    if owner in (os.getuid(), 0) or (file.parent == here and not is_anybodys):
        return []
    return [
        Problem(
            str(file),
            f"belongs to another user (uid {owner})",
            expected="a file owned by this user or by root, in a folder "
            f"{'that others can write' if is_anybodys else 'above the current one'}",
            hint="if you trust it, copy it into a folder of your own"
            if is_anybodys
            else f"if you trust it, run the command in {file.parent}",
        )
    ]


def _importable(name: str) -> bool:
    try:
        return (
            all(part.isidentifier() for part in name.split("."))
            and importlib.util.find_spec(name) is not None
        )
    except (ImportError, ValueError):
        return False


def _missing_package(name: str, root: Path) -> Problem:
    return Problem(
        "packages",
        "this package cannot be found",
        name,
        f"a package in {root}, or an installed package",
        nearest(
            name, [entry.name for entry in root.iterdir() if (entry / "__init__.py").is_file()]
        ),
    )
