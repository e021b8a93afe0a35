"""`launcher=slurm` on a real SLURM of two nodes: detached, preempted, requeued, cancelled, failing; the same bits as alone."""

import json
from pathlib import Path

import pytest

pytestmark = [pytest.mark.slow]

TINY = ["experiment=resnet18_digits", "debug=tiny", "model.width=8", "tracking=none", "evaluate.pictures=false", "callbacks=hold", "evaluate.every_epochs=null"]


@pytest.fixture(scope="module")
def project(make_lab, tmp_path_factory):
    return make_lab(tmp_path_factory.mktemp("lab"))


@pytest.fixture
def lab(project, monkeypatch):
    """The project, as the current folder, with nothing held."""
    monkeypatch.chdir(project.folder)
    for file in project.holds.iterdir():
        file.unlink()
    return project


def points(samewise, *arguments: object) -> list[dict]:
    """What `--status` reports for each point."""
    return json.loads(samewise("sweep", *arguments, "--status", "--json").stdout)["points"]


def states(samewise, *arguments: object) -> list[str]:
    return [point["state"] for point in points(samewise, *arguments)]


def alone(samewise, tmp_path, seed: int, *overrides: str) -> str:
    """The digest of the weights of an undisturbed run, trained in this process."""
    unheld = f"callbacks.hold.folder={tmp_path / 'none'}"
    done = samewise("train", *TINY, f"run_root={tmp_path / 'alone'}", f"seed={seed}", unheld, *overrides, "--json")
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)["weights_sha256"]


def test_preempted_requeued_and_timed_out_jobs_give_the_bits_of_runs_alone(samewise, cluster, lab, tmp_path):
    sweep = [*TINY, f"run_root={tmp_path}", "seed=range(5)", "launcher=slurm", "launcher.poll_s=0.5"]
    lab.hold(0, 1, 2, 4)
    assert "5 jobs submitted" in samewise("sweep", *sweep).stderr
    assert "5 points, 0 to run" in samewise("sweep", *sweep).stderr  # queued or running: not submitted twice
    assert len(cluster.jobs()) == 5

    cluster.wait_for("two held runs", lambda: lab.held(0, 1))
    assert states(samewise, *sweep) == ["running"] * 2 + ["waiting"] * 3
    cluster.call("sbatch", "--partition=high", "--nodes=2", "--ntasks=2", "--output=/dev/null", "--wrap=sleep 1")
    cluster.wait_for("a third held run", lambda: lab.held(2))
    array = cluster.jobs("RUNNING")[0].partition("_")[0]
    cluster.call("scontrol", "requeue", f"{array}_2")
    cluster.wait_for("the last run, held", lambda: lab.held(4))
    cluster.call("scancel", "--signal=USR1", f"{array}_4.0")  # as SLURM does launcher.notice_s before the time limit
    done = samewise("sweep", *sweep, "--wait", "--json")
    assert done.returncode == 0

    found = json.loads(done.stdout)["points"]
    assert [point["state"] for point in found] == ["finished"] * 5
    assert [point["tries"] for point in found] == [2, 2, 2, 1, 2]
    log = "".join(file.read_text() for file in tmp_path.glob("sweeps/*/logs/*.log"))
    assert log.count("and saved") == 4
    for seed in (0, 2, 4):
        assert found[seed]["weights_sha256"] == alone(samewise, tmp_path, seed)


def test_a_run_on_two_nodes_over_gloo_has_the_bits_of_one_process(samewise, cluster, lab, tmp_path):
    sweep = [*TINY, f"run_root={tmp_path}", "replicas=2", "seed=0,1", "strategy=elastic", "launcher=slurm", "launcher.nodes=2", "launcher.poll_s=0.5"]
    lab.hold(0)
    samewise("sweep", *sweep)
    cluster.wait_for("a held run", lambda: lab.held(0))
    first = cluster.jobs("RUNNING")[0]
    assert cluster.call("squeue", "-h", "-j", first, "-o", "%D") == "2"
    cluster.call("scontrol", "requeue", first)
    done = samewise("sweep", *sweep, "--wait", "--json")
    assert done.returncode == 0
    for seed, point in enumerate(json.loads(done.stdout)["points"]):
        assert point["weights_sha256"] == alone(samewise, tmp_path, seed, "replicas=2")
        surroundings = json.loads((Path(point["folder"]) / "environment.json").read_text())
        assert surroundings["fingerprint"] == point["fingerprint"]
    assert [point["tries"] for point in points(samewise, *sweep)] == [2, 1]


def test_cancelled_jobs_save_say_so_and_resume_when_submitted_again(samewise, cluster, lab, tmp_path):
    sweep = [*TINY, f"run_root={tmp_path}", "seed=range(4)", "launcher=slurm", "launcher.poll_s=0.5"]
    lab.hold(0, 1, 2)
    samewise("sweep", *sweep)
    cluster.wait_for("two held runs", lambda: lab.held(0, 1))
    array = cluster.jobs("RUNNING")[0].partition("_")[0]
    cluster.call("scancel", f"{array}_1", f"{array}_3")
    cluster.wait_for("a third held run", lambda: lab.held(2))
    found = points(samewise, *sweep)
    assert [point["state"] for point in found] == ["running", "interrupted", "running", "interrupted"]
    assert found[1]["reason"] == "CANCELLED; step 5: stopped by SIGTERM, and saved"
    assert found[3]["reason"] == "CANCELLED while waiting"

    samewise("sweep", *sweep, "--cancel")
    cluster.wait_for("an empty queue", lambda: not cluster.jobs("RUNNING", "COMPLETING", "PENDING"))
    assert [point["reason"] for point in points(samewise, *sweep)][::2] == ["CANCELLED; step 5: stopped by SIGUSR1, and saved"] * 2
    done = samewise("sweep", *sweep, "--wait", "--json")
    assert [point["steps"] for point in json.loads(done.stdout)["points"]] == [20] * 4


def test_a_run_whose_node_fails_ends_on_another_with_the_submitted_code(samewise, cluster, lab, tmp_path):
    sweep = [*TINY, f"run_root={tmp_path}", "seed=5", "launcher=slurm", "launcher.poll_s=0.5"]
    lab.hold(5)
    cluster.call("scontrol", "update", "PartitionName=main", "State=DOWN")
    samewise("sweep", *sweep)
    before = lab.code.read_text()
    lab.code.write_text("raise RuntimeError('edited after submission')")
    cluster.call("scontrol", "update", "PartitionName=main", "State=UP")
    cluster.wait_for("a held run", lambda: lab.held(5))
    (job,) = cluster.jobs("RUNNING")
    node = cluster.call("squeue", "-h", "-j", job, "-o", "%N")
    cluster.call("scontrol", "update", f"NodeName={node}", "State=DOWN", "Reason=test")
    try:
        (made,) = (tmp_path / "sweeps").iterdir()
        cluster.wait_for("its end", lambda: states(samewise, made) == ["finished"])
        (point,) = points(samewise, made)
        assert point["tries"] == 2
        assert {cluster.call("squeue", "-h", "-r", "--states=all", "-j", job, "-o", "%N")} == {"n1", "n2"} - {node}
    finally:
        cluster.call("scontrol", "update", f"NodeName={node}", "State=RESUME")
        lab.code.write_text(before)
    assert point["weights_sha256"] == alone(samewise, tmp_path, 5)
