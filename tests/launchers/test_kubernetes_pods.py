"""What a pod of a sweep on Kubernetes does: it trains its point, saves when it is asked to end, and records its state."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from samewise_launchers_kubernetes_sweeps import TINY, command, follows, manifest, points


@pytest.fixture
def lab(make_lab, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A project with a callback that holds runs, as the current folder; returns the folder with the files that hold them."""
    monkeypatch.chdir(tmp_path)
    return make_lab(tmp_path).holds


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


@pytest.mark.slow
def test_a_pod_stopped_before_its_run_starts_is_started_again(samewise, lab) -> None:
    samewise("sweep", *command(lab.parent, "seed=0,1"))
    pod = start(manifest(lab.parent), 0)
    assert pod.stdout is not None
    assert "its output goes to" in pod.stdout.readline()
    pod.send_signal(signal.SIGTERM)
    assert end(pod) == 3


@pytest.mark.slow
def test_a_failed_run_fails_its_index_and_cancelled_runs_save_and_stay_stopped(samewise, lab) -> None:
    (lab / "1").touch()
    samewise("sweep", *command(lab.parent, "optimizer.lr=1e30,0.05", "seed=0,1"))
    job = manifest(lab.parent)
    sweep = job["metadata"]["annotations"]["samewise/sweep"]
    code = end(start(job, 0))
    assert follows(job, code) == "FailIndex"
    held = start(job, 3)
    wait_for(lab / "1.held")
    samewise("sweep", sweep, "--cancel")
    assert end(held) == 0
    assert end(start(job, 2)) == 0  # Kubernetes starts it nevertheless
    failed, _, waited, stopped = points(samewise, sweep)
    assert failed["state"] == "failed"
    assert "not finite" in failed["reason"]
    assert (waited["state"], waited["tries"], waited["reason"]) == ("interrupted", 0, "cancelled")
    assert (stopped["state"], stopped["reason"]) == ("interrupted", "cancelled; step 5: stopped by SIGTERM, and saved")
    assert "4 points, 3 to run" in samewise("sweep", sweep).stderr
    assert manifest(lab.parent, 2)["spec"]["completions"] == 3


def test_a_pod_without_the_sweeps_volume_reports_it(tmp_path: Path) -> None:
    missing = tmp_path / "kubernetes" / "0001.json"
    done = subprocess.run(
        [sys.executable, "-m", "samewise.runner.launchers.kubernetes_job", str(missing)],
        env={**os.environ, "JOB_COMPLETION_INDEX": "0"},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 2
    assert "the sweep's volume must be mounted" in done.stderr
