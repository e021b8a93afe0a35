"""Models, recipes, optimizers and schedules with mistakes, or what looks like one: the module `own` of the project in test_hidden_state.py."""

import copy

import numpy
import torch
from torch import nn

from samewise.recipes.classification import Classification
from samewise.runner.interfaces import Loss, Phase
from samewise.runner.optim.schedules import LearningRate
from samewise.runner.optim.schedules.base import Schedule


class Base(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.flatten, self.head = nn.Flatten(), nn.Linear(64, 10)

    def forward(self, images):
        return self.head(self.shift(self.flatten(images)))


class Buffer(Base):
    persistent = True

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(64), persistent=self.persistent)

    def shift(self, x):
        if self.training:
            self.mean.mul_(0.9).add_(x.detach().mean(0), alpha=0.1)
        return x - self.mean


class Shrinks(Base):
    def shift(self, x):
        if self.training:
            with torch.no_grad():
                self.head.weight.mul_(0.9)
        return x


class Momentum(Base):
    # a copy, which its first average with the original does not change

    def __init__(self):
        super().__init__()
        self.slow = copy.deepcopy(self.head).requires_grad_(False)

    def shift(self, x):
        if self.training:
            self.update(self.slow.weight, self.head.weight.detach())
        return x + 0.1 * self.slow(x).mean()

    def update(self, slow, fast):
        with torch.no_grad():
            slow.lerp_(fast, 0.1)


class ByData(Momentum):
    def update(self, slow, fast):
        slow.data.mul_(0.9).add_(fast, alpha=0.1)


class NewData(Momentum):
    def update(self, slow, fast):
        slow.data = slow.data * 0.9 + fast * 0.1


class Limited(Base):
    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(17, 64)

    def shift(self, x):
        self.table.max_norm = 100.0 if self.training else None
        return x + self.table(x.argmax(1) % 17)


class Loose(Buffer):
    persistent = False


class InEvaluation(Base):
    mean = 0.0

    def shift(self, x):
        if not self.training:
            return x - self.mean
        self.mean = 0.9 * self.mean + 0.1 * x.detach().mean(0)
        return x - x.mean(0)


class Counter(Base):
    calls = 0

    def shift(self, x):
        self.calls += self.training
        return x * (1 + self.calls)


class Unregistered(Base):
    def __init__(self):
        super().__init__()
        self.scale, self.hidden = torch.ones(64, requires_grad=True), [nn.Linear(64, 64)]

    def shift(self, x):
        return self.hidden[0](x * self.scale)


class Unseeded(Base):
    def __init__(self):
        super().__init__()
        self.bias = nn.Parameter(torch.from_numpy(numpy.random.default_rng().normal(size=64)).float())

    def shift(self, x):
        return x + self.bias


class Own(Base):
    drawn_from = None

    def shift(self, x):
        self.drawn_from = self.drawn_from or torch.Generator().manual_seed(0)
        return x + torch.randn(x.shape, generator=self.drawn_from)


class Harmless(Buffer):
    scale, calls, last = None, 0, None

    def shift(self, x):
        self.scale = torch.full((64,), 2.0) if self.scale is None else self.scale
        self.calls += 1
        self.last = super().shift(x) * self.scale
        return nn.functional.dropout(self.last, 0.5, self.training)


class Extra(Base):
    def shift(self, x):
        return x

    def get_extra_state(self):
        return {"mean": 0.0}


class Sparse(Base):
    def __init__(self):
        super().__init__()
        self.register_buffer("eye", torch.eye(4).to_sparse())


class SparseTable(Base):
    def __init__(self):
        super().__init__()
        self.table = nn.Parameter(torch.ones(4, 64))

    def shift(self, x):
        return x + nn.functional.embedding(torch.arange(len(x)) % 4, self.table, sparse=True)


class Lazy(Base):
    def __init__(self):
        super().__init__()
        self.head = nn.LazyLinear(10)


class Sound(Base):
    def shift(self, x):
        return x


class Changing(Classification):
    # changes its batch, or a copy of it

    copies = False

    def loss(self, model, batch, phase):
        batch = {name: value.clone() for name, value in batch.items()} if self.copies else batch
        batch["image"] //= 2
        batch["image"] += torch.randint(0, 9, batch["image"].shape, dtype=torch.uint8)
        return super().loss(model, {"image": batch.pop("image").float(), "label": batch.pop("label")}, phase)

    def measure(self, model, batch):
        return super().measure(model, {**batch, "image": batch["image"].float()})


class Copying(Changing):
    copies = True


class InTurn(Changing):
    phases = (Phase("one", ("head.weight",)), Phase("two", ("head.bias",)))

    def loss(self, model, batch, phase):
        if self.copies:
            return Classification.loss(self, model, {**batch, "image": (batch["image"] // 2).float()}, phase)
        batch["image"] //= 2
        return Classification.loss(self, model, {"image": batch.pop("image").float(), "label": batch["label"]}, phase)


class Evaluating(Classification):
    def loss(self, model, batch, phase):
        try:
            return super().loss(model, batch, phase)
        finally:
            model.eval()


class Detached(Classification):
    def loss(self, model, batch, phase):
        loss = super().loss(model, batch, phase)
        return Loss(torch.tensor(loss.total.item(), requires_grad=True), loss.count)


class Centres(nn.Module):
    def __init__(self, *, frozen: bool = False) -> None:
        super().__init__()
        self.centres = nn.Parameter(torch.zeros(10), requires_grad=not frozen)

    def forward(self, logits, labels):
        return nn.functional.cross_entropy(logits - self.centres, labels, reduction="none")


class Weighted(Classification):
    def __init__(self, **given):
        super().__init__(**given)
        self.parts = {"heads": [nn.Linear(2, 2)], "weight": torch.ones(2, requires_grad=True)}


class Counting(torch.optim.SGD):
    def __init__(self, params, *, lr: float = 0.1) -> None:
        super().__init__(params, lr=lr)
        self.steps, self.cache, self.slow = 0, None, [p.detach().clone() for group in self.param_groups for p in group["params"]]

    def step(self, closure=None):
        self.steps += 1
        for parameter in self.param_groups[0]["params"]:
            parameter.grad /= self.steps
        return super().step(closure)


class Saving(Counting):
    def state_dict(self):
        return {**super().state_dict(), "steps": self.steps}

    def load_state_dict(self, state):
        super().load_state_dict(state)
        self.steps = state["steps"]


class InState(torch.optim.SGD):
    # what it keeps in attributes is a reference, or made once

    def __init__(self, params, *, lr: float = 0.1) -> None:
        super().__init__(params, lr=lr)
        self.mine, self.inner, self.made = self.param_groups[0]["params"], torch.optim.SGD(self.param_groups, lr=lr), None

    def step(self, closure=None):
        self.made = torch.ones(3) if self.made is None else self.made
        for one in self.mine:
            self.state[one]["step"] = self.state[one].get("step", 0) + 1
        return self.inner.step(closure)


class Factored(torch.optim.SGD):
    # a factor of its own, from the second step on

    name = "factor"

    def __init__(self, params, *, lr: float = 0.1) -> None:
        super().__init__(params, lr=lr)
        self.param_groups[0].setdefault(self.name, 1.0)

    def step(self, closure=None):
        found = super().step(closure)
        parameter = self.param_groups[0]["params"][0]
        if "last" in self.state[parameter]:
            self.param_groups[0][self.name] *= 1 + float((parameter.grad * self.state[parameter]["last"]).sum().sign()) / 100
        self.state[parameter]["last"] = parameter.grad.clone()
        return found


class Shrinking(Schedule):
    def __init__(self) -> None:
        super().__init__(unit="step")
        self.factor = 1.0

    def at(self, step, options, group):
        self.factor *= 0.9
        return {**options, "lr": self.factor}


class Heeding(LearningRate):
    best = 1.0

    def after_evaluation(self, metrics):
        self.best = min(self.best, *metrics.values())

    def rate(self, time, lr):
        return lr * self.best


class Cached(LearningRate):
    def __init__(self) -> None:
        super().__init__(unit="step")
        self.known = {}

    def rate(self, time, lr):
        return self.known.setdefault(time, lr * 0.9**time)
