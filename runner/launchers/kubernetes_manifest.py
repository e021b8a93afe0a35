"""Writes the manifest of an Indexed Job (Kubernetes' batch/v1): one index per run.

https://kubernetes.io/docs/concepts/workloads/controllers/job/, which describes the fields; they are
there from Kubernetes 1.29 on.
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
_LONGEST = 63  # maximum length of a label, and of a pod's host name
_FAILED = (1, 2)
"""Exit codes of a run that would fail again."""


@dataclass(frozen=True)
class Volume:
    """The source of a folder in the pods: a folder in a PersistentVolumeClaim, or one of the node.

    Args:
        path: In the pods, and here.
        claim: The claim's name; "" for a folder of the node.
        folder: In the claim ("" for all of it), or on the node.
    """

    path: str
    claim: str
    folder: str

    @classmethod
    def of(cls, path: str, source: object) -> Volume:
        """Parse a config's `CLAIM`, `CLAIM/FOLDER` or `/FOLDER/OF/THE/NODE`.

        Anything else is a ConfigError.
        """
        where = f"volumes.{path}"
        if not path.startswith("/") or ".." in PurePosixPath(path).parts:
            raise ConfigError(
                Problem(
                    where,
                    "is also the path in the pod, so it must be absolute",
                    path,
                    "a path that starts with /, without ..",
                )
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
    """What all Jobs of a launcher share.

    The arguments are the launcher's; `user` is UID and GID, or None for the image's.
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
        """A Job of `count` runs with these CPUs and GPUs each.

        Its pods read the submission in `file`.
        """
        about = {
            "labels": {"app.kubernetes.io/name": "samewise", "samewise/sweep": label(sweep)},
            "annotations": {"samewise/sweep": sweep, "samewise/submission": str(file)},
        }
        spec = {
            "completionMode": "Indexed",
            "completions": count,
            "parallelism": min(count, self.jobs or count),
            "backoffLimitPerIndex": self.retries,
            "podReplacementPolicy": "Failed",  # never two pods for one run at a time
            "podFailurePolicy": {"rules": failure_rules()},
            "template": {
                "metadata": deepcopy(about),
                "spec": self._pod(file, cpus, gpus, variables, cwd),
            },
        }
        space = {"namespace": self.namespace} if self.namespace else {}
        return {
            "apiVersion": "batch/v1",
            "kind": "Job",
            "metadata": {"name": name, **space, **about},
            "spec": spec,
        }

    def _pod(
        self, file: Path, cpus: int, gpus: int, variables: Mapping[str, str], cwd: Path
    ) -> dict[str, Any]:
        memory = {"memory": self.memory} if self.memory else {}
        named = list(enumerate(self.volumes))
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
                "limits": {**memory, **({self.gpu_resource: str(gpus)} if gpus else {})},
            },
            "volumeMounts": [
                *(
                    {"name": f"volume-{number}", "mountPath": one.path, **_inside(one)}
                    for number, one in named
                ),
                {"name": "shm", "mountPath": "/dev/shm"},
            ],
        }
        return {
            "restartPolicy": "Never",  # a new pod, possibly on another node, instead of a restart
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
                *({"name": f"volume-{number}", **_source(one)} for number, one in named),
                {
                    "name": "shm",
                    "emptyDir": {"medium": "Memory"},
                },  # loader workers pass batches there; a container's default is 64 MB
            ],
        }

    def _home(self) -> dict[str, str]:
        """A home folder for a user that the image does not know."""
        return (
            {"HOME": "/tmp", "USER": f"user-{self.user[0]}"} if self.user and self.user[0] else {}
        )


def failure_rules() -> list[dict[str, Any]]:
    """The rules for a pod's end, of which the first match applies.

    An end that matches none (killed for memory) uses one of the index's retries.
    """
    return [
        {"action": "Ignore", "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}]},
        {
            "action": "Ignore",
            "onExitCodes": {"containerName": CONTAINER, "operator": "In", "values": [INTERRUPTED]},
        },
        {
            "action": "FailIndex",
            "onExitCodes": {"containerName": CONTAINER, "operator": "In", "values": list(_FAILED)},
        },
    ]


def label(text: str, *, most: int = _LONGEST) -> str:
    """The end of a text as an RFC 1123 label (lower-case letters, digits, `-`).

    The end is kept since it identifies a sweep.
    """
    return re.sub(r"[^a-z0-9]+", "-", text.lower())[-most:].strip("-") or "samewise"


def job_name(sweep: str, end: str, count: int) -> str:
    """A Job's name, short enough for `NAME-INDEX` to be a host name."""
    end = f"-{end}"
    return label(sweep, most=_LONGEST - len(end) - len(f"-{count - 1}")) + end


def _inside(volume: Volume) -> dict[str, str]:
    return {"subPath": volume.folder} if volume.claim and volume.folder else {}


def _source(volume: Volume) -> dict[str, Any]:
    if volume.claim:
        return {"persistentVolumeClaim": {"claimName": volume.claim}}
    return {"hostPath": {"path": volume.folder, "type": "Directory"}}
