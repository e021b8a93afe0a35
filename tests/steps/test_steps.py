"""Optimizer steps against a plain reference in float64, over the product of what a config may combine.

Not the same bits, but agreement up to rounding (`cases.ROUNDING`, a relative error of 1e-5 of the update in float32).
"""

import pytest
from hypothesis import HealthCheck, Phase, example, given, settings
from samewise_steps.cases import SMOOTH, Case
from samewise_steps.compared import differing_bits, disagreements
from samewise_steps.drawn import OPTIMIZERS, cases

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
