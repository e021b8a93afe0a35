"""Optimizer steps against a plain reference in float64, over the product of what a config may combine.

Not the same bits, but agreement up to rounding (`cases.ROUNDING`, a relative error of 1e-5 of the update in float32).
"""

import pytest
from hypothesis import HealthCheck, Phase, example, given, settings
from samewise_steps.cases import SMOOTH, Case
from samewise_steps.compared import differing_bits, disagreements
from samewise_steps.drawn import OPTIMIZERS, cases
from samewise_steps.planting import source_of

ALWAYS_THE_SAME = settings(
    deadline=None, database=None, derandomize=True, phases=[Phase.explicit, Phase.generate], print_blob=False, suppress_health_check=list(HealthCheck)
)
"""The draws are the same in every run, and no smaller example is searched for: a case is small."""
SOME, MANY = (settings(ALWAYS_THE_SAME, max_examples=number) for number in (25, 150))


@example(Case(memory_format="channels_last", replicas=2))
@example(Case(memory_format="channels_last", replicas=3, accumulate=2, uneven=True, clip_norm=0.1, parts=(("stem", "body"), ("head",))))
@example(Case(model="Tied", average=(0.5, 1), accumulate=2))
@example(Case(model="Sums", accumulate=2))
@example(Case(model="Sums", clip_norm=0.1, dtype="float16"))
@SOME
@given(cases())
def test_a_step_matches_the_reference(case: Case) -> None:
    assert not disagreements(case)


@pytest.mark.parametrize(("optimizer", "options"), OPTIMIZERS, ids=lambda value: value if isinstance(value, str) else "-".join(value))
def test_every_optimizer_steps_as_in_its_textbook(optimizer: str, options: dict[str, object]) -> None:
    model = "Matrices" if optimizer == "Muon" else "Image"
    assert not disagreements(Case(model=model, optimizer=optimizer, options=options, memory_format="channels_last", replicas=2, steps=3, cosine=True))


HALVED = {"memory_format": "channels_last", "replicas": 4, "processes": 2, "accumulate": 2, "batch_size": 24, "samples": 60, "drop_last": False, "steps": 3}
IN_PROCESSES = {
    "elastic on 2": Case(strategy="elastic", **HALVED, uneven=True, clip_norm=0.1, settings={"bucket_mb": 0.001}),
    "elastic on 3, phases": Case(
        strategy="elastic", memory_format="channels_last", replicas=3, processes=3, parts=(("stem", "body"), ("skip", "head")), settings={"overlap": False}
    ),
    "ddp": Case(strategy="ddp", **{**HALVED, "replicas": 2, "samples": 49}, uneven=True, optimizer="AdamW", options={"lr": 0.05, "eps": SMOOTH}),
    "ddp, phases, zero": Case(
        model="Sums", strategy="ddp", replicas=2, processes=2, parts=(("stem", "body"), ("head",)), settings={"find_unused_parameters": True, "zero": True}
    ),
    "fsdp": Case(strategy="fsdp", **{**HALVED, "replicas": 2}, uneven=True, clip_norm=0.1, average=(0.5, 1)),
    "fsdp, tied": Case(model="Tied", strategy="fsdp", replicas=2, processes=2, batch_size=12, average=(0.5, 1)),
    "pipeline": Case(strategy="pipeline", memory_format="channels_last", processes=2, accumulate=2, settings={"split": ["head"]}, dtype="float16"),
    "1f1b": Case(model="Letters", strategy="pipeline", processes=2, accumulate=3, uneven=True, clip_norm=0.1, settings={"split": ["body"], "schedule": "1f1b"}),
    "rpc": Case(strategy="rpc", memory_format="channels_last", processes=2, accumulate=2, uneven=True, average=(0.5, 1), settings={"split": ["head"]}),
}


@pytest.mark.parametrize("case", [pytest.param(case, id=name, marks=[pytest.mark.fsdp] * (case.strategy == "fsdp")) for name, case in IN_PROCESSES.items()])
def test_a_step_of_several_processes_matches_the_reference(case: Case) -> None:
    assert not disagreements(case)


@pytest.mark.parametrize("name", ["elastic on 2", "elastic on 3, phases", "pipeline", "1f1b", "rpc"])
def test_the_number_of_processes_changes_no_bit(name: str) -> None:
    assert not differing_bits(IN_PROCESSES[name])


@pytest.mark.gpu
@example(Case(memory_format="channels_last", replicas=3, accumulate=2, uneven=True, clip_norm=0.1, parts=(("stem", "body"), ("head",))))
@SOME
@given(cases())
def test_a_step_on_a_gpu_matches_the_reference(case: Case) -> None:
    assert not disagreements(case.varied(device="cuda"))


@pytest.mark.gpu
@pytest.mark.parametrize(("optimizer", "options"), OPTIMIZERS, ids=lambda value: value if isinstance(value, str) else "-".join(value))
def test_every_optimizer_steps_on_a_gpu_as_in_its_textbook(optimizer: str, options: dict[str, object]) -> None:
    model = "Matrices" if optimizer == "Muon" else "Image"
    assert not disagreements(Case(model=model, optimizer=optimizer, options=options, replicas=2, steps=3, cosine=True, device="cuda"))


@pytest.mark.slow
@pytest.mark.long
@MANY
@given(cases())
def test_many_more_steps_match_the_reference(case: Case) -> None:
    assert not disagreements(case)


@pytest.mark.slow
@pytest.mark.parametrize("count", [5, pytest.param(20, marks=pytest.mark.long)])
@pytest.mark.parametrize("strategy", ["elastic", "ddp", pytest.param("fsdp", marks=pytest.mark.fsdp), "pipeline", "rpc"])
def test_many_more_steps_of_several_processes_match_the_reference(strategy: str, count: int) -> None:
    @settings(ALWAYS_THE_SAME, max_examples=count)
    @given(cases(strategy))
    def steps(case: Case) -> None:
        assert not disagreements(case)

    steps()


ONE = Case(
    memory_format="channels_last",
    replicas=3,
    accumulate=2,
    batch_size=18,
    samples=50,
    drop_last=False,
    steps=3,
    uneven=True,
    clip_norm=0.1,
    cosine=True,
    average=(0.7, 1),
    groups={"head": {"match": "head.*", "lr_factor": 3.0}},
    options={"lr": 0.1, "momentum": 0.9},
)
HALF = ONE.varied(dtype="float16", drop_last=True, steps=2, uneven=False)
TWO = ONE.varied(strategy="elastic", replicas=4, batch_size=24, samples=60, processes=2)
LATER = ONE.varied(
    parts=(("stem", "body"), ("head",)), groups={"stem": {"match": "stem.*", "frozen_until": 1}}, second={"lr": 0.05}, recomputed=("body",), steps=5
)
DDP = Case(strategy="ddp", memory_format="channels_last", replicas=2, processes=2, batch_size=24, samples=49, drop_last=False, steps=3)

FAULTS: dict[str, tuple[Case, str, str, str]] = {
    "gradients that share memory": (ONE.varied(model="Sums", groups={}), "optim.gradients", "if start < end:", "if end < start < end:"),
    "a sum with the wrong sign": (ONE, "strategies.tree", "target.tensor.add_(source.tensor)", "target.tensor.sub_(source.tensor)"),
    "views that do not lie as the parameters": (
        *(ONE, "strategies.tree", "tensor.as_strided(p.shape, dense_strides(p), start)"),
        "tensor[start : start + p.numel()].view(p.shape)",
    ),
    "a buffer that keeps the last step's sum": (ONE, "strategies.tree", "foreach_copy_(*pairs)", "torch._foreach_add_(*pairs)"),
    "a replica that goes on from another's statistics": (ONE, "strategies.tree", "if replica > 0:", "if replica > 1:"),
    "statistics of no replica": (ONE, "strategies.tree", "self._restore(self._kept)", "self._restore(self._start)"),
    "gradients that stay from the step before": (ONE, "training.run", "parameter.grad = None", "parameter.grad"),
    "a mean that is multiplied by its count": (ONE, "training.phase", "foreach_mul_(gradients, 1.0 / tally.weight)", "foreach_mul_(gradients, tally.weight)"),
    "clipping of small gradients": (ONE, "training.phase", "+ 1e-6), max=1.0)", "+ 1e-6), min=1.0)"),
    "clipping to the square root": (ONE, "training.phase", "clip_norm / (norm + 1e-6)", "clip_norm / (norm.sqrt() + 1e-6)"),
    "each micro-batch's own mean": (ONE, "training.loop", "loss.count if run.micro_batches == 1 else run.batch_size", "loss.count"),
    "the next step's learning rate": (ONE, "training.loop", "run.schedule.before_step(run.step)", "run.schedule.before_step(run.step + 1)"),
    "counts of one replica only": (ONE, "strategies.base", "Tally(first.count + second.count,", "Tally(first.count,"),
    "a weight upside down": (ONE, "strategies.base", "return self.count / self.nominal", "return self.nominal / self.count"),
    "micro-batches that leave samples out": (
        *(ONE, "data.plan", "start + micro_batch * size // self.micro_batches,"),
        "start + micro_batch * (size // self.micro_batches),",
    ),
    "the same samples in every step": (ONE, "data.plan", "start = step_of_epoch * self.batch_size", "start = 0 * step_of_epoch * self.batch_size"),
    "a factor that is added": (ONE, "optim.build", 'group["lr"] = factor * lr', 'group["lr"] = factor + lr'),
    "an average the wrong way round": (ONE, "callbacks.ema", "averaged.lerp_(weight, alpha)", "averaged.lerp_(weight, 1 - alpha)"),
    "a layer that waits for a step too long": (LATER, "training.phase", "if step < x.until", "if step <= x.until"),
    "a waiting layer whose statistics move": (LATER, "training.phase", "frozen.layers if frozen else ()", "()"),
    "one optimizer for both phases": (LATER, "optim.build", "nodes[phase.name]", "nodes[phases[0].name]"),
    "statistics updated again in the backward pass": (
        LATER,
        "strategies.recompute",
        "_restore([(part, name, buffer.clone()) for part, name, buffer in self._before])",
        "pass",
    ),
    "gradients clipped while they are scaled": (HALF, "precision", "self._scaler.unscale_(optimizer)", "self._scaler.get_scale()"),
    "another process's samples": (TWO, "strategies.elastic", "range(own_replicas.start * self._accumulate,", "range(own_replicas.start,"),
    "shares added in no place": (TWO, "strategies.replicas", "rows[target].add_(rows[source])", "rows[source].add_(rows[target])"),
    "a mean of means": (DDP, "strategies.ddp", "total.nominal *= self.peers.size", "total.nominal *= 1"),
    "what another process sends lies otherwise": (DDP, "strategies.packing", "torch.empty_like(tensor)", "torch.empty(tensor.shape, dtype=tensor.dtype)"),
    "pieces that overlap": (
        *(DDP, "strategies.packing", "-(-tensor.numel() * tensor.element_size() // 16) * 16"),
        "tensor.numel() * tensor.element_size() // 64 * 16",
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("case", [ONE, HALF, LATER, TWO, DDP], ids=["one process", "float16", "frozen at first", "two processes", "ddp"])
def test_without_a_fault_both_agree(case: Case) -> None:
    assert not disagreements(case)


@pytest.mark.slow
@pytest.mark.parametrize(("case", "module", "right", "wrong"), FAULTS.values(), ids=FAULTS)
def test_a_planted_fault_is_found(case: Case, module: str, right: str, wrong: str) -> None:
    source = source_of(f"samewise.runner.{module}")
    assert source.count(right) == 1, "the fault's place has changed"
    try:
        found = disagreements(case, (f"samewise.runner.{module}", source.replace(right, wrong)))
    except AssertionError as error:  # a rank has failed, or the ranks have diverged
        found = [str(error)]
    assert found
    assert not any("SyntaxError" in line or "NameError" in line for line in found)
