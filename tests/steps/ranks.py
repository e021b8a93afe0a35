"""Runs a case as samewise runs it: through `build` and `fit`, in this process or in forks that meet as ranks do."""

import dataclasses
import multiprocessing.context
import socket
import tempfile
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
STARTED: list[multiprocessing.context.ForkServerProcess] = []


def end_all() -> None:
    """Leave nothing running."""
    while STARTED:
        STARTED.pop().kill()


def trained(case: Any, planted: tuple[str, str] | None = None) -> tuple[dict[str, Any], Any]:
    """(the initial weights, the results of the case's training).

    Args:
        case: What is trained.
        planted: A module of samewise and the source that replaces its own; the case then runs in a separate process.
    """
    with tempfile.TemporaryDirectory() as folder:
        if case.processes == 1 and planted is None:
            return run(case, Path(folder))
        return _in_processes(case, Path(folder), planted)


def run(case: Any, folder: Path) -> tuple[dict[str, Any], Any]:
    """Train this process's share of the case."""
    from samewise_steps.reference import Trained

    from samewise.runner.training.build import build
    from samewise.runner.training.loop import fit

    composed = case.composed(folder, HERE)
    run = build(composed, composed.project, composed.folder)
    initial = _copy(run.strategy.layout.whole(run.model.state_dict()))
    done = Trained({})
    record = run.recorder.record

    def recorded(outcome: Any) -> None:
        done.losses.append(sum(value for name, value in outcome.losses.items() if name == "loss" or name.endswith("/loss")))
        done.norms.append(outcome.gradient_norm)
        record(outcome)
        done.weights = _copy(run.strategy.layout.whole(run.model.state_dict()))
        done.average = _copy(run.strategy.layout.whole(run.callbacks["ema"].models()["ema"].state_dict())) if case.average else {}

    run.recorder.record = recorded
    fit(run)
    return initial, done


def _copy(state: dict[str, Any]) -> dict[str, Any]:
    return {name: value.detach().to("cpu", copy=True) for name, value in state.items()}


def _in_processes(case: Any, folder: Path, planted: tuple[str, str] | None) -> tuple[dict[str, Any], Any]:
    import torch
    from samewise_forked import start  # here, as a rank imports this file too, and does not find that one

    with socket.socket() as probe:
        probe.bind(("localhost", 0))
        address = {"MASTER_ADDR": "localhost", "MASTER_PORT": str(probe.getsockname()[1]), "TORCH_CPP_LOG_LEVEL": "ERROR", "WORLD_SIZE": str(case.processes)}
    values = {one.name: getattr(case, one.name) for one in dataclasses.fields(case)}
    for rank in range(case.processes):
        given = {"variables": {**address, "RANK": str(rank), "LOCAL_RANK": str(rank)}, "here": str(HERE), "case": values, "folder": folder}
        STARTED.append(start(RANK, {**given, "planted": planted}))
    ranks = STARTED[-case.processes :]
    for rank in ranks:
        rank.join(120)
    said = "\n".join(path.read_text() for path in sorted(folder.glob("failed-*")))
    assert [rank.exitcode for rank in ranks] == [0] * case.processes, said
    results = [torch.load(folder / f"rank-{rank}.pt", weights_only=False) for rank in range(case.processes)]
    for _, done in results[1:]:
        alike = {} if case.strategy == "fsdp" else done.weights  # there only rank 0 assembles the weights
        for name, value in alike.items():
            own = case.strategy == "ddp" and ("running" in name or "tracked" in name)
            assert own or torch.equal(value, results[0][1].weights[name]), f"the ranks' {name} differ"
    return results[0]


RANK = """
import os, sys, traceback
from importlib.machinery import ModuleSpec
from importlib.util import module_from_spec
os.environ.update(variables)
spec = ModuleSpec("samewise_steps", None, is_package=True)
spec.submodule_search_locations = [here]
sys.modules[spec.name] = module_from_spec(spec)
try:
    import torch
    if planted:
        from samewise_steps.planting import plant
        plant(*planted)
    from samewise_steps import cases, ranks
    torch.save(ranks.run(cases.Case(**case), folder), folder / f"rank-{variables['RANK']}.pt")
except BaseException:
    (folder / f"failed-{variables['RANK']}").write_text(traceback.format_exc())
    sys.exit(1)
"""
"""The program of a rank, as text: a fork cannot import the test modules by name."""
