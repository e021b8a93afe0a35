"""`samewise train ... strategy.nproc=2` starts its own ranks, passes signals on, restarts if one dies, and reports an error once."""

import json
import random
import signal
import time
from pathlib import Path

import pytest
from samewise_forked import Forked
from samewise_forked import start as start_code
from samewise_runner_launched import TINY, ranks_of, shares_imports, start, wait_for_step


def wait_for_end(process: Forked, code: int) -> str:
    """Its standard error."""
    assert process.wait(300) == code, process.errors
    assert "Traceback" not in process.errors
    return process.errors


@pytest.mark.slow
@pytest.mark.oldest
def test_a_dead_rank_is_restarted_once_and_then_reported(samewise, tmp_path):
    """The launcher may restart once, after a crash; a kill after that is reported, and the same command then finishes with the bits of an undisturbed run. Torch is imported by the launcher only."""
    process = start(tmp_path / "killed", "max_steps=12", "strategy.nproc=2", "strategy.max_restarts=1")
    wait_for_step(process, tmp_path / "killed", 3)
    first = ranks_of(process)
    assert list(map(shares_imports, first.values())) == [True, True]
    first[1].send_signal(signal.SIGSEGV)
    first[1].wait(60)
    deadline = time.monotonic() + 100
    while len(again := ranks_of(process)) < 2 or again[0].pid == first[0].pid:
        assert time.monotonic() < deadline
        time.sleep(0.05)
    assert all(map(shares_imports, again.values()))
    again[0].kill()
    said = wait_for_end(process, 1)
    assert "rank 0: was killed by SIGKILL" in said
    assert said.index("warning: rank 1 was killed by SIGSEGV") < said.index("(restart 1 of 1)") < said.index("rank 0: was killed")
    alone, finished = (samewise("train", *TINY, "max_steps=12", f"run_root={tmp_path / name}", "strategy=single", "--json") for name in ("alone", "killed"))
    assert json.loads(finished.stdout)["weights_sha256"] == json.loads(alone.stdout)["weights_sha256"]


@pytest.mark.slow  # for ranks started by a test: test_any_number_of_ranks.py
def test_a_signal_is_passed_on_and_the_run_is_saved(tmp_path):
    never = ("checkpoint.every_steps=null", "checkpoint.every_epochs=null", "checkpoint.keep_best=0")
    process = start(tmp_path, "strategy.nproc=2", "loader.num_workers=1", *never, "max_steps=4000")
    wait_for_step(process, tmp_path, 2)
    process.send(signal.SIGTERM)
    said = wait_for_end(process, 3)
    assert said.count(", and saved") == 1
    assert len(list(tmp_path.glob("*/*/checkpoints/step-*"))) == 1


@pytest.mark.slow  # without the launcher: test_any_number_of_ranks.py
def test_an_error_in_all_ranks_is_reported_once_and_not_tried_again(tmp_path):
    said = wait_for_end(start(tmp_path, "max_steps=12", "strategy.nproc=2", "optimizer.lr=1e30", "strategy.max_restarts=3"), 1)
    assert said.startswith("error:")
    assert said.count("is not finite") == 1
    assert len(list(tmp_path.glob("*/*/ranks/*/attempt_*"))) == 1


CODE = """
import os, sys, threading
from types import SimpleNamespace
from samewise.runner.records.sources import Code
from samewise.runner.training import agent

def can_fork(label):
    return agent.prepare_forks(SimpleNamespace(code=Code({label: {}}), whole={}))

sys.path.append(folder)
assert can_fork("plain.py")
assert not can_fork("ranked.py")
threading.Thread(target=threading.Event().wait, daemon=True).start()
assert not can_fork("plain.py")
agent.is_in_bad_fork = lambda: True
command = (sys.executable, "-c", "import os; os._exit(int(os.environ['RANK']))")
agent.become_rank(command, {**os.environ, "RANK": "7"}, frozenset("012"), on_cuda=True)
"""


def test_code_that_reads_its_rank_threads_and_a_used_device_need_new_processes(tmp_path):
    (tmp_path / "plain.py").write_text("LOW_RANK = 4\n")
    (tmp_path / "ranked.py").write_text("import os\nMAIN = os.environ.get('RANK', '0') == '0'\n")
    process = start_code(CODE, {"folder": str(tmp_path)})
    process.join(60)
    assert process.exitcode == 7


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.timeout(1800)
def test_a_run_that_loses_ten_random_ranks_restarts_itself_and_keeps_its_bits(tmp_path):
    overrides = ["max_steps=60", "tracking=mlflow", "checkpoint.every_steps=1"]
    wait_for_end(start(tmp_path / "alone", *overrides, "strategy=single"), 0)
    chance, root = random.Random(4), tmp_path / "killed"
    process = start(root, *overrides, "strategy.nproc=4", "strategy.max_restarts=12")
    for kill in range(10):
        wait_for_step(process, root, 5 * (kill + 1))
        time.sleep(chance.random() * 0.2)
        while not (alive := ranks_of(process)):
            time.sleep(0.05)
        chance.choice(list(alive.values())).kill()
    wait_for_end(process, 0)
    (folder,), (alone,) = ((path.parent for path in (tmp_path / name).glob("*/*/summary.json")) for name in ("killed", "alone"))
    assert json.loads((folder / "summary.json").read_text())["weights_sha256"] == json.loads((alone / "summary.json").read_text())["weights_sha256"]
    assert (folder / "trace.jsonl").read_bytes() == (alone / "trace.jsonl").read_bytes()
    assert_each_point_once(root, 60)


def assert_each_point_once(run_root: Path, steps: int) -> None:
    from mlflow.tracking import MlflowClient

    client = MlflowClient(f"sqlite:///{run_root}/mlflow.db")
    (tracked,) = client.search_runs([one.experiment_id for one in client.search_experiments()])
    assert tracked.info.status == "FINISHED"
    assert sorted(point.step for point in client.get_metric_history(tracked.info.run_id, "train/loss")) == list(range(1, steps + 1))
