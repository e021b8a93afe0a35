"""The manifest of an Indexed Job, in the words of Kubernetes' batch/v1: one index a run.

https://kubernetes.io/docs/concepts/workloads/controllers/job/, which describes the fields; they are there from Kubernetes 1.29 on.
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
_LONGEST = 63  # characters of a label, and of a pod's host name
_FAILED = (1, 2)
"""Exit codes of a run that would fail again."""


@dataclass(frozen=True)
class Volume:
    """Where a folder of the pods comes from: a folder in a PersistentVolumeClaim, or one of the node.

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
        """Of a config's words: `CLAIM`, `CLAIM/FOLDER` or `/FOLDER/OF/THE/NODE`. A ConfigError for any other."""
        where = f"volumes.{path}"
        if not path.startswith("/") or ".." in PurePosixPath(path).parts:
            raise ConfigError(Problem(where, "is also the path in the pod, so it must be absolute", path, "a path that starts with /, without .."))
        if not isinstance(source, str) or not source or ".." in PurePosixPath(source).parts:
            raise ConfigError(Problem(where, "does not name a volume", source, "CLAIM, CLAIM/FOLDER or /FOLDER/OF/THE/NODE"))
        if source.startswith("/"):
            return cls(path, "", source)
        claim, _, folder = source.partition("/")
        if not is_name(claim, dots=True):
            hint = f"kubectl get persistentvolumeclaims; perhaps {label(claim)}"
            raise ConfigError(Problem(where, "is not a valid name for a claim", claim, "lower-case letters, digits, - and ., as in RFC 1123", hint))
        return cls(path, claim, folder.strip("/"))

    def holds(self, path: Path) -> bool:
        return path.is_relative_to(self.path)


@dataclass(frozen=True)
class Template:
    """What all Jobs of a launcher have alike. The arguments are the launcher's; `user` is UID and GID, or None for the image's."""

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

    def job(self, file: Path, *, name: str, sweep: str, count: int, cpus: int, gpus: int, variables: Mapping[str, str], cwd: Path) -> dict[str, Any]:
        """A Job of `count` runs, each with so many CPUs and GPUs; its pods read the submission in `file`."""
        about = {
            "labels": {"app.kubernetes.io/name": "samewise", "samewise/sweep": label(sweep)},
            "annotations": {"samewise/sweep": sweep, "samewise/submission": str(file)},
        }
        spec = {
            "completionMode": "Indexed",
            "completions": count,
            "parallelism": min(count, self.jobs or count),
            "backoffLimitPerIndex": self.retries,
            "podReplacementPolicy": "Failed",  # never two pods of one run at a time
            "podFailurePolicy": {"rules": failure_rules()},
            "template": {"metadata": deepcopy(about), "spec": self._pod(file, cpus, gpus, variables, cwd)},
        }
        space = {"namespace": self.namespace} if self.namespace else {}
        return {"apiVersion": "batch/v1", "kind": "Job", "metadata": {"name": name, **space, **about}, "spec": spec}

    def _pod(self, file: Path, cpus: int, gpus: int, variables: Mapping[str, str], cwd: Path) -> dict[str, Any]:
        memory = {"memory": self.memory} if self.memory else {}
        named = list(enumerate(self.volumes))
        container = {
            "name": CONTAINER,
            "image": self.image,
            "command": [self.python, "-P", "-u", "-m", "samewise.runner.launchers.kubernetes_job"],
            "args": [str(file)],
            "workingDir": str(cwd),
            "env": [{"name": key, "value": value} for key, value in {**self._home(), **variables, **self.env}.items()],
            "resources": {"requests": {"cpu": str(cpus), **memory}, "limits": {**memory, **({self.gpu_resource: str(gpus)} if gpus else {})}},
            "volumeMounts": [
                *({"name": f"volume-{number}", "mountPath": one.path, **_inside(one)} for number, one in named),
                {"name": "shm", "mountPath": "/dev/shm"},
            ],
        }
        return {
            "restartPolicy": "Never",  # a new pod instead, which may be on another node
            "terminationGracePeriodSeconds": self.notice_s,
            "automountServiceAccountToken": False,
            "enableServiceLinks": False,
            **({"securityContext": {"runAsUser": self.user[0], "runAsGroup": self.user[1]}} if self.user else {}),
            **self.pod,
            "containers": [container],
            "volumes": [
                *({"name": f"volume-{number}", **_source(one)} for number, one in named),
                {"name": "shm", "emptyDir": {"medium": "Memory"}},  # loader workers hand over batches there; a container's own is 64 MB
            ],
        }

    def _home(self) -> dict[str, str]:
        """For a user that the image does not know."""
        return {"HOME": "/tmp", "USER": f"user-{self.user[0]}"} if self.user and self.user[0] else {}


def failure_rules() -> list[dict[str, Any]]:
    """What follows the end of a pod, the first rule that fits. One that none fits (killed for memory) counts as one of the index's retries."""
    return [
        {"action": "Ignore", "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}]},
        {"action": "Ignore", "onExitCodes": {"containerName": CONTAINER, "operator": "In", "values": [INTERRUPTED]}},
        {"action": "FailIndex", "onExitCodes": {"containerName": CONTAINER, "operator": "In", "values": list(_FAILED)}},
    ]


def label(text: str, *, most: int = _LONGEST) -> str:
    """The end of a text as a label of RFC 1123: small letters, digits and `-`. The end, as that of a sweep's id tells it from others."""
    return re.sub(r"[^a-z0-9]+", "-", text.lower())[-most:].strip("-") or "samewise"


def job_name(sweep: str, end: str, count: int) -> str:
    """A Job's name, short enough for `NAME-INDEX` to be a host name."""
    end = f"-{end}"
    return label(sweep, most=_LONGEST - len(end) - len(f"-{count - 1}")) + end


def is_name(text: str, *, dots: bool = False) -> bool:
    """Whether Kubernetes takes it for the name of an object: a label of RFC 1123; with dots, several."""
    parts = text.split(".") if dots else [text]
    return len(text) <= (253 if dots else _LONGEST) and all(re.fullmatch(r"[a-z0-9]([-a-z0-9]*[a-z0-9])?", part) for part in parts)


def is_quantity(text: str) -> bool:
    """Whether Kubernetes takes it for an amount of memory: `16Gi`, `512M`, a number of bytes."""
    return re.fullmatch(r"\d+(\.\d+)?([KMGTPE]i|[kMGTPE])?", text) is not None


def _inside(volume: Volume) -> dict[str, str]:
    return {"subPath": volume.folder} if volume.claim and volume.folder else {}


def _source(volume: Volume) -> dict[str, Any]:
    if volume.claim:
        return {"persistentVolumeClaim": {"claimName": volume.claim}}
    return {"hostPath": {"path": volume.folder, "type": "Directory"}}
