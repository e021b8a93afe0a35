"""A causal language model, and a classifier of texts, against plain scripts: texts out of unicodedata, attention by its definition, torch's AdamW."""

import math
import unicodedata
from collections.abc import Callable
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from samewise_oracle_curves import Task, Trained, batches
from torch import Tensor, nn

from samewise.recipes.language_modelling import LanguageModelling
from samewise.recipes.text_classification import TextClassification

LENGTH, BATCH, WIDTH, DEPTH, HEADS = 24, 8, 16, 2, 2
OVERRIDES = [
    *("recipe=language_modelling", "model=transformer_language", f"model.width={WIDTH}", f"model.depth={DEPTH}", f"model.heads={HEADS}"),
    *("dataset=unicode_names", "dataset.anywhere=false", f"dataset.length={LENGTH}", "transforms=none", "optimizer=adamw", "optimizer.lr=0.01"),
    *("optimizer.weight_decay=1.0", "param_groups=no_decay_on_norms_and_biases", "clip_norm=1.0", f"batch_size={BATCH}"),
    *("evaluate.every_epochs=null", "evaluate.batch_size=64"),
]


class Layer(nn.Module):
    """Attention by the definition, and two linear layers, each behind a norm and added to its input."""

    def __init__(self, causal: bool) -> None:
        super().__init__()
        self.causal, self.self_attn = causal, nn.Module()
        self.self_attn.in_proj_weight = nn.Parameter(torch.randn(3 * WIDTH, WIDTH) / 8)
        self.self_attn.in_proj_bias = nn.Parameter(torch.randn(3 * WIDTH) / 8)
        self.self_attn.out_proj = nn.Linear(WIDTH, WIDTH)
        self.linear1, self.linear2 = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        query, key, value = F.linear(self.norm1(x), self.self_attn.in_proj_weight, self.self_attn.in_proj_bias).chunk(3, -1)
        size, mixed = WIDTH // HEADS, []
        for head in range(HEADS):
            part = slice(head * size, (head + 1) * size)
            scores = query[..., part] @ key[..., part].mT / math.sqrt(size)
            if self.causal:
                scores = scores.masked_fill(torch.ones(x.shape[1], x.shape[1]).triu(1) > 0, -math.inf)
            mixed.append(scores.softmax(-1) @ value[..., part])
        x = x + self.self_attn.out_proj(torch.cat(mixed, -1))
        return x + self.linear2(F.gelu(self.linear1(self.norm2(x))))


class Plain(nn.Module):
    def __init__(self, length: int = LENGTH, classes: int = 0) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(257, WIDTH), nn.Embedding(length, WIDTH)
        self.layers, self.norm = nn.ModuleList(Layer(not classes) for _ in range(DEPTH)), nn.LayerNorm(WIDTH)
        if classes:
            self.head = nn.Linear(WIDTH, classes)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.tokens(tokens) + self.positions(torch.arange(tokens.shape[1]))
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x).mean(1)) if hasattr(self, "head") else self.norm(x) @ self.tokens.weight.T


def named(split: str) -> list[tuple[str, str]]:
    """The names and categories of a split's characters."""
    unicode = unicodedata.ucd_3_2_0
    pairs = [(name, unicode.category(chr(point))) for point in range(0x110000) if (name := unicode.name(chr(point), ""))]
    pairs = [pair for pair in pairs if not pair[0].startswith(("CJK ", "HANGUL SYLLABLE"))]
    return [pair for number, pair in enumerate(pairs) if (number % 10 == 9) == (split == "valid")]


def tokens_of(split: str) -> Tensor:
    """int64[N, LENGTH + 1]: blocks of the names' bytes, each with the next one's first."""
    text = "\n".join(name for name, _ in named(split))
    return torch.tensor(list(text.encode("ascii"))).unfold(0, LENGTH + 1, LENGTH)


def plain(model: Plain, steps: int, shuffle: bool) -> Trained:
    blocks = tokens_of("train")
    losses = stepped(model, steps, shuffle, len(blocks), lambda batch: nats(model, blocks[batch]).mean())
    with torch.no_grad():
        held = tokens_of("valid")
        loss = nats(model, held).double().mean().item()
        accuracy = (model(held[:, :-1]).argmax(-1) == held[:, 1:]).double().mean().item()
    return Trained(losses, {"loss": loss, "perplexity": math.exp(loss), "accuracy": accuracy}, model.state_dict())


def stepped(model: Plain, steps: int, shuffle: bool, samples: int, loss_of: Callable[[list[int]], Tensor]) -> list[float]:
    losses = []
    decayed = [parameter for parameter in model.parameters() if parameter.dim() > 1]
    groups = [{"params": decayed}, {"params": [one for one in model.parameters() if one.dim() == 1], "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=0.01, weight_decay=1.0, foreach=False)
    for batch in batches(samples, BATCH, steps, shuffle=shuffle):
        loss = loss_of(batch)
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        losses.append(loss.item())
    return losses


def nats(model: Plain, blocks: Tensor) -> Tensor:
    likely = model(blocks[:, :-1]).log_softmax(-1)
    return -likely.gather(-1, blocks[:, 1:, None])[..., 0]


def plain_of_names(model: Plain, steps: int, shuffle: bool) -> Trained:
    """Each name on its own, so that none is padded."""
    pairs, held = named("train"), named("valid")
    kinds = sorted({kind for _, kind in pairs})

    def nats_of(pair: tuple[str, str]) -> Tensor:
        return -model(torch.tensor([list(pair[0].encode("ascii"))])).log_softmax(1)[0, kinds.index(pair[1])]

    losses = stepped(model, steps, shuffle, len(pairs), lambda batch: torch.stack([nats_of(pairs[number]) for number in batch]).mean())
    with torch.no_grad():
        loss = torch.stack([nats_of(pair) for pair in held]).double().mean().item()
    return Trained(losses, {"loss": loss}, model.state_dict())


NAMES = ["recipe=text_classification", "model=transformer_text", "dataset=unicode_categories"]
ALIKE = Task(OVERRIDES, LanguageModelling, Plain, plain)
ALIKE_OF_NAMES = Task(
    [*NAMES, *(one for one in OVERRIDES if not one.startswith(("recipe=", "model=", "dataset")))], TextClassification, partial(Plain, 96, 26), plain_of_names
)


@pytest.mark.parametrize("precision", ["single", "double"])
@pytest.mark.parametrize("task", [ALIKE, ALIKE_OF_NAMES], ids=["language", "classes"])
def test_it_trains_like_the_plain_script_step_by_step(oracle, task, precision):
    oracle.require_alike(task, 12, precision)


@pytest.mark.parametrize(
    "fault", ["recipe.objective=masked", *(pytest.param(one, marks=pytest.mark.slow) for one in ("model.activation=relu", "dataset.anywhere=true"))]
)
def test_a_planted_fault_makes_the_two_diverge(oracle, fault):
    oracle.require_parted(ALIKE, 8, "single", fault)
