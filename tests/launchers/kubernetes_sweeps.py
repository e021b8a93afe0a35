"""A small sweep for Kubernetes, and the contents of its manifest. Tests import this as `samewise_launchers_kubernetes_sweeps`."""

import json
import sys
from pathlib import Path
from typing import Any

import yaml

TINY = ["experiment=resnet18_digits", "debug=tiny", "model.width=4", "tracking=none", "evaluate.pictures=false", "callbacks=hold", "evaluate.every_epochs=null"]


PODS = ["launcher=kubernetes", "launcher.image=registry.example/torch:1", "launcher.user=1000:1000", "launcher.apply=false"]


def command(folder: Path, *overrides: str, volumes: str = "{{{folder}: work/me}}") -> list[str]:
    return [*TINY, *PODS, f"+launcher.volumes={volumes.format(folder=folder)}", f"launcher.python={sys.executable}", *overrides]


def manifest(folder: Path, number: int = 1) -> dict[str, Any]:
    (file,) = folder.glob(f"runs/sweeps/*/kubernetes/{number:04d}.yaml")
    return yaml.safe_load(file.read_text())


def follows(job: dict[str, Any], code: int) -> str:
    """What Kubernetes does after an exit code: the action of the first matching rule, or Count, which uses one of the index's retries."""
    for rule in job["spec"]["podFailurePolicy"]["rules"]:
        codes = rule.get("onExitCodes", {})
        assert codes.get("operator", "In") == "In"
        if code in codes.get("values", ()):
            return rule["action"]
    return "Count"


def points(samewise: Any, *sweep: str) -> list[dict[str, Any]]:
    done = samewise("sweep", *sweep, "--status", "--json")
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)["points"]
