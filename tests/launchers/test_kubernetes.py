"""`launcher=kubernetes` without a cluster: its manifest, checked against the published schema, and the refusals and status that need no cluster.

`job-batch-v1.json` is Kubernetes' own schema, strict; its first lines say where it is from.
"""

import json
import re
import shutil
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml
from samewise_launchers_kubernetes_sweeps import command, follows, manifest, points

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
    "machines": (["launcher.nodes=2"], ["launcher.nodes: a run is one pod", "strategy.nproc=N"]),
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
