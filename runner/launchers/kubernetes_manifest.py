"""Write the manifest of an Indexed Job (Kubernetes' batch/v1), with one index for each run.

The fields are described at https://kubernetes.io/docs/concepts/workloads/controllers/job/, and
exist from Kubernetes 1.29 on.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

from samewise.runner.errors import INTERRUPTED, ConfigError, Problem

CONTAINER = "run"
OURS = ("containers", "restartPolicy", "terminationGracePeriodSeconds", "volumes")
"""Fields of a pod that no config may set, as the run depends on them."""
_MAX_LABEL = 63
"""Maximum length of a label, and of a pod's host name."""
_FAILURE_CODES = (1, 2)
"""Exit codes of a run that would fail again."""


@dataclass(frozen=True)
class Volume:
    """Source of a folder in the pods.

    Args:
        path: The folder's path in the pods, and on this machine.
        claim: Name of the PersistentVolumeClaim; "" for a folder of the node.
        folder: Path in the claim ("" for all of it), or on the node.
    """

    path: str
    claim: str
    folder: str

    @classmethod
    def of(cls, path: str, source: object) -> Volume:
        """Parse a config's `CLAIM`, `CLAIM/FOLDER` or `/FOLDER/OF/THE/NODE`.

        Raises:
            ConfigError: The path or the source has another form.
        """
        where = f"volumes.{path}"
        ConfigError.raise_if(
            not path.startswith("/") or ".." in PurePosixPath(path).parts,
            where,
            "is also the path in the pod, so it must be absolute",
            path,
            "a path that starts with /, without ..",
        )
        if not isinstance(source, str) or not source or ".." in PurePosixPath(source).parts:
            raise ConfigError(
                Problem(
                    where,
                    "does not name a volume",
                    source,
                    "CLAIM, CLAIM/FOLDER or /FOLDER/OF/THE/NODE",
                )
            )
        if source.startswith("/"):
            return cls(path, "", source)
        claim, _, folder = source.partition("/")
        return cls(path, claim, folder.strip("/"))

    def holds(self, path: Path) -> bool:
        return path.is_relative_to(self.path)


@dataclass(frozen=True)
class Template:
    """Settings that all Jobs of a launcher share.

    The arguments are the launcher's; `user` is UID and GID, or None for the image's user.
    """

    image: str
    python: str
    namespace: str | None
    volumes: Sequence[Volume]
    memory: str | None
    gpu_resource: str
    env: Mapping[str, str]
    user: tuple[int, int] | None
    notice_s: int
    retries: int
    jobs: int | None
    pod: Mapping[str, Any]

    def job(
        self,
        file: Path,
        *,
        name: str,
        sweep: str,
        count: int,
        cpus: int,
        gpus: int,
        variables: Mapping[str, str],
        cwd: Path,
    ) -> dict[str, Any]:
        """Return the manifest of a Job.

        Args:
            file: The submission, which the pods read.
            name: The Job's name.
            sweep: The sweep's id.
            count: Number of runs.
            cpus: CPUs of each pod.
            gpus: GPUs of each pod.
            variables: Environment variables of the pods.
            cwd: Working folder of the pods.
        """
        metadata = {
            "labels": {"app.kubernetes.io/name": "samewise", "samewise/sweep": label(sweep)},
            "annotations": {"samewise/sweep": sweep, "samewise/submission": str(file)},
        }
        spec = {
            "completionMode": "Indexed",
            "completions": count,
            "parallelism": min(count, self.jobs or count),
            "backoffLimitPerIndex": self.retries,
            # Never two pods for one run at a time
            "podReplacementPolicy": "Failed",
            "podFailurePolicy": {"rules": failure_rules()},
            "template": {
                "metadata": deepcopy(metadata),
                "spec": self._pod(file, cpus, gpus, variables, cwd),
            },
        }
        namespace = {"namespace": self.namespace} if self.namespace else {}
        return {
            "apiVersion": "batch/v1",
            "kind": "Job",
            "metadata": {"name": name, **namespace, **metadata},
            "spec": spec,
        }

    def _pod(
        self, file: Path, cpus: int, gpus: int, variables: Mapping[str, str], cwd: Path
    ) -> dict[str, Any]:
        memory = {"memory": self.memory} if self.memory else {}
        volumes = list(enumerate(self.volumes))
        container = {
            "name": CONTAINER,
            "image": self.image,
            "command": [self.python, "-P", "-u", "-m", "samewise.runner.launchers.kubernetes_job"],
            "args": [str(file)],
            "workingDir": str(cwd),
            "env": [
                {"name": key, "value": value}
                for key, value in {**self._home(), **variables, **self.env}.items()
            ],
            "resources": {
                "requests": {"cpu": str(cpus), **memory},
                # Kubernetes takes a GPU's limit for its request
                "limits": {**memory, **({self.gpu_resource: str(gpus)} if gpus else {})},
            },
            "volumeMounts": [
                *(
                    {"name": f"volume-{number}", "mountPath": volume.path, **_inside(volume)}
                    for number, volume in volumes
                ),
                {"name": "shm", "mountPath": "/dev/shm"},
            ],
        }
        return {
            # A new pod, possibly on another node, instead of a restart
            "restartPolicy": "Never",
            "terminationGracePeriodSeconds": self.notice_s,
            "automountServiceAccountToken": False,
            "enableServiceLinks": False,
            **(
                {"securityContext": {"runAsUser": self.user[0], "runAsGroup": self.user[1]}}
                if self.user
                else {}
            ),
            **self.pod,
            "containers": [container],
            "volumes": [
                *({"name": f"volume-{number}", **_source(volume)} for number, volume in volumes),
                # Loader workers pass batches there; a container's default is 64 MB
                {"name": "shm", "emptyDir": {"medium": "Memory"}},
            ],
        }

    def _home(self) -> dict[str, str]:
        """Return variables for the home folder of a user that the image does not know."""
        return (
            {"HOME": "/tmp", "USER": f"user-{self.user[0]}"} if self.user and self.user[0] else {}
        )


def failure_rules() -> list[dict[str, Any]]:
    """Return the rules for a pod's end; the first match applies."""
    # An end that matches none, such as a kill for memory, uses one of the index's retries
    return [
        # A pod that is preempted or evicted uses none of the index's retries
        {"action": "Ignore", "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}]},
        {
            "action": "Ignore",
            "onExitCodes": {"containerName": CONTAINER, "operator": "In", "values": [INTERRUPTED]},
        },
        {
            "action": "FailIndex",
            "onExitCodes": {
                "containerName": CONTAINER,
                "operator": "In",
                "values": list(_FAILURE_CODES),
            },
        },
    ]


def label(text: str, *, longest: int = _MAX_LABEL) -> str:
    """Return the end of a text as an RFC 1123 label: lower-case letters, digits and `-`."""
    # A sweep is identified by the end of its id
    return re.sub(r"[^a-z0-9]+", "-", text.lower())[-longest:].strip("-") or "samewise"


def job_name(sweep: str, end: str, count: int) -> str:
    """Return a Job's name, short enough for `NAME-INDEX` to be a host name."""
    end = f"-{end}"
    return label(sweep, longest=_MAX_LABEL - len(end) - len(f"-{count - 1}")) + end


def _inside(volume: Volume) -> dict[str, str]:
    return {"subPath": volume.folder} if volume.claim and volume.folder else {}


def _source(volume: Volume) -> dict[str, Any]:
    if volume.claim:
        return {"persistentVolumeClaim": {"claimName": volume.claim}}
    return {"hostPath": {"path": volume.folder, "type": "Directory"}}
