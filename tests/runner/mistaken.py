"""Models, recipes, optimizers and schedules with mistakes, or what looks like one: the module `own` of the project in test_own_recipes.py."""

import torch
from torch import nn

from samewise.recipes.classification import Classification
from samewise.runner.interfaces import Loss


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
