"""`launcher=kubernetes` without a cluster: its manifest, checked against the published schema, and the refusals and status that need no cluster.

`job-batch-v1.json` is Kubernetes' own schema, strict; its first lines say where it is from.
"""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml

from samewise.runner.launchers import kubernetes_manifest, kubernetes_status

SCHEMA = json.loads(Path(__file__).with_name("job-batch-v1.json").read_text())


@pytest.fixture
def lab(make_lab, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A project with a callback that holds runs, as the current folder; returns the folder with the files that hold them."""
    monkeypatch.chdir(tmp_path)
    return make_lab(tmp_path).holds


@pytest.mark.slow
def test_the_manifest_follows_the_published_schema_and_the_settings(samewise, lab) -> None:
    more = ["launcher.memory=16Gi", "launcher.gpus=2", "launcher.cpus=3", "launcher.jobs=2", "+launcher.env.NCCL_DEBUG=1", "launcher.namespace=lab"]
    more += ["+launcher.pod.nodeSelector={pool: gpu}", "seed=range(3)"]
    done = samewise("sweep", *command(lab.parent, *more, volumes="{{{folder}: work/me, /data: /srv/data}}"))
    assert done.returncode == 0, done.stderr
    assert "kubectl apply -f " in done.stderr
    (file,) = lab.parent.glob("runs/sweeps/*/kubernetes/0001.yaml")
    job = yaml.safe_load(file.read_text())
    jsonschema.Draft202012Validator(SCHEMA).validate(job)

    sweep = file.parents[1].name
    assert job["metadata"]["annotations"]["samewise/sweep"] == sweep
    assert job["metadata"]["namespace"] == "lab"
    assert re.fullmatch(r"[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?", job["metadata"]["name"])
    spec = job["spec"]
    assert (spec["completionMode"], spec["completions"], spec["parallelism"], spec["backoffLimitPerIndex"]) == ("Indexed", 3, 2, 3)
    assert [follows(job, code) for code in (1, 2, 3, 137)] == ["FailIndex", "FailIndex", "Ignore", "Count"]
    assert spec["podFailurePolicy"]["rules"][0] == {"action": "Ignore", "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}]}
    pod = spec["template"]["spec"]
    assert (pod["restartPolicy"], pod["terminationGracePeriodSeconds"], pod["nodeSelector"]) == ("Never", 120, {"pool": "gpu"})
    assert pod["securityContext"] == {"runAsUser": 1000, "runAsGroup": 1000}
    (container,) = pod["containers"]
    assert container["resources"] == {"requests": {"cpu": "3", "memory": "16Gi"}, "limits": {"memory": "16Gi", "nvidia.com/gpu": "2"}}
    assert {"name": "NCCL_DEBUG", "value": "1"} in container["env"]
    mounts = {one["mountPath"]: (one.get("subPath"), one["name"]) for one in container["volumeMounts"]}
    volumes = {one["name"]: one for one in pod["volumes"]}
    folder, name = mounts[str(lab.parent)]
    assert (folder, volumes[name]["persistentVolumeClaim"]) == ("me", {"claimName": "work"})
    assert volumes[mounts["/data"][1]]["hostPath"] == {"path": "/srv/data", "type": "Directory"}
    assert volumes[mounts["/dev/shm"][1]]["emptyDir"] == {"medium": "Memory"}

    assert [point["state"] for point in points(samewise, sweep)] == ["waiting"] * 3
    assert "3 points, 0 to run" in samewise("sweep", sweep).stderr  # Kubernetes has them already: not submitted twice
    assert "kubectl delete -f " in samewise("sweep", sweep, "--cancel").stderr
    assert [point["reason"] for point in points(samewise, sweep)] == ["cancelled"] * 3
    assert "3 points, 3 to run" in samewise("sweep", sweep).stderr
    jsonschema.Draft202012Validator(SCHEMA).validate(manifest(lab.parent, 2))


@pytest.fixture(scope="module")
def job() -> dict[str, Any]:
    """A manifest, made without a sweep."""
    template = kubernetes_manifest.Template(
        image="registry.example/torch:1",
        python="python",
        namespace=None,
        volumes=[kubernetes_manifest.Volume.of("/lab", "work"), kubernetes_manifest.Volume.of("/data", "/srv/data")],
        memory="1Gi",
        gpu_resource="nvidia.com/gpu",
        env={},
        user=(1000, 1000),
        notice_s=30,
        retries=0,
        jobs=None,
        pod={},
    )
    file = Path("/lab/runs/sweeps/a-1/kubernetes/0001.json")
    return template.job(file, name="a", sweep="a-1", count=2, cpus=1, gpus=1, variables={"A": "b"}, cwd=Path("/lab"))


REFUSED = {
    "image is missing": (["launcher.image=null"], ["launcher.image: is missing"]),
    "no volume": (["launcher.volumes=null"], ["launcher.volumes: is missing", ": CLAIM}"]),
    "elsewhere": ("{{/elsewhere: work}}", ["launcher.volumes: do not contain the sweep's folder"]),
    "relative": ("{{more: work}}", ["launcher.volumes.more: ", "so it must be absolute"]),
    "no source": ("{{{folder}: null}}", ["does not name a volume"]),
    "user": (["launcher.user=me"], ["launcher.user: is not a valid user"]),
    "pod": (["+launcher.pod.volumes=[]"], ["launcher.pod.volumes: is set by the launcher itself"]),
    "jobs": (["launcher.jobs=0"], ["launcher.jobs: is too small"]),
}


@pytest.mark.parametrize("what", REFUSED)
def test_impossible_settings_are_refused_before_anything_is_written(samewise, lab, what: str) -> None:
    given, said = REFUSED[what]
    sweep = command(lab.parent, volumes=given) if isinstance(given, str) else command(lab.parent, *given)
    done = samewise("sweep", *sweep, "seed=0,1")
    assert done.returncode == 2
    assert all(words in done.stderr for words in said), done.stderr
    assert not (lab.parent / "runs").exists()


@pytest.mark.skipif(shutil.which("kubectl") is None, reason="kubectl is not installed here")
def test_if_kubectl_reaches_no_cluster_the_sweep_is_refused(samewise, lab, monkeypatch) -> None:
    monkeypatch.setenv("KUBECONFIG", str(lab / "none"))
    done = samewise("sweep", *command(lab.parent, "launcher.apply=true", "seed=0,1"))
    assert done.returncode == 2
    assert "kubectl cannot apply the Job" in done.stderr
    assert "launcher.apply=false" in done.stderr
    (left,) = lab.parent.glob("runs/sweeps/*/kubernetes/0001.*")
    assert str(left) in done.stderr, "the manifest, to be looked at"


def test_the_status_of_a_job_is_read_for_each_index(job: dict[str, Any]) -> None:
    label = "batch.kubernetes.io/job-completion-index"

    def pod(index: int, made: int, **status: Any) -> dict[str, Any]:
        found = {"metadata": {"annotations": {label: str(index)}, "creationTimestamp": f"2026-01-01T00:00:0{made}Z"}, "status": status}
        jsonschema.Draft202012Validator({**SCHEMA, "$ref": "#/$defs/Pod"}).validate(found)
        return found

    def container(**state: Any) -> list[dict[str, Any]]:
        return [{"name": "run", "image": "i", "imageID": "", "ready": False, "restartCount": 0, "state": state}]

    unplaced = {"type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": "0/3 nodes are available"}
    pods = [
        pod(4, 1, phase="Failed", containerStatuses=container(terminated={"exitCode": 3, "reason": "Error"})),
        pod(4, 2, phase="Running"),
        pod(3, 1, phase="Failed", containerStatuses=container(terminated={"exitCode": 137, "reason": "OOMKilled"})),
        pod(5, 1, phase="Pending", conditions=[unplaced]),
        pod(6, 1, phase="Pending", containerStatuses=container(waiting={"reason": "ImagePullBackOff"})),
    ]
    status = {"completedIndexes": "0-1", "failedIndexes": "2,3", "active": 3}
    whole = {**job, "status": status}
    jsonschema.Draft202012Validator(SCHEMA).validate(whole)
    seen = kubernetes_status.read_job(whole, pods, 8)
    assert [seen[index].standing.value for index in range(8)] == ["ended"] * 4 + ["running"] + ["waiting"] * 3
    assert [seen[index].failed for index in range(4)] == [False, False, True, True]
    assert [seen[index].reason for index in (3, 5, 6, 7)] == ["OOMKilled", "Unschedulable: 0/3 nodes are available", "ImagePullBackOff", ""]


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


def start(job: dict[str, Any], index: int) -> subprocess.Popen[str]:
    """Start the container of a pod as the manifest describes it: its command, arguments and folder, and only its variables."""
    pod = job["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    given = {one["name"]: one["value"] for one in container["env"]}
    return subprocess.Popen(
        [*container["command"], *container["args"]],
        cwd=container["workingDir"],
        env={"PATH": os.environ["PATH"], **given, "JOB_COMPLETION_INDEX": str(index)},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def end(pod: subprocess.Popen[str]) -> int:
    said, _ = pod.communicate(timeout=240)
    print(said)
    return pod.returncode


def wait_for(file: Path) -> None:
    until = time.monotonic() + 240
    while not file.exists():
        assert time.monotonic() < until, f"no {file.name}"
        time.sleep(0.05)


def alone(samewise: Any, folder: Path, seed: int) -> str:
    """The digest of the weights of an undisturbed run, trained in this process."""
    done = samewise("train", *TINY, f"run_root={folder / 'alone'}", f"seed={seed}", f"callbacks.hold.folder={folder / 'none'}", "--json")
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)["weights_sha256"]


@pytest.mark.slow
def test_a_stopped_pod_saves_and_the_next_resumes_to_the_bits_of_a_run_alone(samewise, lab) -> None:
    (lab / "1").touch()
    done = samewise("sweep", *command(lab.parent, "seed=0,1"))
    assert done.returncode == 0, done.stderr
    job = manifest(lab.parent)
    sweep = job["metadata"]["annotations"]["samewise/sweep"]
    code = lab.parent / "lab" / "hold.py"
    before = code.read_text()
    code.write_text("raise RuntimeError('edited after submission')")
    try:
        assert end(start(job, 0)) == 0
        pod = start(job, 1)
        wait_for(lab / "1.held")
        assert [point["state"] for point in points(samewise, sweep)] == ["finished", "running"]
        pod.send_signal(signal.SIGTERM)
        ended = end(pod)
        assert (ended, follows(job, ended)) == (3, "Ignore")
        stopped = points(samewise, sweep)[1]
        assert (stopped["state"], stopped["reason"], stopped["steps"]) == ("waiting", "saved; it will be started again", 5)
        (lab / "1").unlink()
        assert end(start(job, 1)) == 0
    finally:
        code.write_text(before)
    found = points(samewise, sweep)
    assert [(point["state"], point["tries"]) for point in found] == [("finished", 1), ("finished", 2)]
    for seed in (0, 1):
        assert found[seed]["weights_sha256"] == alone(samewise, lab.parent, seed)
    assert "2 points, 0 to run" in samewise("sweep", sweep).stderr
