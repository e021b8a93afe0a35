"""A samewise command that meets a fault: it is killed, or a call on a file fails through the layer in `layer.c`."""

import contextlib
import ctypes
import importlib
import os
import random
import signal
import subprocess
import sys
import time
import traceback
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
LONGEST_S = 240.0


def compiled(folder: Path) -> Path:
    """Compile the layer into a library; return its path."""
    library = folder / "layer.so"
    subprocess.run(["gcc", "-shared", "-fPIC", "-O1", "-o", str(library), str(HERE / "layer.c"), "-ldl"], check=True)
    return library


class Wrong(Exception):
    """A fault that a trial found."""


def _descendants(pid: int) -> list[int]:
    """The processes that a process has started, and those that they have started."""
    with contextlib.suppress(OSError):
        children = [int(child) for task in Path(f"/proc/{pid}/task").iterdir() for child in (task / "children").read_text().split()]
        return [one for child in children for one in (child, *_descendants(child))]
    return []


class Command:
    """A command of samewise in a fork of this process.

    Args:
        arguments: What a user would type.
        said: The file that gets what it prints.
        plan: What the layer does in it: kind, number of the call, error, for how many calls, seconds.
        under: The folder whose files' calls count.
        composed: What the arguments compose to, where that was found before.
        spread: Whether each process that it starts meets the plan, too.
    """

    def __init__(self, arguments: list[str], said: Path, plan: tuple[int, ...], under: Path, composed: Any, *, spread: bool = False) -> None:
        self.mark = said.with_suffix(".struck")
        self.spread = spread
        self.said = said
        self._calls = said.with_suffix(".calls")
        self.pid = os.fork()
        self.code: int | None = None
        if not self.pid:
            self._be(arguments, plan, under, composed)

    def _be(self, arguments: list[str], plan: tuple[int, ...], under: Path, composed: Any) -> None:
        code = 70
        try:
            os.setpgid(0, 0)
            ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # it ends with the campaign
            os.environ["FAULT"] = " ".join(map(str, (*plan, under, self.mark))) if self.spread else ""
            file = os.open(self.said, os.O_CREAT | os.O_WRONLY | os.O_APPEND)
            os.dup2(file, 1)
            os.dup2(file, 2)
            layer = ctypes.CDLL(None)
            layer.counted.restype = ctypes.c_long
            kind, nth, error, lasts, seconds = plan
            layer.plan(str(under).encode(), str(self.mark).encode(), kind, ctypes.c_long(nth), error, ctypes.c_long(lasts), ctypes.c_long(seconds))
            from samewise.runner.cli import main

            if composed is not None:
                importlib.import_module("samewise.runner.commands.train").compose_arguments = lambda args, strict: composed  # type: ignore[attr-defined]
            code = main(arguments)
            calls = layer.counted()
            layer.plan(b"", b"", 0, ctypes.c_long(0), 0, ctypes.c_long(0), ctypes.c_long(0))
            self._calls.write_text(str(calls))
        except SystemExit as ended:
            code = ended.code if isinstance(ended.code, int) else 71
        except BaseException:
            traceback.print_exc()
        finally:
            with contextlib.suppress(Exception):
                sys.stdout.flush()
                sys.stderr.flush()
            os._exit(code)

    def wait(self, seconds: float) -> int | None:
        """Its exit code, negative if a signal ended it, or None if it is still running."""
        until = time.monotonic() + seconds
        while self.code is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            if pid:
                self.code = os.waitstatus_to_exitcode(status)
            elif time.monotonic() > until:
                return None
            else:
                time.sleep(0.005)
        return self.code

    def end(self) -> int:
        """Its exit code; raises Wrong if it does not end."""
        if self.wait(LONGEST_S) is None:
            self.kill("everything", random.Random(0))
            raise Wrong(f"did not end within {LONGEST_S:.0f} s:\n{self.text[-1500:]}")
        assert self.code is not None
        return self.code

    def kill(self, what: str, chance: random.Random) -> None:
        """Kill "itself", "everything" (all that it has started, too), or "one that it started" (a rank, a job, a sender), from which it may recover."""
        with contextlib.suppress(ProcessLookupError):
            match what:
                case "everything":
                    os.killpg(self.pid, signal.SIGKILL)
                case "one that it started" if started := _descendants(self.pid):
                    os.kill(chance.choice(started), signal.SIGKILL)
                    return
                case _:
                    os.kill(self.pid, signal.SIGKILL)
        self.wait(30)

    @property
    def calls(self) -> int:
        return int(self._calls.read_text())

    @property
    def text(self) -> str:
        return self.said.read_text(errors="replace") if self.said.exists() else ""
