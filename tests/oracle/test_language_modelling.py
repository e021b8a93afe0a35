"""A causal language model against a plain script: the text out of unicodedata, its bytes, attention in full, torch's AdamW."""

from __future__ import annotations

import math
import unicodedata

import pytest
import torch
import torch.nn.functional as F
from samewise_oracle_curves import Task, Trained, batches
from torch import Tensor, nn

from samewise.recipes.language_modelling import LanguageModelling

LENGTH, BATCH, WIDTH, DEPTH, HEADS = 24, 8, 16, 2, 2
OVERRIDES = [
    *("recipe=language_modelling", "model=transformer_language", f"model.width={WIDTH}", f"model.depth={DEPTH}", f"model.heads={HEADS}"),
    *("dataset=unicode_names", "dataset.anywhere=false", f"dataset.length={LENGTH}", "transforms=none", "optimizer=adamw", "optimizer.lr=0.01"),
    *("optimizer.weight_decay=1.0", "param_groups=no_decay_on_norms_and_biases", "clip_norm=1.0", f"batch_size={BATCH}"),
    *("evaluate.every_epochs=null", "evaluate.batch_size=64"),
]


class Layer(nn.Module):
    """Attention by the definition, and two linear layers, each behind a norm and added to its input."""

    def __init__(self) -> None:
        super().__init__()
        self.self_attn = nn.Module()
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
            scores = scores.masked_fill(torch.ones(x.shape[1], x.shape[1]).triu(1) > 0, -math.inf)
            mixed.append(scores.softmax(-1) @ value[..., part])
        x = x + self.self_attn.out_proj(torch.cat(mixed, -1))
        return x + self.linear2(F.gelu(self.linear1(self.norm2(x))))


class Plain(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(257, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.layers, self.norm = nn.ModuleList(Layer() for _ in range(DEPTH)), nn.LayerNorm(WIDTH)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.tokens(tokens) + self.positions(torch.arange(LENGTH))
        for layer in self.layers:
            x = layer(x)
        return self.norm(x) @ self.tokens.weight.T


def tokens_of(split: str) -> Tensor:
    """int64[N, LENGTH + 1]: blocks of the names' bytes, each with the next one's first."""
    names = [name for point in range(0x110000) if (name := unicodedata.ucd_3_2_0.name(chr(point), ""))]
    names = [name for name in names if not name.startswith(("CJK ", "HANGUL SYLLABLE"))]
    chosen = [name for number, name in enumerate(names) if (number % 10 == 9) == (split == "valid")]
    return torch.tensor(list("\n".join(chosen).encode("ascii"))).unfold(0, LENGTH + 1, LENGTH)


def plain(model: Plain, steps: int, shuffle: bool) -> Trained:
    blocks, losses = tokens_of("train"), []
    decayed = [parameter for parameter in model.parameters() if parameter.dim() > 1]
    groups = [{"params": decayed}, {"params": [one for one in model.parameters() if one.dim() == 1], "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=0.01, weight_decay=1.0, foreach=False)
    for batch in batches(len(blocks), BATCH, steps, shuffle=shuffle):
        loss = nats(model, blocks[batch]).mean()
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        losses.append(loss.item())
    with torch.no_grad():
        held = tokens_of("valid")
        loss = nats(model, held).double().mean().item()
        accuracy = (model(held[:, :-1]).argmax(-1) == held[:, 1:]).double().mean().item()
    return Trained(losses, {"loss": loss, "perplexity": math.exp(loss), "accuracy": accuracy}, model.state_dict())


def nats(model: Plain, blocks: Tensor) -> Tensor:
    likely = model(blocks[:, :-1]).log_softmax(-1)
    return -likely.gather(-1, blocks[:, 1:, None])[..., 0]


ALIKE = Task(OVERRIDES, LanguageModelling, Plain, plain)


@pytest.mark.parametrize("precision", ["single", "double"])
def test_it_trains_like_the_plain_script_step_by_step(oracle, precision):
    oracle.require_alike(ALIKE, 12, precision)


@pytest.mark.parametrize(
    "fault", ["recipe.objective=masked", *(pytest.param(one, marks=pytest.mark.slow) for one in ("model.activation=relu", "dataset.anywhere=true"))]
)
def test_a_planted_fault_makes_the_two_diverge(oracle, fault):
    oracle.require_parted(ALIKE, 8, "single", fault)
