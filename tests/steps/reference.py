"""A training of a few steps in plain float64: loop over phases, replicas, micro-batches and samples' sums; average, clip, textbook optimizer.

It shares only the toys with samewise, and is written to be read beside docs/decisions, not to be fast.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Any

import torch
from samewise_steps import textbook, toys
from samewise_steps.cases import Case
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

NORMS = (_BatchNorm, nn.GroupNorm, nn.LayerNorm)


@dataclass
class Trained:
    """The results of a training."""

    weights: dict[str, Tensor]
    average: dict[str, Tensor] = field(default_factory=dict)
    losses: list[float] = field(default_factory=list)
    norms: list[float | None] = field(default_factory=list)


def train(case: Case, initial: Mapping[str, Tensor]) -> Trained:
    """Train the case's model from the initial weights."""
    torch.manual_seed(0)
    model = toys.MODELS[case.model]()
    model.load_state_dict(initial)
    model = model.double().train()
    data = toys.Toys(samples=case.samples, uneven=case.uneven)
    states: dict[str, dict[str, Any]] = {name: {} for name, _ in model.named_parameters()}
    updates = dict.fromkeys(states, 0)
    done = Trained({}, {name: value.clone() for name, value in model.state_dict().items()})
    for step in range(case.steps):
        losses, norm = 0.0, None
        frozen = _freeze(model.train(), case, step // case.steps_per_epoch)
        for phase, parts in enumerate(case.parts or ((),)):
            names = [name for name, _ in model.named_parameters() if name not in frozen and (not parts or name.split(".")[0] in parts)]
            gradient, loss = _gradient(model, case, data, step, phase, names)
            losses += loss
            if case.clip_norm is not None:
                norm = math.sqrt(sum(value.square().sum().item() for value in gradient.values()))
                gradient = {name: value * min(1.0, case.clip_norm / norm) for name, value in gradient.items()}
            rule = textbook.RULES[case.optimizer]
            for name, value in gradient.items():
                options = _options(model, case, name, step, phase)
                held = model.get_parameter(name)
                updates[name] += 1
                # timm counts the steps of a group, those in which it was frozen too
                count = step + 1 if case.optimizer == "Lamb" else updates[name]
                held.data = rule(held.data, value, states[name], options, count)
        done.losses.append(losses)
        done.norms.append(norm)
        if case.average and (step + 1) % case.average[1] == 0:
            _average(done.average, model.state_dict(), case.average[0])
    done.weights = {name: value.clone() for name, value in model.state_dict().items()}
    return done


def _freeze(model: nn.Module, case: Case, epoch: int) -> set[str]:
    """The names of the parameters that are not trained; a batch norm without trained parameters keeps its statistics, unless told otherwise."""
    frozen, held = set[str](), set[str]()
    for name, _ in model.named_parameters():
        rule, given = _rule(model, case, name), any(fnmatchcase(name, pattern) for pattern in case.frozen)
        if given or rule.get("frozen") or epoch < rule.get("frozen_until", 0):
            frozen.add(name)
            held |= {name} if (case.statistics if given else rule.get("frozen_statistics", "freeze")) == "freeze" else set()
    for name, module in model.named_modules():
        inside = [f"{name}.{inner}" for inner, _ in module.named_parameters(recurse=False)]
        if isinstance(module, _BatchNorm) and inside and held.issuperset(inside):
            module.eval()
    return frozen


def _gradient(model: nn.Module, case: Case, data: toys.Toys, step: int, phase: int, names: list[str]) -> tuple[dict[str, Tensor], float]:
    """The gradient of the mean loss over the step's samples, and that mean."""
    first = step % case.steps_per_epoch * case.batch_size
    size, pieces = min(case.batch_size, case.samples - first), case.replicas * case.accumulate
    total, count, sums = 0.0, 0.0, dict.fromkeys(names)
    start = {name: buffer.clone() for name, buffer in model.named_buffers()}
    kept = start
    for replica in range(case.replicas):
        _set_buffers(model, start)
        for part in range(replica * case.accumulate, (replica + 1) * case.accumulate):
            rows = slice(first + part * size // pieces, first + (part + 1) * size // pieces)
            if rows.start == rows.stop:
                continue
            batch = {"image": data.images[rows].double(), "label": data.labels[rows], "weight": data.weights[rows].double()}
            loss = toys.total_loss(model, batch, phase)
            gradients = torch.autograd.grad(loss, [model.get_parameter(name) for name in names], allow_unused=True)
            for name, value in zip(names, gradients, strict=True):
                if value is not None:
                    sums[name] = value if sums[name] is None else sums[name] + value
            total, count = total + loss.item(), count + batch["weight"].sum().item()
        if replica == 0:
            kept = {name: buffer.clone() for name, buffer in model.named_buffers()}
    _set_buffers(model, kept)
    return {name: value / count for name, value in sums.items() if value is not None}, total / count


def _set_buffers(model: nn.Module, values: Mapping[str, Tensor]) -> None:
    for name, buffer in model.named_buffers():
        buffer.copy_(values[name])


def _options(model: nn.Module, case: Case, name: str, step: int, phase: int) -> dict[str, Any]:
    """The optimizer's options for a parameter: those of the first matching rule override the optimizer's own, at the schedule's rate."""
    rule = _rule(model, case, name)
    ours = ("match", "lr_factor", "frozen", "frozen_until", "frozen_statistics")
    options = {**case.options, **(case.second if phase else {}), **{key: value for key, value in rule.items() if key not in ours}}
    options["lr"] *= rule.get("lr_factor", 1.0)
    if case.cosine:
        options["lr"] *= (1 + math.cos(math.pi * step / case.steps)) / 2
    return options


def _rule(model: nn.Module, case: Case, name: str) -> dict[str, Any]:
    """The first of the `param_groups` that matches a parameter."""
    owner = model.get_submodule(name.rpartition(".")[0])
    matching = (rule for rule in case.groups.values() if (isinstance(owner, NORMS) if rule["match"] == "norm" else fnmatchcase(name, rule["match"])))
    return next(matching, {})


def _average(average: dict[str, Tensor], weights: Mapping[str, Tensor], decay: float) -> None:
    for name, value in weights.items():
        average[name] = decay * average[name] + (1 - decay) * value if value.is_floating_point() else value.clone()
