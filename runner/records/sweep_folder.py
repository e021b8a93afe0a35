"""A sweep's folder: the request, its points, and the records that jobs leave.

Imports neither torch nor mlflow.

    RUN_ROOT/sweeps/ID/
      sweep.json          the request: the command's overrides, the sweeper, the launcher
      points.jsonl        a line for each point, in the order of trying
      configs/0007.yaml   the point's resolved config
      jobs/0007.json      when and where the job began, and how it ended
      logs/0007.log       its output
      report/             tables and plots
"""

import functools
import json
import re
import shutil
from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from samewise.runner.errors import ConfigError, Problem, nearest
from samewise.runner.records import locks, shapes, trust
from samewise.runner.records.files import (
    append_lines,
    damaged_file,
    parse_json,
    read_json,
    read_lines,
    read_mapping,
    require_shape,
    write_atomically,
    write_json,
)
from samewise.runner.records.folder import PathInFolder, RunFolder
from samewise.runner.secrets import redact_values

HOME = "sweeps"


@dataclass(frozen=True)
class Point:
    """One run of a sweep.

    Args:
        number: Index from 0, in the order of trying.
        setting: The setting's number; its points differ by their seed.
        seed: The seed, if seeds vary; otherwise None.
        values: The value of each dimension, by its key.
        overrides: The whole command line of this run.
        name: The experiment's name.
        fingerprint: The experiment's fingerprint; two points with the same one are one run.
        folder: The run's folder.
        monitor: The experiment's `evaluate.monitor`.
        mode: The experiment's `evaluate.mode`.
        needs: The needs of its job: `threads`, `processes`, `wants_gpu`, `spread` as in
            `launchers.base.Job`; `variables`, set before torch is imported.
    """

    number: int
    setting: int
    seed: str | None
    values: Mapping[str, str]
    overrides: Sequence[str]
    name: str
    fingerprint: str
    folder: str
    monitor: str
    mode: str
    needs: Mapping[str, Any]

    @property
    def run(self) -> RunFolder:
        return RunFolder(Path(self.folder))

    @property
    def label(self) -> str:
        """Return a short name: `lr=0.1 weight_decay=0 seed=2`, each key by its last part."""
        return label(self.values, self.seed)


def label(values: Mapping[str, str], seed: str | None = None) -> str:
    """Return a short name of a setting, each key by as much of its end as is unique."""
    keys = [key.lstrip("+~") for key in values]
    ends = [key.rsplit(".", 1)[-1] for key in keys]
    shown = [
        key if ends.count(end) > 1 or end in _OF_THE_RUN else end
        for key, end in zip(keys, ends, strict=True)
    ]
    parts = [f"{key}={short(value)}" for key, value in zip(shown, values.values(), strict=True)]
    return " ".join([*parts, *([f"seed={seed}"] if seed is not None else [])]) or "(no changes)"


_OF_THE_RUN = ("name", "seed", "batch_size")
"""Ends that look like the run's own keys: `model.name=resnet50`, `evaluate.batch_size=4`."""


def short(value: str) -> str:
    """Return a number from an interval with four digits; other values unchanged."""
    if not re.fullmatch(r"-?\d+\.\d{7,}(e[-+]?\d+)?", value):
        return value
    return f"{float(value):.4g}"


@dataclass(frozen=True)
class SweepFolder:
    """The folder of a sweep."""

    path: Path

    @property
    def id(self) -> str:
        return self.path.name

    made_by = PathInFolder("sweep.json")
    """The file with the request, signed by the user who made it."""
    sources = PathInFolder("sources.json")
    """Digests of the user's code that its points reach; exists only if there is such code."""

    @property
    def facts(self) -> dict[str, Any]:
        """The content of `sweep.json`; empty if it does not exist yet."""
        return read_json(self.made_by, shapes.SWEEP) or {}

    @functools.cached_property
    def objectives(self) -> Mapping[str, str]:
        """The metrics of `sweeper.objectives`, each with min or max, for display.

        Empty if `evaluate.monitor` is the objective.
        """
        return read_mapping(self.made_by, shapes.SWEEP).get("sweeper", {}).get("objectives") or {}

    def write_facts(self, facts: Mapping[str, Any]) -> None:
        """Write `sweep.json`, and create the folder."""
        self.path.mkdir(parents=True, exist_ok=True)
        # Secrets in the request are needed unchanged to resume: the folder is the user's alone
        if json.dumps(redact_values(facts)) != json.dumps(facts):
            self.path.chmod(0o700)
        for name in ("configs", "jobs", "logs"):
            (self.path / name).mkdir(exist_ok=True)
        text = json.dumps(dict(facts), indent=2) + "\n"
        # First, so that an interrupted sweep still belongs to its user
        trust.sign(self.made_by, text)
        write_atomically(self.made_by, text)

    def discard(self, *, root: bool = False) -> None:
        """Remove a sweep that has started no job.

        With `root`, also the run root if it was created for the sweep.
        """
        shutil.rmtree(self.path, ignore_errors=True)
        # rmdir fails if there are other sweeps or runs
        with suppress(OSError):
            self.path.parent.rmdir()
            if root:
                self.path.parent.parent.rmdir()

    def points(self) -> list[Point]:
        """Return all points so far, without a line that a crash cut off.

        Raises:
            ConfigError: A line is lost, whose point's number would be used again.
        """
        results, file = list[Point](), self.path / "points.jsonl"
        for number, line in read_lines(file):
            # A crash cut off a line without its end, and its point has started no job
            if not line.endswith(b"\n"):
                break
            try:
                value = parse_json(line)
            except ValueError as error:
                raise damaged_file(file, f"line {number}: {error}") from None
            results.append(Point(**require_shape(file, value, shapes.POINT, f"line {number}")))
            if results[-1].number != number - 1:
                raise damaged_file(file, f"the line of point {number - 1} is missing")
        return results

    def add_points(self, points: Sequence[Point]) -> None:
        """Append points durably."""
        if points:
            text = "".join(json.dumps(asdict(point)) + "\n" for point in points)
            append_lines(self.path / "points.jsonl", text)

    def config(self, number: int) -> Path:
        return self.path / "configs" / f"{number:04d}.yaml"

    def log(self, number: int) -> Path:
        return self.path / "logs" / f"{number:04d}.log"

    def word(self, number: int) -> dict[str, Any]:
        """Return the record of a job and its launcher's notes; empty if it was never started."""
        return read_mapping(self.path / "jobs" / f"{number:04d}.json", shapes.WORD)

    def note(self, number: int, **facts: Any) -> None:
        """Add facts to a job's record; None removes a fact."""
        record = {**self.word(number), **facts}
        write_json(
            self.path / "jobs" / f"{number:04d}.json",
            {name: value for name, value in record.items() if value is not None},
        )

    def spent_s(self, point: Point) -> float:
        """Return the seconds that a point's jobs have taken."""
        record = self.word(point.number)
        spent, ended = record.get("spent_s", 0.0), record.get("ended")
        # A killed job leaves no end: it counts up to its last logged metric
        with suppress(OSError):
            ended = point.run.metrics.stat().st_mtime if ended is None else ended
        return (
            spent + max(0.0, ended - record["began"])
            if ended is not None and "began" in record
            else spent
        )

    @contextmanager
    def hold_lock(self) -> Generator[None]:
        """Lock the sweep for the process that starts its jobs, until that process ends.

        Raises:
            ConfigError: Another process holds the lock.
        """
        try:
            with locks.hold(self.path / ".lock"):
                yield
        except locks.LockHeld as held:
            raise ConfigError(
                Problem(
                    str(self.path),
                    f"this sweep is being run by {held}",
                    hint=f"`samewise sweep --status {self.path}` shows how far it is; `samewise sweep "
                    f"--cancel {self.path}` stops it",
                )
            ) from None

    def holder(self) -> tuple[int, str] | None:
        """Return the id and the machine of the process that runs the sweep, or None."""
        return locks.process_of(locks.holder(self.path / ".lock"))


def below(run_root: Path) -> Iterator[SweepFolder]:
    """List all sweeps in a run root, the newest last."""
    files = sorted((run_root / HOME).glob("*/sweep.json"), key=lambda file: file.stat().st_mtime)
    return (SweepFolder(file.parent) for file in files)


def is_named(arguments: Sequence[str]) -> bool:
    """Whether arguments name an existing sweep, by its id or folder, and are not overrides."""
    return len(arguments) == 1 and "=" not in arguments[0] and not arguments[0].startswith("~")


def matching(name: str, *, run_root: Path) -> list[SweepFolder]:
    """List the sweeps that `name` may mean: their folder, id, or the start of a part of the id."""
    if (Path(name) / "sweep.json").is_file():
        return [SweepFolder(Path(name))]
    sweeps = list(below(run_root))
    return [sweep for sweep in sweeps if sweep.id == name] or [
        sweep
        for sweep in sweeps
        if sweep.id.startswith(name) or sweep.id.rsplit("-", 1)[-1].startswith(name)
    ]


def find(name: str, *, run_root: Path) -> SweepFolder:
    """Find the sweep called `name`: its folder, its id, or the start of a part of the id.

    Raises:
        ConfigError: No sweep matches, or several do.
    """
    matches = matching(name, run_root=run_root)
    if len(matches) == 1:
        return matches[0]
    ConfigError.raise_if(
        matches,
        "SWEEP",
        f"{len(matches)} sweeps match",
        name,
        "one sweep",
        f"give more characters: {', '.join(sweep.id for sweep in matches[:5])}",
    )
    raise ConfigError(
        Problem(
            "SWEEP",
            f"no such sweep in {run_root / HOME}",
            name,
            "a sweep's folder or id",
            nearest(name, [sweep.id for sweep in below(run_root)]) or "`samewise sweep` makes one",
        )
    )
