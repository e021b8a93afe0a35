"""Runs an export's test vectors in other languages: the programs of docs/examples.

Each prints a line per output: its name and `the same bits`, or the difference; it exits with 0, or
with 1 if that exceeds the tolerance.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from abc import ABC, abstractmethod
from collections.abc import Sequence
from pathlib import Path
from typing import ClassVar, Final

from samewise.runner.errors import first_line
from samewise.runner.exports.difference import Difference

EXAMPLES: Final = Path(__file__).resolve().parents[2] / "docs" / "examples"
"""There in a checkout; an installed package has none."""
PATIENCE_S: Final = 600
_BUILD: Final = (
    "cmake -S docs/examples/cpp -B docs/examples/cpp/build -DTORCH=\"$(python -c 'import "
    "torch; print(torch.__path__[0])')\""
    " && cmake --build docs/examples/cpp/build"
)
_LINE: Final = re.compile(
    r"^(\S+) +(?:the same bits|differs by (\S+) of its largest number \(([\d,]+) ulps\))$", re.M
)


class Client(ABC):
    """A program, and the format that it runs."""

    language: ClassVar[str]
    format: ClassVar[str]
    folder: ClassVar[str]
    """Within the folder of all."""

    @abstractmethod
    def command(self, folder: Path) -> list[str] | str:
        """The command line, without the export's folder; or, in words, what is missing."""


class Cpp(Client):
    """libtorch, and AOTInductor's package."""

    language, format, folder = "C++", "aoti", "cpp"

    def command(self, folder: Path) -> list[str] | str:
        program = folder / "build" / "verify"
        return [str(program)] if program.is_file() else f"docs/examples/cpp is not built: {_BUILD}"


class Node(Client):
    """onnxruntime-node, and ONNX."""

    language, format, folder = "Node", "onnx", "node"

    def command(self, folder: Path) -> list[str] | str:
        if not (folder / "node_modules" / "onnxruntime-node").is_dir():
            return (
                "needs onnxruntime-node: npm install --prefix docs/examples/node "
                "--ignore-scripts --no-package-lock"
            )
        return (
            ["node", str(folder / "verify.mjs")]
            if shutil.which("node")
            else "needs node: on Debian and Ubuntu, apt install nodejs"
        )


class Java(Client):
    """onnxruntime's jar, and ONNX."""

    language, format, folder = "Java", "onnx", "java"

    def command(self, folder: Path) -> list[str] | str:
        if not any(folder.glob("onnxruntime*.jar")):
            return (
                "needs onnxruntime's jar in docs/examples/java: "
                "com.microsoft.onnxruntime:onnxruntime on Maven Central"
            )
        return (
            ["java", "-cp", str(folder / "*"), str(folder / "Verify.java")]
            if shutil.which("java")
            else "needs java: on Debian and Ubuntu, apt install default-jdk-headless"
        )


CLIENTS: Final[tuple[Client, ...]] = (Cpp(), Node(), Java())


def run(
    client: Client, folder: Path, export: Path, outputs: Sequence[str]
) -> list[Difference] | str:
    """Run an export's vectors in a client; if it fails, a ValueError with its message."""
    command = client.command(folder / client.folder)
    if isinstance(command, str):
        return command
    try:
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        done = subprocess.run(
            [*command, str(export.resolve())],
            capture_output=True,
            text=True,
            errors="replace",
            env=environment,
            timeout=PATIENCE_S,
            check=False,
        )
    except subprocess.TimeoutExpired:
        raise ValueError(f"{client.language} did not end within {PATIENCE_S} s") from None
    except OSError as error:
        raise ValueError(f"{client.language} cannot be started: {first_line(error)}") from None
    said = _LINE.findall(done.stdout)
    if done.returncode not in (0, 1) or not said:
        lines = [line for line in done.stderr.splitlines() if line.strip()]
        raise ValueError(
            f"{client.language} cannot run it: "
            f"{lines[0] if lines else f'exit code {done.returncode}'}"
        )
    if [name for name, _, _ in said] != list(outputs):
        raise ValueError(
            f"{client.language} reports {', '.join(name for name, _, _ in said)}, not "
            f"{', '.join(outputs)}"
        )
    return [
        Difference(name, float(relative), int(ulps.replace(",", "")))
        for name, relative, ulps in said
        if relative
    ]
