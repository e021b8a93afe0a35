"""Read the state of a Job and its pods from a cluster, by kubectl."""

import json
import subprocess
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from samewise.runner.errors import ConfigError
from samewise.runner.launchers.base import JobState, Standing
from samewise.runner.launchers.submission import PATIENCE_S, call, last_line

_INDEX = "batch.kubernetes.io/job-completion-index"


@dataclass(frozen=True)
class Cluster:
    """Cluster that kubectl is set up for.

    Args:
        namespace: Namespace of the Jobs; None for kubectl's own.
    """

    namespace: str | None

    def apply(self, manifest: Path) -> None:
        """Create the Job.

        Raises:
            ConfigError: The cluster refuses it.
        """
        done = self._call("apply", f"--filename={manifest}")
        ConfigError.raise_if(
            done.returncode,
            "launcher",
            f"kubectl cannot apply the Job: {last_line(done.stderr) or 'no message'}",
            hint="`kubectl config current-context` names the cluster; launcher.apply=false "
            "writes the manifest only",
        )

    def look(self, name: str, count: int) -> dict[int, JobState] | None:
        """Return the state of each index of a Job.

        Empty if there is no such Job; None if the cluster does not answer.
        """
        job = self._call("get", "job", name, "--output=json")
        if job.returncode:
            return {} if "NotFound" in job.stderr else None
        pods = self._call(
            "get", "pods", f"--selector=batch.kubernetes.io/job-name={name}", "--output=json"
        )
        return read_job(
            json.loads(job.stdout),
            json.loads(pods.stdout)["items"] if not pods.returncode else [],
            count,
        )

    def delete(self, name: str) -> None:
        """Ask the Job's pods to end, then delete it."""
        self._call(
            "delete", "job", name, "--ignore-not-found", "--cascade=foreground", "--wait=false"
        )

    def kill(self, name: str, indices: Iterable[int]) -> None:
        """End some of a Job's pods at once."""
        selector = (
            f"batch.kubernetes.io/job-name={name},{_INDEX} in ({','.join(map(str, indices))})"
        )
        self._call("delete", "pods", f"--selector={selector}", "--grace-period=1", "--wait=false")

    def _call(self, *command: str) -> subprocess.CompletedProcess[str]:
        namespace = [f"--namespace={self.namespace}"] if self.namespace else []
        return call(
            "kubectl",
            *namespace,
            f"--request-timeout={PATIENCE_S}s",
            *command,
            patience_s=2 * PATIENCE_S,
        )


def read_job(
    job: Mapping[str, Any], pods: Sequence[Mapping[str, Any]], count: int
) -> dict[int, JobState]:
    """Return the state of each index of a Job, from its status and its pods."""
    status = job.get("status", {})
    completed, failed = (
        set(_indices(status.get("completedIndexes"))),
        set(_indices(status.get("failedIndexes"))),
    )
    ended = [
        condition
        for condition in status.get("conditions") or ()
        if condition["type"] in ("Complete", "Failed") and condition["status"] == "True"
    ]
    # An index may have had several pods
    newest = {
        int(pod["metadata"].get("annotations", {}).get(_INDEX, -1)): pod
        for pod in sorted(pods, key=lambda pod: str(pod["metadata"].get("creationTimestamp")))
    }
    states = dict[int, JobState]()
    for index in range(count):
        pod = newest.get(index, {})
        states[index] = (
            JobState(Standing.ended)
            if index in completed
            else JobState(Standing.ended, _end(pod), failed=True)
            if index in failed
            else JobState(Standing.ended, str(ended[0].get("reason") or ""))
            if ended
            else JobState(Standing.running)
            if pod.get("status", {}).get("phase") == "Running"
            else JobState(
                Standing.waiting,
                _wait(pod) if pod else "suspended" if job["spec"].get("suspend") else "",
            )
        )
    return states


def _indices(text: str | None) -> Iterable[int]:
    """Parse a list such as `0-3,7`."""
    for part in filter(None, (text or "").split(",")):
        first, _, last = part.partition("-")
        yield from range(int(first), int(last or first) + 1)


def _states(pod: Mapping[str, Any], kind: str) -> list[Mapping[str, Any]]:
    """Return the states of one kind, such as "waiting", of a pod's containers."""
    return [
        container["state"][kind]
        for container in pod.get("status", {}).get("containerStatuses") or ()
        if kind in container.get("state", {})
    ]


def _end(pod: Mapping[str, Any]) -> str:
    """Return why a pod's index failed."""
    for state in _states(pod, "terminated"):
        # "Error" only means that the exit code is not 0; others, such as OOMKilled, name the cause
        reason = state.get("reason", "Error")
        return f"failed with exit code {state['exitCode']}" if reason == "Error" else str(reason)
    return str(pod.get("status", {}).get("reason") or "its index failed")


def _wait(pod: Mapping[str, Any]) -> str:
    """Return why a pod waits: it has no node yet, or its container cannot start."""
    waiting = [str(x.get("reason", "")) for x in _states(pod, "waiting")]
    unplaced = [
        f"{x.get('reason')}: {x.get('message', '')}"
        for x in pod.get("status", {}).get("conditions") or ()
        if x["type"] == "PodScheduled" and x["status"] == "False"
    ]
    return next(filter(None, [*unplaced, *waiting]), "")
