"""What a pod of a sweep on Kubernetes does: it trains its point, saves when it is asked to end, and records its state."""

import json
import os
import signal
import subprocess
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
