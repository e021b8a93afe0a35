"""Run jobs in pods of Kubernetes, as an Indexed Job with an index for each run.

The Job is written as a manifest, and applied if kubectl is available. This process need not keep
running.

    SWEEP/kubernetes/
      0001.yaml      a Job's manifest
      0001.json      the point of each of its indices, and what its pods need to know
      cancelled/     an empty file for each index that was told to stop: 0001-3
    SWEEP/code/      copies of the code, one for each state in which it was submitted

`kubernetes_manifest.py` writes the manifest, `kubernetes_job.py` runs in the pods,
`kubernetes_status.py` reads the cluster's state.
"""

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
from samewise.runner.launchers.base import Job, JobState, Launcher, Standing
from samewise.runner.launchers.kubernetes_status import Cluster
from samewise.runner.launchers.snapshot import snapshot, variables
from samewise.runner.launchers.submission import Submitted, group_jobs, newest, next_file, too_small
from samewise.runner.records import shapes
from samewise.runner.records.files import read_json, write_json
from samewise.runner.records.sweep_folder import SweepFolder

HOME = "kubernetes"
_MAX_INDICES = 10_000
"""Indices of one Job. Kubernetes has further conditions from 100,000 on."""


@final
class Kubernetes(Launcher):
    """Writes manifests of Indexed Jobs.

    A pod that is asked to end saves its run, and another pod resumes it.

    Args:
        image: Container image: Python with samewise's dependencies.
        volumes: Source of each folder that this machine and the pods share: `CLAIM` or
            `CLAIM/FOLDER` of a PersistentVolumeClaim, or `/FOLDER` of the node. One of them holds
            the sweep's folder.
        python: The interpreter in the image.
        namespace: Namespace of the Jobs; null: kubectl's own.
        cpus: CPUs of each pod; null: the threads of its processes and its loader's workers.
        gpus: GPUs of each pod; null: one for each process, unless device=cpu.
        gpu_resource: The cluster's name for a GPU.
        memory: Memory of each pod; null: no limit.
        jobs: Maximum number of jobs at a time; null: any number.
        env: Further variables of the pods.
        user: User of the pods, `UID:GID`; null: you, so that the files are yours; "image": the
            image's.
        pod: Further fields of the pods' spec: `nodeSelector`, `tolerations`, `imagePullSecrets`.
        notice_s: Seconds that a pod has to save when it is told to end.
        retries: How often a run starts again that was killed without a chance to save, by lack of
            memory for example.
        apply: Whether to apply the manifest by kubectl; null: if kubectl is installed.
        poll_s: Seconds between two looks at the jobs.

    Raises:
        ConfigError: A value is not valid, or `pod` has a field that the launcher sets itself.
    """

    detached = True

    def __init__(
        self,
        *,
        image: str | None = None,
        volumes: Mapping[str, Any] | None = None,
        python: str = "python",
        namespace: str | None = None,
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
        minimums = {
            "cpus": (cpus, 1),
            "gpus": (gpus, 0),
            "jobs": (jobs, 1),
            "notice_s": (notice_s, 1),
            "retries": (retries, 0),
            "poll_s": (poll_s, 0.1),
        }
        hint = "see the launcher's other keys"
        ConfigError.raise_all(
            [
                *too_small(minimums),
                *(
                    Problem(f"pod.{name}", "is set by the launcher itself", hint=hint)
                    for name in manifest.OURS
                    if name in (pod or {})
                ),
            ]
        )
        self._cpus, self._gpus = cpus, gpus
        self.most, self._apply, self.poll_s = jobs, apply, poll_s
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
        home, volumes = sweep.path.absolute() / HOME, self._template.volumes
        problems = list[Problem]()
        if not self._template.image:
            problems.append(
                Problem(
                    "launcher.image",
                    "is missing: pods need an image",
                    expected="an image with Python and samewise's dependencies",
                    hint="launcher.image=registry.example/torch:1",
                )
            )
        if not any(volume.holds(home) for volume in volumes):
            message = (
                "is missing: pods read the sweep and write its runs on a volume"
                if not volumes
                else "do not contain the sweep's folder"
            )
            value = (
                {volume.path: volume.claim or volume.folder for volume in volumes}
                if volumes
                else ...
            )
            hint = (
                f"'+launcher.volumes={{{Path.cwd()}: CLAIM}}', with the name of a "
                "PersistentVolumeClaim, or /A/FOLDER that exists on every node"
            )
            problems.append(
                Problem(
                    "launcher.volumes",
                    message,
                    value,
                    f"a volume for {home.parent}, or a folder above it",
                    hint,
                )
            )
        if self._apply and shutil.which("kubectl") is None:
            problems.append(
                Problem(
                    "launcher.apply",
                    "kubectl is not installed here",
                    True,
                    hint="launcher.apply=false writes the manifest only",
                )
            )
        ConfigError.raise_all(problems)
        self._sweep, self._home = sweep, home
        has_kubectl = self._apply is not False and shutil.which("kubectl") is not None
        self._cluster = Cluster(self._template.namespace) if has_kubectl else None

    def submit(self, jobs: Sequence[Job]) -> None:
        (self._home / "cancelled").mkdir(parents=True, exist_ok=True)
        code = snapshot(self._sweep)
        for needs, group in group_jobs(jobs, self._needs, _MAX_INDICES):
            self._submit(group, needs, code)

    def look(self, numbers: Iterable[int]) -> dict[int, JobState]:
        jobs = newest(self._home, numbers)
        sizes = {job.record["job"]: len(job.record["points"]) for job in jobs.values()}
        states_of_job = {
            name: self._cluster.look(name, size) if self._cluster else None
            for name, size in sizes.items()
        }
        return {
            number: self._state_of(number, job, states_of_job[job.record["job"]])
            for number, job in jobs.items()
        }

    def cancel(self, numbers: Iterable[int], *, kill: bool = False) -> None:
        jobs = newest(self._home, numbers)
        standing = self.look(jobs)
        live = [
            job for number, job in jobs.items() if standing[number].standing is not Standing.ended
        ]
        for job in live:
            # Pods look for the mark, including those that have not started yet
            job.mark().touch()
        for file in sorted({job.file for job in live}):
            name = read_json(file, shapes.SUBMISSION)["job"]
            if kill and self._cluster:
                self._cluster.kill(name, [job.index for job in live if job.file == file])
            # Deleting the Job would end its other runs too
            if self._has_live_runs(file):
                continue
            if self._cluster:
                self._cluster.delete(name)
            else:
                print(
                    f"pods of the Job {name} that start later will end at once; delete the Job "
                    f"with: kubectl delete -f {file.with_suffix('.yaml')}",
                    file=sys.stderr,
                )

    def _has_live_runs(self, file: Path) -> bool:
        """Whether any run of a Job is neither finished nor cancelled."""
        jobs = {
            number: job
            for number, job in newest(
                self._home, read_json(file, shapes.SUBMISSION)["points"]
            ).items()
            if job.file == file
        }
        return any(
            state.standing is not Standing.ended and not jobs[number].mark().exists()
            for number, state in self.look(jobs).items()
        )

    def _state_of(
        self, number: int, job: Submitted, states: Mapping[int, JobState] | None
    ) -> JobState:
        """Return a point's state, the cluster's if it knows the Job, otherwise the run's own."""
        if states:
            state = states[job.index]
            return (
                JobState(state.standing, "cancelled")
                if state.standing is Standing.ended and job.mark().exists()
                else state
            )
        record = self._sweep.word(number)
        # The record may still be that of an earlier submission
        has_begun = record.get("began", 0) >= job.record["submitted"]
        is_over = has_begun and "ended" in record
        if is_over and record.get("exit_code") != INTERRUPTED:
            return JobState(Standing.ended)
        if job.mark().exists() and (is_over or not has_begun):
            return JobState(Standing.ended, "cancelled")
        # Empty states: the cluster answered, and has no such Job. None: it did not answer
        if states is not None and job.record["applied"]:
            return JobState(
                Standing.ended, f"Kubernetes has no record of its Job {job.record['job']}"
            )
        # The Job's failure rules ignore this exit code, so another pod follows
        if is_over:
            return JobState(Standing.waiting, "saved; it will be started again")
        hint = "" if job.record["applied"] else f"kubectl apply -f {job.file.with_suffix('.yaml')}"
        return JobState(Standing.running) if has_begun else JobState(Standing.waiting, hint)

    def _needs(self, job: Job) -> tuple[int, int]:
        """Return the CPUs and GPUs of a pod."""
        gpus = self._gpus if self._gpus is not None else job.processes if job.wants_gpu else 0
        return self._cpus or max(1, job.threads), gpus

    def _submit(self, jobs: Sequence[Job], needs: tuple[int, int], code: Path) -> None:
        file = next_file(self._home)
        name = manifest.job_name(self._sweep.id, f"{file.stem}-{uuid.uuid4().hex[:5]}", len(jobs))
        submission = {
            "job": name,
            "points": [job.number for job in jobs],
            "variables": [dict(job.environment) for job in jobs],
            "submitted": time.time(),
            "applied": False,
        }
        cpus, gpus = needs
        job_manifest = self._template.job(
            file,
            name=name,
            sweep=self._sweep.id,
            count=len(jobs),
            cpus=cpus,
            gpus=gpus,
            variables=variables(code),
            cwd=Path.cwd(),
        )
        manifest_file = file.with_suffix(".yaml")
        manifest_file.write_text(
            yaml.safe_dump(job_manifest, sort_keys=False, width=160), encoding="utf-8"
        )
        # Written before the Job exists, as its pods read it
        write_json(file, submission)
        if self._cluster is None:
            print(
                f"nothing runs yet; start it with: kubectl apply -f {manifest_file}",
                file=sys.stderr,
            )
            return
        try:
            self._cluster.apply(manifest_file)
        except ConfigError:
            # The manifest stays, for inspection
            file.unlink()
            raise
        write_json(file, {**submission, "applied": True})


def _user(user: str | None) -> tuple[int, int] | None:
    """Parse `UID:GID`; None for the image's user."""
    if user is None:
        return os.getuid(), os.getgid()
    if user == "image":
        return None
    uid, _, gid = str(user).partition(":")
    ConfigError.raise_if(
        not (uid.isdigit() and gid.isdigit()),
        "user",
        "is not a valid user",
        user,
        "UID:GID, such as 1000:1000; null; or image",
    )
    return int(uid), int(gid)
