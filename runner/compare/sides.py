"""Find the runs of a setting, by seed, however it is named, and train those that are missing."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from samewise.runner.bundles.received import RUN, open_received
from samewise.runner.config import as_experiment, compose, saved
from samewise.runner.config.compose import Composed
from samewise.runner.config.fingerprint import identity
from samewise.runner.config.project import Project
from samewise.runner.config.tree import flat
from samewise.runner.errors import ConfigError, first_few
from samewise.runner.records import shapes, sources, sweep_folder
from samewise.runner.records import trust as trusted
from samewise.runner.records.files import read_mapping
from samewise.runner.records.folder import RunFolder
from samewise.runner.records.found import candidates
from samewise.runner.runs.listing import as_lines
from samewise.runner.runs.selection import identities
from samewise.runner.sweeps import running
from samewise.runner.sweeps.results import point_results
from samewise.runner.sweeps.settings import group_by_setting

SIDE = f"overrides in quotes, {RUN}; a sweep, or one of its settings (SWEEP:lr=0.1)"
FOLDER = "comparisons"
"""Folder in a run root with the looks at comparisons, and experiments made from runs."""
_SEED = re.compile(r'^\["seed", (-?\d+)\]$', re.MULTILINE)


@dataclass(frozen=True)
class Place:
    """Place in which runs are looked for and trained.

    Args:
        project: The user's project.
        run_root: The folder of runs.
        shared: Overrides of both sides.
        trust: Whether to use what someone else has made.
    """

    project: Project
    run_root: Path
    shared: Sequence[str] = ()
    trust: bool = False


@dataclass(frozen=True)
class Side:
    """A setting with its runs.

    Args:
        name: A short name of it.
        config: Its config, with any seed.
        code: Digests of the user's code that it reaches.
        place: Where its runs are.
        overrides: Overrides that train it, without a seed; None: its config is trained.
        source: The config.yaml that the overrides or the config come from; None: the user's own.
        received: Values of finished runs that are elsewhere, by seed.
    """

    name: str
    config: Composed
    code: Mapping[str, Any]
    place: Place
    overrides: Sequence[str] | None = None
    source: Path | None = None
    received: Mapping[int, Mapping[str, float]] = field(default_factory=dict[int, Any])

    @property
    def key(self) -> str:
        """Config without the seed, and code: all that its runs have in common."""
        return _key(as_lines(flat(identity(self.config.whole))), self.code)

    def folders(self) -> dict[int, RunFolder]:
        """Return the folders of its runs by seed; of several with one seed, the last."""
        home, key = self.place.run_root / self.config.name, self.key
        texts = identities(
            self.place.run_root,
            [x for x in candidates(self.place.run_root) if Path(x).parent == home],
        )
        return {
            int(seed[1]): run
            for folder in sorted(texts, key=lambda x: (len(x), x))
            if (seed := _SEED.search(texts[folder]))
            and (run := RunFolder(Path(folder)))
            and _key(texts[folder], sources.files_in(run.sources)) == key
        }

    def values(self) -> dict[int, Mapping[str, float]]:
        """Return the values of its finished runs, in the order of seeds."""
        read = {seed: read_values(run) for seed, run in self.folders().items()}
        return dict(sorted({**self.received, **{x: y for x, y in read.items() if y}}.items()))

    def train(self, seeds: Sequence[int]) -> None:
        """Train it with seeds, as a sweep. Finished runs are not trained again.

        Raises:
            ConfigError: It cannot be trained here as it was, or a run has failed.
        """
        if self.source is not None:
            received = "" if self.source.exists() else self.name
            trusted.require(
                self.source, trust=self.place.trust, uses=trusted.MAKES, received=received
            )
        project, overrides = self.place.project, self.overrides
        if overrides is None:
            project, overrides = self._as_experiment()
        now = compose.compose([*overrides, f"seed={seeds[0]}"], project=project)
        ConfigError.raise_if(
            replace(self, config=now, code=now.code.files).key != self.key,
            self.name,
            "cannot be trained with further seeds: its experiment or its code has changed since",
            hint="restore it; or name the side by overrides, whose runs are trained anew",
        )
        prepared = running.prepare_sweep(
            [*overrides, f"seed={','.join(map(str, seeds))}"],
            project,
            run_root=self.place.run_root,
            trust=self.place.trust,
            wait=True,
        )
        running.run_sweep(prepared, wait=True, retry_failed=False)
        missing = [str(seed) for seed in seeds if seed not in self.values()]
        ConfigError.raise_if(
            missing,
            self.name,
            f"has no result with seed {first_few(missing, 5)}",
            hint=f"samewise sweep --status {prepared.folder.path}",
        )

    def _as_experiment(self) -> tuple[Project, list[str]]:
        """Write the config as an experiment; return the project that has it, and overrides."""
        configs, name = self.place.run_root / FOLDER, f"side_{self.config.fingerprint[:12]}"
        project = replace(self.place.project, configs=(configs, *self.place.project.configs))
        file = configs / "experiment" / f"{name}.yaml"
        if not file.exists():
            text = as_experiment.render(self.config, name, project=project, head=[self.name])
            as_experiment.save(text, file, self.config, name=name, project=project)
        names = [f"experiment={name}", f"name={self.config.name}"]
        return project, [*names, f"run_root={self.place.run_root}", *self.place.shared]


def find_sides(text: str, place: Place) -> list[Side]:
    """Return the settings that a text names: several for a whole sweep.

    Args:
        text: Overrides, a run, a bundle, a sweep, or a setting of a sweep.
        place: Where to look.

    Raises:
        ConfigError: It names nothing.
    """
    overrides = shlex.split(text)
    if all(re.match(r"~|[^=:]+=", override) for override in overrides):
        return [_side_of(text, overrides, place)]
    name, _, setting = text.partition(":")
    if sweeps := sweep_folder.matching(name, run_root=place.run_root):
        ConfigError.raise_if(
            len(sweeps) > 1, text, "names several sweeps", [x.id for x in sweeps], "one sweep"
        )
        return _sides_in(sweeps[0], setting, place)
    with open_received(text, run_root=place.run_root, trust=place.trust) as run:
        config = replace(saved.config_in(run.config), project=place.project)
        values = read_values(run)
        side = Side(
            " ".join(filter(None, (config.name, re.sub(r" ?seed=\S+", "", config.label)))),
            config,
            sources.files_in(run.sources),
            place,
            source=run.config,
            received={int(config.cfg.seed): values} if values else {},
        )
    return [side]


def find_side(text: str, place: Place) -> Side:
    """Return the setting that a text names.

    Args:
        text: As in `find_sides`.
        place: Where to look.

    Raises:
        ConfigError: It names none, or several.
    """
    sides = find_sides(text, place)
    ConfigError.raise_if(
        len(sides) > 1,
        text,
        f"has {len(sides)} settings",
        expected="one setting",
        hint=f"{text}:{sides[0].name.replace(' ', ',')}",
    )
    return sides[0]


def _side_of(text: str, changes: Sequence[str], place: Place) -> Side:
    """Return the setting of overrides."""
    root = [] if place.run_root == Path("runs") else [f"run_root={place.run_root}"]
    overrides = [*place.shared, *changes, *root]
    config = compose.compose(overrides, project=place.project)
    here = replace(place, run_root=Path(config.cfg.run_root))
    return Side(text or "(no changes)", config, config.code.files, here, overrides)


def _sides_in(folder: sweep_folder.SweepFolder, setting: str, place: Place) -> list[Side]:
    """Return the settings of a sweep, or those with the values that `setting` names."""
    values = set(re.findall(r"[^, ]+", setting))
    settings = {
        sweep_folder.label(results[0].point.values): results[0].point
        for results in group_by_setting(point_results(folder))
    }
    sides = [
        Side(
            label,
            replace(compose.load(folder.config(point.number)), project=place.project),
            sources.files_in(point.run.sources),
            replace(place, run_root=Path(folder.facts["run_root"])),
            [x for x in point.overrides if not x.startswith("seed=")],
            folder.made_by,
        )
        for label, point in settings.items()
        if values <= {*label.split()}
    ]
    ConfigError.raise_if(
        not sides,
        folder.id,
        "has no such setting",
        setting,
        f"one of: {first_few(list(settings), 10)}",
    )
    return sides


def read_values(run: RunFolder) -> dict[str, float]:
    """Return a finished run's values: metrics at the best step, `final/...`, seconds and steps."""
    summary = read_mapping(run.summary, shapes.SUMMARY)
    if summary.get("status") != "finished":
        return {}
    metrics = summary["metrics"]
    best = metrics["best"] or metrics["final"]
    evaluated = [
        evaluation["metrics"]
        for evaluation in summary.get("evaluations", {}).values()
        if evaluation["step"] == best.get("step", summary["steps"])
    ]
    values = {name: value for some in (*evaluated, best) for name, value in some.items()}
    return {
        **values,
        **{f"final/{name}": value for name, value in metrics["final"].items()},
        "seconds": summary["timings"]["training_s"],
        "steps": float(summary["steps"]),
    }


def _key(lines: str, code: Mapping[str, Any]) -> str:
    settings = sorted(_SEED.sub("", lines).splitlines())
    return "\n".join([*settings, json.dumps(code, sort_keys=True)])
