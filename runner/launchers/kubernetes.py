"""Runs in pods of Kubernetes: one Indexed Job for all, written as a manifest and applied if kubectl
is available; this process need not keep running.

SWEEP/kubernetes/
  0001.yaml      a Job's manifest
  0001.json      which point each of its indices is, and what its pods need to know
  cancelled/     an empty file for each index that was told to stop: 0001-3
SWEEP/code/      copies of the code, one for each state in which it was submitted

`kubernetes_manifest.py` writes the manifest, `kubernetes_job.py` runs in the pods,
`kubernetes_status.py` reads the cluster's state.
"""

from __future__ import annotations

import os
import shutil
import sys
import time
import uuid
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, final

import yaml

from samewise.runner.errors import INTERRUPTED, ConfigError, Problem
from samewise.runner.launchers import kubernetes_manifest as manifest
from samewise.runner.launchers.base import Job, Launcher, Seen, Standing
from samewise.runner.launchers.kubernetes_status import Cluster
from samewise.runner.launchers.snapshot import snapshot, variables
from samewise.runner.launchers.submission import Submitted, group_jobs, newest, next_file, too_small
from samewise.runner.records import shapes
from samewise.runner.records.files import read_json, write_json
from samewise.runner.records.sweep_folder import SweepFolder

HOME = "kubernetes"
_LONGEST = 10_000
"""Indices of one Job; from 100,000 on Kubernetes has further conditions."""


@final
class Kubernetes(Launcher):
    """Writes manifests of Indexed Jobs.

    A pod that is asked to end saves its run, and another pod resumes it.

    Args:
        image: Of the container: Python with samewise's dependencies.
        volumes: For each folder that this machine and the pods share, where the pods have it from:
            `CLAIM`, `CLAIM/FOLDER` of a PersistentVolumeClaim, or `/FOLDER` of the node. One of
            them holds the sweep's folder.
        python: The interpreter in the image.
        namespace: Where the Jobs are made; null: kubectl's own.
        nodes: A run is one pod: 1.
        cpus: Of each pod; null: the threads of its processes and its loader's workers.
        gpus: Of each pod; null: one for each process, unless device=cpu.
        gpu_resource: What the cluster calls a GPU.
        memory: Of each pod; null: no limit.
        jobs: How many at a time; null: any number.
        env: Further variables of the pods.
        user: Whom the pods run as, `UID:GID`; null: as you, so that the files are yours; "image":
            as the image says.
        pod: Further fields of the pods' spec: `nodeSelector`, `tolerations`, `imagePullSecrets`.
        notice_s: Seconds that a pod has to save when it is told to end.
        retries: How often a run is started again that was killed without a chance to save, by lack
            of memory for example.
        apply: Whether to apply the manifest by kubectl; null: if kubectl is installed.
        poll_s: Seconds between two looks.
    """

    detached = True

    def __init__(
        self,
        *,
        image: str | None = None,
        volumes: Mapping[str, Any] | None = None,
        python: str = "python",
        namespace: str | None = None,
        nodes: int = 1,
        cpus: int | None = None,
        gpus: int | None = None,
        gpu_resource: str = "nvidia.com/gpu",
        memory: str | int | None = None,
        jobs: int | None = None,
        env: Mapping[str, Any] | None = None,
        user: str | None = None,
        pod: Mapping[str, Any] | None = None,
        notice_s: int = 120,
        retries: int = 3,
        apply: bool | None = None,
        poll_s: float = 5.0,
    ) -> None:
        least = {
            "cpus": (cpus, 1),
            "gpus": (gpus, 0),
            "jobs": (jobs, 1),
            "notice_s": (notice_s, 1),
            "retries": (retries, 0),
            "poll_s": (poll_s, 0.1),
        }
        found = too_small(least)
        if nodes != 1:
            hint = (
                "strategy=elastic strategy.nproc=N: as many processes as the pod has GPUs; "
                "several machines for one run: launcher=slurm"
            )
            found.append(
                Problem("nodes", "a run is one pod, which runs on one machine", nodes, "1", hint)
            )
        found += [
            Problem(
                f"pod.{name}", "is set by the launcher itself", hint="see the launcher's other keys"
            )
            for name in manifest.OURS
            if name in (pod or {})
        ]
        if found:
            raise ConfigError(*found)
        self._cpus, self._gpus, self.most, self._apply, self.poll_s = (
            cpus,
            gpus,
            jobs,
            apply,
            poll_s,
        )
        self._template = manifest.Template(
            image=image or "",
            python=python,
            namespace=namespace,
            volumes=[
                manifest.Volume.of(os.path.normpath(path), source)
                for path, source in (volumes or {}).items()
            ],
            memory=str(memory) if memory is not None else None,
            gpu_resource=gpu_resource,
            env={name: str(value) for name, value in (env or {}).items()},
            user=_user(user),
            notice_s=notice_s,
            retries=retries,
            jobs=jobs,
            pod=pod or {},
        )

    def open(self, sweep: SweepFolder) -> None:
        home, held = sweep.path.absolute() / HOME, self._template.volumes
        found = list[Problem]()
        if not self._template.image:
            expected = "an image with Python and samewise's dependencies"
            found.append(
                Problem(
                    "launcher.image",
                    "is missing: pods need an image",
                    expected=expected,
                    hint="launcher.image=registry.example/torch:1",
                )
            )
        if not any(one.holds(home) for one in held):
            message = (
                "is missing: pods read the sweep and write its runs on a volume"
                if not held
                else "do not contain the sweep's folder"
            )
            value = {one.path: one.claim or one.folder for one in held} if held else ...
            hint = (
                f"'+launcher.volumes={{{Path.cwd()}: CLAIM}}', with the name of a "
                "PersistentVolumeClaim, or /A/FOLDER that exists on every node"
            )
            found.append(
                Problem(
                    "launcher.volumes",
                    message,
                    value,
                    f"a volume for {home.parent}, or a folder above it",
                    hint,
                )
            )
        if self._apply and shutil.which("kubectl") is None:
            found.append(
                Problem(
                    "launcher.apply",
                    "kubectl is not installed here",
                    True,
                    hint="launcher.apply=false writes the manifest only",
                )
            )
        if found:
            raise ConfigError(*found)
        self._sweep, self._home = sweep, home
        has_kubectl = self._apply is not False and shutil.which("kubectl") is not None
        self._cluster = Cluster(self._template.namespace) if has_kubectl else None

    def submit(self, jobs: Sequence[Job]) -> None:
        (self._home / "cancelled").mkdir(parents=True, exist_ok=True)
        code = snapshot(self._sweep)
        for needs, some in group_jobs(jobs, self._needs, _LONGEST):
            self._submit(some, needs, code)

    def look(self, numbers: Iterable[int]) -> dict[int, Seen]:
        where = newest(self._home, numbers)
        known = dict[str, dict[int, Seen] | None]()
        for place in where.values():
            name = place.given["job"]
            if name not in known:
                known[name] = (
                    self._cluster.look(name, len(place.given["points"])) if self._cluster else None
                )
        return {
            number: self._look_at(number, place, known[place.given["job"]])
            for number, place in where.items()
        }

    def cancel(self, numbers: Iterable[int], *, kill: bool = False) -> None:
        where = newest(self._home, numbers)
        standing = self.look(where)
        live = [
            place
            for number, place in where.items()
            if standing[number].standing is not Standing.gone
        ]
        for place in live:
            place.mark().touch()  # used by pods, including those not started yet
        for file in sorted({place.file for place in live}):
            name = read_json(file, shapes.SUBMISSION)["job"]
            if kill and self._cluster:
                self._cluster.kill(name, [place.index for place in live if place.file == file])
            if self._is_wanted(file):
                continue
            if self._cluster:
                self._cluster.delete(name)
            else:
                print(
                    f"pods of the Job {name} that start later will end at once; to delete "
                    f"the Job: kubectl delete -f {file.with_suffix('.yaml')}",
                    file=sys.stderr,
                )

    def _is_wanted(self, file: Path) -> bool:
        """Whether any run of a Job is neither finished nor cancelled."""
        own = {
            number: place
            for number, place in newest(
                self._home, read_json(file, shapes.SUBMISSION)["points"]
            ).items()
            if place.file == file
        }
        return any(
            seen.standing is not Standing.gone and not own[number].mark().exists()
            for number, seen in self.look(own).items()
        )

    def _look_at(self, number: int, place: Submitted, of_job: Mapping[int, Seen] | None) -> Seen:
        """A point's state: from the cluster if it knows the Job, otherwise from the run's own
        record.
        """
        if of_job:
            seen = of_job[place.index]
            return (
                Seen(seen.standing, "cancelled")
                if seen.standing is Standing.gone and place.mark().exists()
                else seen
            )
        word = self._sweep.word(number)
        has_begun = word.get("began", 0) >= place.given["submitted"]
        is_over = has_begun and "ended" in word
        if is_over and word.get("exit_code") != INTERRUPTED:
            return Seen(Standing.gone)
        if place.mark().exists() and (is_over or not has_begun):
            return Seen(Standing.gone, "cancelled")
        if of_job is not None and place.given["applied"]:
            return Seen(Standing.gone, f"Kubernetes has no record of its Job {place.given['job']}")
        if is_over:
            return Seen(Standing.waiting, "saved; it will be started again")
        hint = (
            "" if place.given["applied"] else f"kubectl apply -f {place.file.with_suffix('.yaml')}"
        )
        return Seen(Standing.running) if has_begun else Seen(Standing.waiting, hint)

    def _needs(self, job: Job) -> tuple[int, int]:
        """The CPUs and GPUs of a pod."""
        gpus = self._gpus if self._gpus is not None else job.processes if job.wants_gpu else 0
        return self._cpus or max(1, job.threads), gpus

    def _submit(self, jobs: Sequence[Job], needs: tuple[int, int], code: Path) -> None:
        file = next_file(self._home)
        name = manifest.job_name(self._sweep.id, f"{file.stem}-{uuid.uuid4().hex[:5]}", len(jobs))
        given = {
            "job": name,
            "points": [job.number for job in jobs],
            "variables": [dict(job.environment) for job in jobs],
            "submitted": time.time(),
            "applied": False,
        }
        cpus, gpus = needs
        whole = self._template.job(
            file,
            name=name,
            sweep=self._sweep.id,
            count=len(jobs),
            cpus=cpus,
            gpus=gpus,
            variables=variables(code),
            cwd=Path.cwd(),
        )
        paper = file.with_suffix(".yaml")
        paper.write_text(yaml.safe_dump(whole, sort_keys=False, width=160), encoding="utf-8")
        write_json(file, given)
        if self._cluster is None:
            print(f"nothing runs yet; start it with: kubectl apply -f {paper}", file=sys.stderr)
            return
        try:
            self._cluster.apply(paper)
        except ConfigError:
            file.unlink()  # the manifest is kept for inspection
            raise
        write_json(file, {**given, "applied": True})


def _user(given: str | None) -> tuple[int, int] | None:
    if given is None:
        return os.getuid(), os.getgid()
    if given == "image":
        return None
    uid, _, gid = str(given).partition(":")
    if not (uid.isdigit() and gid.isdigit()):
        raise ConfigError(
            Problem(
                "user", "is not a valid user", given, "UID:GID, such as 1000:1000; null; or image"
            )
        )
    return int(uid), int(gid)
