"""The packages of a bundle as exact versions, and its training in an environment of them, or here."""

import contextlib
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Generator, Iterable, Sequence
from importlib import metadata
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from samewise.runner.bundles.archive import CODE, LOCK, OWN
from samewise.runner.errors import ConfigError, Problem
from samewise.runner.records.files import read_text

_LEFT_OUT = ("PYTHON", "VIRTUAL_ENV", "SAMEWISE_PROJECT")
# No address and no option: the text may be a stranger's, and pip would follow it
_PIN = re.compile(r"[a-z0-9][a-z0-9.-]*==[A-Za-z0-9][A-Za-z0-9.!+_-]*")


def make_environment(folder: Path, *, python: str) -> Path:
    """Make a virtual environment of a bundle's package versions; return its interpreter.

    Args:
        folder: The unpacked bundle, in which it is made.
        python: The version of Python that the run was trained with.

    Raises:
        ConfigError: That Python is absent, or a package cannot be installed.
    """
    pins = read_pins(read_text(folder / LOCK) or "")
    place, requirements = folder / "environment", folder / "environment.txt"
    interpreter = place / "bin" / "python"
    print(
        f"making an environment with Python {python} and {len(pins)} packages in {place}; "
        "this takes minutes and gigabytes",
        file=sys.stderr,
        flush=True,
    )
    run_in_environment([_python(python), "-m", "venv", str(place)], "python -m venv")
    install = [
        str(interpreter),
        "-m",
        "pip",
        "install",
        "--quiet",
        "--disable-pip-version-check",
        "--no-input",
        # The pins are the whole environment, with the dependencies of dependencies
        "--no-deps",
    ]
    # Only the checked pins: pip would honour an encoding that a comment of LOCK names, and then
    # read options in it
    requirements.write_text("".join(f"{pin}\n" for pin in pins), encoding="ascii")
    run_in_environment([*install, "--requirement", str(requirements)], "pip install")
    return interpreter


def train_in(interpreter: Path, folder: Path, arguments: Sequence[str]) -> int:
    """Run `samewise verify` with the bundle's code; return its exit code."""
    code = {"PYTHONPATH": os.pathsep.join(str((folder / name).absolute()) for name in (CODE, OWN))}
    return subprocess.run(
        [str(interpreter.absolute()), "-m", "samewise", "verify", *arguments],
        env=_variables() | code,
        check=False,
    ).returncode


@contextlib.contextmanager
def importable(folder: Path) -> Generator[None]:
    """Put a bundle's code, except samewise's own, first on this process's import path.

    Raises:
        ConfigError: A package of the same name was imported from elsewhere.
    """
    code = (folder / CODE).absolute()
    names = {
        entry.name.removesuffix(".py")
        for entry in code.iterdir()
        if entry.is_dir() or entry.suffix == ".py"
    }
    ConfigError.raise_if(
        (imported := sorted(names & set(sys.modules))),
        "--here",
        f"{', '.join(imported)} is already imported from another place",
        hint="leave out --here",
    )
    # First, so that installed code of the same name does not take its place
    sys.path.insert(0, str(code))
    try:
        yield
    finally:
        sys.path.remove(str(code))
        # Later imports of these names mean other code
        for name in [name for name in sys.modules if name.partition(".")[0] in names]:
            del sys.modules[name]


def _python(version: str) -> str:
    """Find an interpreter of the same minor version: this one, or one on the PATH."""
    minor = ".".join(version.split(".")[:2])
    if minor == f"{sys.version_info.major}.{sys.version_info.minor}":
        return sys.executable
    interpreter = shutil.which(f"python{minor}")
    if interpreter is None:
        raise ConfigError(
            Problem(
                "python",
                "the run was trained with another Python, which is not installed here",
                version,
                f"python{minor} on the PATH",
            )
        )
    return interpreter


def _variables() -> dict[str, str]:
    """Return environment variables for the other environment."""
    # None of this environment's paths, and no imports from the current folder, which may be a
    # stranger's
    return {name: value for name, value in os.environ.items() if not name.startswith(_LEFT_OUT)} | {
        "PYTHONSAFEPATH": "1"
    }


def run_in_environment(command: Sequence[str], name: str) -> None:
    """Run a command of the other environment.

    Args:
        command: The command.
        name: Its name for messages.

    Raises:
        ConfigError: It fails; the message has its reason.
    """
    process = subprocess.run(command, capture_output=True, text=True, env=_variables(), check=False)
    if process.returncode:
        lines = [x for x in (process.stderr or process.stdout).strip().splitlines() if x]
        errors = [x for x in lines if x.startswith("ERROR")] or lines[-1:] or ["no reason given"]
        raise ConfigError(
            Problem(
                LOCK,
                f"{name} failed: {errors[-1]}",
                hint="pip asks the index that its configuration names; PIP_EXTRA_INDEX_URL adds "
                "one, such as PyTorch's for builds like 2.9.0+cpu",
            )
        )


def pins(imported: Iterable[str]) -> dict[str, str]:
    """Return the installed version of each distribution that a run needs, by name.

    Args:
        imported: Distributions, or importable packages, in addition to samewise's own dependencies.
    """
    owners = metadata.packages_distributions()
    queue = [("samewise", extra) for extra in ("", *_extras("samewise"))]
    queue += [(owner, "") for name in imported for owner in owners.get(name, [name])]
    versions, visited = dict[str, str](), set[tuple[str, str]]()
    while queue:
        name, extra = queue.pop()
        if (canonicalize_name(name), extra) in visited:
            continue
        visited.add((canonicalize_name(name), extra))
        try:
            distribution = metadata.distribution(name)
        except metadata.PackageNotFoundError:
            # The requirement is for another platform, or of an extra that is not installed
            continue
        versions[canonicalize_name(name)] = distribution.version
        for requirement in map(Requirement, distribution.requires or ()):
            if requirement.marker is None or requirement.marker.evaluate({"extra": extra}):
                queue += [(requirement.name, x) for x in ("", *requirement.extras)]
    # samewise itself is in the bundle as code
    versions.pop("samewise", None)
    return dict(sorted(versions.items()))


def read_pins(text: str) -> list[str]:
    """Read the pins from a requirements file.

    Raises:
        ConfigError: A line is not `name==version` but, say, an address or an option.
    """
    lines = [line for line in text.splitlines() if line and not line.startswith("#")]
    invalid = [line for line in lines if not _PIN.fullmatch(line)]
    ConfigError.raise_all(
        Problem(
            "requirements.txt",
            "is not an exact version of a package",
            line,
            "name==version",
        )
        for line in invalid[:5]
    )
    return lines


def _extras(name: str) -> list[str]:
    try:
        return metadata.metadata(name).get_all("Provides-Extra") or []
    except metadata.PackageNotFoundError:
        return []
