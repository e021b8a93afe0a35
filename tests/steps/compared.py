"""How far samewise's training is from the reference."""

from collections.abc import Mapping
from typing import Any

import torch
from samewise_steps import ranks, reference
from samewise_steps.cases import ROUNDING, Case
from torch import Tensor

ULP = torch.finfo(torch.float32).eps
KNOWN: dict[str, tuple[dict[str, Any], Any]] = {}


def disagreements(case: Case, planted: tuple[str, str] | None = None) -> list[str]:
    """Sentences about where a case's training differs from the reference by more than rounding; none if it is right. `planted` is as in `ranks.trained`."""
    initial, ours = _trained(case, planted)
    theirs = reference.train(case, initial)
    found = [*_of_weights("", initial, ours.weights, theirs.weights, case)]
    if case.average:
        found += _of_weights("average of ", initial, ours.average, theirs.average, case)
    for step, pair in enumerate(zip(ours.losses, theirs.losses, strict=True), 1):
        found += _of_number(f"the loss of step {step}", *pair, case, step)
    for step, pair in enumerate(zip(ours.norms, theirs.norms, strict=True), 1):
        if case.clip_norm is not None and len(case.parts) < 2:
            found += _of_number(f"the gradient's norm in step {step}", *pair, case, step)
    return found


def differing_bits(case: Case) -> list[str]:
    """The names of the weights that differ from those of the same case on one process."""
    (_, ours), (_, alone) = _trained(case), _trained(case.varied(strategy="single", processes=1, settings={}))
    return [name for name, value in ours.weights.items() if not torch.equal(value, alone.weights[name])]


def _trained(case: Case, planted: tuple[str, str] | None = None) -> tuple[dict[str, Any], Any]:
    """Like `ranks.trained`; cases on several processes, which are slow to start, are trained only once."""
    if planted is not None or case.processes == 1:
        return ranks.trained(case, planted)
    key = repr(case)
    if key not in KNOWN:
        KNOWN[key] = ranks.trained(case)
    return KNOWN[key]


def _of_number(name: str, ours: float | None, theirs: float | None, case: Case, step: int) -> list[str]:
    assert theirs is not None
    allowed = ROUNDING[case.dtype] if step == 1 and not case.parts else max(ROUNDING[case.dtype], case.rounding)
    if ours is not None and abs(ours - theirs) <= allowed * max(abs(theirs), 1e-3):
        return []
    return [f"{name} is {ours}, expected {theirs}"]


def _of_weights(what: str, initial: Mapping[str, Tensor], ours: Mapping[str, Tensor], theirs: Mapping[str, Tensor], case: Case) -> list[str]:
    """Compare the updates of all tensors together, and each one less strictly: one may be mostly rounding."""
    assert ours.keys() == theirs.keys() == initial.keys()
    found, errors, updates, roundings = [], 0.0, 0.0, 0.0
    for name, expected in theirs.items():
        if not expected.is_floating_point():
            found += [f"{what}{name} is {ours[name]}, expected {expected}"] if not torch.equal(ours[name], expected) else []
            continue
        start, mine = initial[name].double(), ours[name].double()
        error, update = (mine - expected).norm().item(), (expected - start).norm().item()
        rounding = 2 * case.steps * ULP * max(expected.norm().item(), start.norm().item())
        errors, updates, roundings = errors + error**2, updates + update**2, roundings + rounding**2
        if update == 0.0 and error > 0.0:
            found.append(f"{what}{name} has moved by {error:.3g}, expected to stay")
        elif not error <= 100 * case.rounding * update + rounding:
            found.append(f"{what}{name}: relative error of the update {error / max(update, 1e-30):.3g}")
    if not errors**0.5 <= case.rounding * updates**0.5 + roundings**0.5:
        found.append(f"{what}all weights: relative error of the update {(errors / max(updates, 1e-30)) ** 0.5:.3g}, at most {case.rounding:.3g} expected")
    return found
