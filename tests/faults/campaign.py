"""Thousands of random faults: after each the same command is run again, and at the end nothing may be lost, doubled or different.

    python tests/faults/campaign.py --trials 1000 --seed 0 --jobs 2

A trial trains a recipe at reduced size. Up to fourteen times it is struck: killed at a random moment or at a call on a file of the run, refused such a
call by the disk, met by a full disk or by a clock that jumps; its MLflow server may lie meanwhile. Then the command is given until it ends, and what
came of it is compared with a training that was not disturbed: weights, trace, checkpoints, journal, and what MLflow has. `--only SEED` repeats one
trial, whose seed a failure names: the faults are the same, but a moment is not.

Trainings are forked from a process that has imported torch; sweeps, and runs of several processes, start theirs as a user's do. There any process may be
the one that is killed, and each meets the fault of a disk or a clock at its own n-th call.
"""

import argparse
import collections
import errno
import importlib
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from compared import require_in_store, require_kept, results_in
from struck import LONGEST_S, Command, Wrong, compiled

HERE = Path(__file__).parent
COMMON = ("debug=tiny", "callbacks=none", "evaluate.pictures=false", "max_steps=6", "evaluate.every_steps=3", "replicas=2")
COMMON += ("checkpoint.every_steps=1", "checkpoint.keep_last=99", "tracking.log_system=false", "tracking.send_every_s=0.2", "tracking.flush_timeout_s=20")
RECIPES = {
    "classification": ("experiment=resnet18_digits", "model.width=4"),
    "detection": ("experiment=retinanet_coco", "transforms=detection_ssd", "batch_size=2", "model.channels=16", "max_steps=3"),
    "separation": ("experiment=conv_tasnet_spoken_digits",),
    "vocoder": ("experiment=wavernn_spoken_digits", "max_steps=4"),
    "speech_recognition": ("experiment=wav2letter_spoken_digits", "model.width=16", "model.top_width=32"),
}
MIXTURES = (
    ("reproducibility.threads=1",),
    ("reproducibility.threads=2", "memory_format=channels_last", "callbacks=[ema]", "clip_norm=1.0"),
    ("reproducibility.threads=1", "precision=bf16", "accumulate=2", "batch_size=4", "callbacks=[ema]", "loader.drop_last=false"),
)
FORMS = {"": 0.8, ", 2 processes": 0.14, ", sweep": 0.06}
KINDS = {"kill": 10, "kill at a call": 10, "read or write error": 2, "full disk": 2, "clock": 1}
PLANS = {"none": 0, "read or write error": 1, "full disk": 2, "kill at a call": 3, "clock": 4}
ERRORS = (errno.EIO, errno.EIO, errno.ENOSPC, errno.EINTR, errno.EDQUOT)
PRELOAD = ("torchvision", "torchaudio", "matplotlib.figure", "samewise.runner.cli", "samewise.runner.commands.train", "samewise.runner.config.check.components")
PRELOAD += ("samewise.runner.training.loop", "samewise.runner.training.build", "samewise.runner.training.prepare", "samewise.runner.config.compose")


@dataclass(frozen=True)
class Reference:
    """The outcome of an undisturbed command: results by run, its duration, and the number of calls that its process made on files of the run."""

    results: dict[str, dict[str, Any]]
    seconds: float
    calls: int


class Campaign:
    """Trials in one process.

    Args:
        home: A folder for all of them.
        server: The address of the MLflow server's proxy, and the file of the server's store; None: without.
        kinds: Of faults, with the weight of each.
        forms: Of trainings, likewise.
    """

    def __init__(self, home: Path, server: tuple[str, Path] | None, kinds: dict[str, int], forms: dict[str, float]) -> None:
        self.home, self.server, self.kinds, self.forms = home, server, kinds, forms
        self.counts: collections.Counter[str] = collections.Counter()
        self.wordless: collections.Counter[str] = collections.Counter()
        self._references: dict[tuple[str, ...], Reference] = {}
        for name in PRELOAD:
            importlib.import_module(name)
        from samewise.runner.tracking.sender import prepare_environment

        prepare_environment()
        self._store = home / "store.db"
        if not (child := os.fork()):
            importlib.import_module("samewise.runner.tracking.store").open_client(f"sqlite:///{self._store}")
            os._exit(0)
        os.waitpid(child, 0)
        importlib.import_module("samewise.runner.tracking.sending")
        self._number = 0

    def command(self, given: list[str], root: Path, *, plan: tuple[int, ...] = (0, 0, 0, 0, 0), composed: Any = None, spread: bool = False) -> Command:
        self._number += 1
        return Command(given, self.home / f"said-{self._number}.txt", plan, root, composed, spread=spread)

    def _composed(self, given: list[str]) -> Any:
        """The composed config for a trial's disturbed trainings, with samewise's own code read too: each would need half of its time for that."""
        from samewise.runner.config.compose import compose
        from samewise.runner.config.project import find
        from samewise.runner.records import own_code

        if given[0] == "sweep":
            return None
        composed = compose(given[1:], project=find(packages=[], configs=[]), strict=False)
        own_code.record([str(composed.cfg.recipe._target_), str(composed.cfg.dataset.train._target_)])
        return composed

    def reference(self, given: tuple[str, ...]) -> Reference:
        """The outcome of an undisturbed command."""
        if given not in self._references:
            root = self.home / f"reference-{len(self._references)}"
            began = time.monotonic()
            command = self.command([*given, "tracking=none", f"run_root={root}"], root)
            if command.end():
                raise Wrong(f"the undisturbed training failed:\n{command.text[-2000:]}")
            self._references[given] = Reference(results_in(root), time.monotonic() - began, command.calls)
        return self._references[given]

    def trial(self, seed: int) -> None:
        """One trial. Raises Wrong."""
        chance = random.Random(seed)
        recipe = chance.choice([*RECIPES])
        form: str = chance.choices([*self.forms], [*self.forms.values()])[0]
        recipe = "classification" if form == ", sweep" else recipe
        settings = (*COMMON, *RECIPES[recipe], *chance.choice(MIXTURES))
        whole_command = ["sweep", "--retry-failed", "seed=0,1", "launcher.jobs=2"] if form == ", sweep" else ["train"]
        reference = self.reference((*whole_command, *settings))
        root = self.home / f"trial-{seed}"
        tracking = chance.choice(["none", "sqlite", "sqlite", "server" if self.server else "none"])
        given = [*whole_command, *settings, f"run_root={root}", f"loader.num_workers={chance.choice([0, 0, 1, 2])}"]
        given += [f"checkpoint.background={chance.choice(['true', 'false'])}", *(["strategy=elastic", "strategy.nproc=2"] if form == ", 2 processes" else [])]
        experiment = f"trial-{self.home.name}-{seed}"
        uri = self.server[0] if tracking == "server" and self.server else f"sqlite:///{root}/mlflow.db"
        given += ["tracking=none"] if tracking == "none" else [f"tracking.experiment={experiment}", f"tracking.uri={uri}"]
        if tracking == "sqlite" and chance.random() < 0.9:  # the others make their store, which takes longer than the training
            root.mkdir()
            shutil.copy(self._store, root / "mlflow.db")
        seen: dict[str, str] = {}
        composed = self._composed(given)
        for _ in range(chance.randint(2, 5) if form else chance.randint(4, 14)):
            kind = chance.choices([*self.kinds], [*self.kinds.values()])[0]
            if self._strike(chance, kind, given, root, reference, composed, f"{recipe}{form}") == 0:
                break
            require_kept(root, seen)
        for _ in range(6):
            ended = self.command(given, root)
            if ended.end() == 0:
                break
        else:
            raise Wrong(f"{' '.join(given)}\nstill ends with {ended.code}:\n{ended.text[-2500:]}")
        require_kept(root, seen)
        found = results_in(root)
        if [*found] != [*reference.results]:
            raise Wrong(f"{' '.join(given)}\nruns {[*found]} instead of {[*reference.results]}")
        for run, expected in reference.results.items():
            for name, value in expected.items():
                if found[run][name] != value:
                    raise Wrong(f"{' '.join(given)}\n{name} of {run} differs:\nexpected {str(value)[:1500]}\nfound    {str(found[run][name])[:1500]}")
        if tracking != "none":
            journals = [expected["journal"] for expected in reference.results.values()]
            self._require_sent(root, journals, self.server[1] if tracking == "server" and self.server else root / "mlflow.db", experiment)
        self.counts[f"trials, tracking {tracking}"] += 1
        shutil.rmtree(root)

    def _strike(self, chance: random.Random, kind: str, given: list[str], root: Path, reference: Reference, composed: Any, label: str) -> int:
        several = ", " in label
        error, lasts = chance.choice(ERRORS), chance.choice([1, 3, 10, 10**9])
        plan = (
            (0, 0, 0, 0, 0)
            if kind == "kill"
            else (
                PLANS[kind],
                min(chance.randint(1, reference.calls) for _ in range(chance.choice([1, 2]))),
                error,
                lasts,
                chance.choice([-86400 * 400, -3600, 3600, 86400 * 4000]),
            )
        )
        command = self.command(given, root, plan=plan, composed=composed, spread=several)
        if kind == "kill":
            command.wait(chance.random() * reference.seconds * (3 if several else 1))
            struck = command.code is None
            if struck:
                command.kill(chance.choices(["itself", "everything", "one that it started"], [6, 3, 6 if several else 0])[0], chance)
        code = command.end()
        if kind != "kill":
            struck = command.mark.exists()
        if struck:
            self.counts[f"{kind}: {label}"] += 1
            self.counts["faults"] += 1
            self.counts["kills"] += kind.startswith("kill")
        text = command.text
        if code not in (0, 1, 2, 3, -signal.SIGKILL):
            raise Wrong(f"{' '.join(given)}\nexit code {code} after {kind} {plan}:\n{text[-2500:]}")
        if code > 0 and ("Traceback" in text or "--debug" in text):
            self.wordless[f"{kind} {os.strerror(error) if plan[0] == 1 else ''}: {text.strip()[:300]}"] += 1
        return code

    def _require_sent(self, root: Path, journals: list[Any], store: Path, experiment: str) -> None:
        until = time.monotonic() + LONGEST_S  # longer than a run's own sender tries to reach a server that lies
        while (sync := self.command(["sync", "--run-root", str(root)], root)).end():
            if time.monotonic() > until:
                raise Wrong(f"sync still ends with {sync.code}:\n{sync.text[-1500:]}")
            time.sleep(0.5)
        require_in_store(store, experiment, journals)


def work(home: Path, seeds: Sequence[int], server: tuple[str, Path] | None, until: float, kinds: dict[str, int], forms: dict[str, float]) -> None:
    """Run trials, and write their counts as a line of JSON after each."""
    campaign = Campaign(home, server, kinds, forms)
    with open(home / "counts.jsonl", "a") as told:
        for seed in seeds:
            if time.time() > until:
                break
            failed = ""
            try:
                campaign.trial(seed)
            except Wrong as wrong:
                failed = str(wrong)
            except Exception:
                failed = traceback.format_exc()
            campaign.counts["trials"] += 1
            line = {"seed": seed, "failed": failed, "counts": campaign.counts, "wordless": campaign.wordless}
            told.write(json.dumps(line) + "\n")
            told.flush()
            if failed:
                print(f"FAILED: --only {seed}\n{failed}\n", flush=True)
            for said in home.glob("said-*"):
                said.unlink()


def main() -> int:
    """Read the command line, start the workers, and add up their counts."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trials", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0, help="trials have the seeds SEED * 1000000, SEED * 1000000 + 1, ...")
    parser.add_argument("--only", type=int, help="the seed of one trial")
    parser.add_argument("--form", action="append", choices=["one process", "2 processes", "sweep"], help="of training, this alone (may be repeated)")
    parser.add_argument("--kind", action="append", choices=[*KINDS], help="strike by this alone (may be repeated)")
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--minutes", type=float, default=1e6)
    parser.add_argument("--no-server", action="store_true", help="without an MLflow server that lies")
    parser.add_argument("--keep", action="store_true", help="keep the folder of what was trained")
    given = parser.parse_args()
    home = Path(tempfile.mkdtemp(prefix="samewise-faults-"))
    os.environ.update(OMP_NUM_THREADS="1", MLFLOW_DISABLE_TELEMETRY="true", CUBLAS_WORKSPACE_CONFIG=":4096:8", XDG_CONFIG_HOME=str(home / "home"))
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    environment = {**os.environ, "LD_PRELOAD": str(compiled(home))}
    first = given.only if given.only is not None else given.seed * 1_000_000
    seeds = range(first, first + (1 if given.only is not None else given.trials))
    import_liar = [sys.executable, str(HERE / "liar.py"), str(home)]
    liar = None if given.no_server else subprocess.Popen(import_liar, stdout=subprocess.PIPE, stdin=subprocess.PIPE, text=True, start_new_session=True)
    address = liar.stdout.readline().strip() if liar is not None and liar.stdout is not None else ""
    until = time.time() + 60 * given.minutes
    code = "import sys; sys.path.insert(0, {!r}); import campaign, pathlib; campaign.work(pathlib.Path({!r}), {!r}, {!r}, {!r}, {!r}, {!r})"
    forms = {form: weight for form, weight in FORMS.items() if not given.form or (form.removeprefix(", ") or "one process") in given.form}
    workers = list[subprocess.Popen[bytes]]()
    try:
        for number in range(given.jobs):
            folder = home / f"worker{number}"
            folder.mkdir()
            told = (address, str(home / "server.db")) if address else None
            started = code.format(str(HERE), str(folder), seeds[number :: given.jobs], told, until, {kind: KINDS[kind] for kind in given.kind or KINDS}, forms)
            workers.append(subprocess.Popen([sys.executable, "-c", started], env=environment))
        for worker in workers:
            worker.wait()
    finally:
        for worker in workers:
            worker.kill()
        if liar is not None:
            liar.communicate()
    failures = summarise(home)
    if not given.keep and not failures:
        shutil.rmtree(home, ignore_errors=True)
    else:
        print(f"kept: {home}")
    return int(bool(failures))


def summarise(home: Path) -> int:
    """Print the counts of all workers; return how many trials failed."""
    counts, wordless, failed = collections.Counter[str](), collections.Counter[str](), list[int]()
    for file in home.glob("worker*/counts.jsonl"):
        lines = [json.loads(line) for line in file.read_text().splitlines()]
        failed += [line["seed"] for line in lines if line["failed"]]
        counts += collections.Counter(lines[-1]["counts"] if lines else {})
        wordless += collections.Counter(lines[-1]["wordless"] if lines else {})
    for name, count in sorted(counts.items()):
        print(f"{count:7} {name}")
    for name, count in wordless.most_common(10):
        print(f"{count:7} without words of its own: {name}")
    print(f"{len(failed):7} failed" + "".join(f"\n        --only {seed}" for seed in failed))
    return len(failed)


if __name__ == "__main__":
    raise SystemExit(main())
