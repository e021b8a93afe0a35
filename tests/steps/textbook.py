"""Every optimizer that a config may name, as its paper or torch's documentation states it, in plain float64 and one tensor at a time.

Nothing here is taken from the code of samewise or torch.optim: their results are compared with it.
"""

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

State = dict[str, Any]
Rule = Callable[[Tensor, Tensor, State, dict[str, Any], int], Tensor]
"""(weights, gradient, state of this tensor, options, the step from 1) to new weights; the state is changed in place."""


def sgd(w: Tensor, g: Tensor, s: State, o: dict[str, Any], t: int) -> Tensor:
    g = g + o.get("weight_decay", 0) * w
    if o.get("momentum", 0):
        s["m"] = o["momentum"] * s["m"] + (1 - o.get("dampening", 0)) * g if "m" in s else g
        g = g + o["momentum"] * s["m"] if o.get("nesterov") else s["m"]
    return w - o["lr"] * g


def adam(w: Tensor, g: Tensor, s: State, o: dict[str, Any], t: int) -> Tensor:
    """Kingma, Ba 2014 (arXiv 1412.6980)."""
    return _adam(w, g + o.get("weight_decay", 0) * w, s, o, t)


def adamw(w: Tensor, g: Tensor, s: State, o: dict[str, Any], t: int) -> Tensor:
    """Loshchilov, Hutter 2017 (arXiv 1711.05101)."""
    return _adam(w * (1 - o["lr"] * o.get("weight_decay", 0.01)), g, s, o, t)


def _moments(g: Tensor, s: State, o: dict[str, Any]) -> tuple[Tensor, Tensor, float, float]:
    first, second = o.get("betas", (0.9, 0.999))
    s["m"] = first * s.get("m", 0) + (1 - first) * g
    s["v"] = second * s.get("v", 0) + (1 - second) * g * g
    return s["m"], s["v"], first, second


def _adam(w: Tensor, g: Tensor, s: State, o: dict[str, Any], t: int) -> Tensor:
    m, v, first, second = _moments(g, s, o)
    if o.get("amsgrad"):
        v = s["max"] = torch.maximum(s.get("max", torch.zeros_like(v)), v)
    return w - o["lr"] * (m / (1 - first**t)) / ((v / (1 - second**t)).sqrt() + o.get("eps", 1e-8))


def nadam(w: Tensor, g: Tensor, s: State, o: dict[str, Any], t: int) -> Tensor:
    """Dozat 2016."""
    g = g + o.get("weight_decay", 0) * w
    m, v, first, second = _moments(g, s, o)
    psi = o.get("momentum_decay", 4e-3)
    now, following = (first * (1 - 0.5 * 0.96 ** (k * psi)) for k in (t, t + 1))
    s["product"] = s.get("product", 1.0) * now
    step = following * m / (1 - s["product"] * following) + (1 - now) * g / (1 - s["product"])
    return w - o["lr"] * step / ((v / (1 - second**t)).sqrt() + o.get("eps", 1e-8))


def radam(w: Tensor, g: Tensor, s: State, o: dict[str, Any], t: int) -> Tensor:
    """Liu et al. 2019 (arXiv 1908.03265)."""
    g = g + o.get("weight_decay", 0) * w
    m, v, first, second = _moments(g, s, o)
    longest = 2 / (1 - second) - 1
    length = longest - 2 * t * second**t / (1 - second**t)
    m = m / (1 - first**t)
    if length <= 5:
        return w - o["lr"] * m
    rectified = math.sqrt((length - 4) * (length - 2) * longest / ((longest - 4) * (longest - 2) * length))
    return w - o["lr"] * m * rectified * math.sqrt(1 - second**t) / (v.sqrt() + o.get("eps", 1e-8))


def adamax(w: Tensor, g: Tensor, s: State, o: dict[str, Any], t: int) -> Tensor:
    """Kingma, Ba 2014, section 7.1."""
    g = g + o.get("weight_decay", 0) * w
    first, second = o.get("betas", (0.9, 0.999))
    s["m"] = first * s.get("m", 0) + (1 - first) * g
    s["u"] = torch.maximum(second * s.get("u", torch.zeros_like(g)), g.abs() + o.get("eps", 1e-8))
    return w - o["lr"] / (1 - first**t) * s["m"] / s["u"]


def adagrad(w: Tensor, g: Tensor, s: State, o: dict[str, Any], t: int) -> Tensor:
    """Duchi, Hazan, Singer 2011."""
    g = g + o.get("weight_decay", 0) * w
    s["sum"] = s.get("sum", o.get("initial_accumulator_value", 0)) + g * g
    return w - o["lr"] / (1 + (t - 1) * o.get("lr_decay", 0)) * g / (s["sum"].sqrt() + o.get("eps", 1e-10))


def adadelta(w: Tensor, g: Tensor, s: State, o: dict[str, Any], t: int) -> Tensor:
    """Zeiler 2012 (arXiv 1212.5701)."""
    g, rho, eps = g + o.get("weight_decay", 0) * w, o.get("rho", 0.9), o.get("eps", 1e-6)
    s["v"] = rho * s.get("v", 0) + (1 - rho) * g * g
    step = (s.get("u", torch.zeros_like(g)) + eps).sqrt() / (s["v"] + eps).sqrt() * g
    s["u"] = rho * s.get("u", 0) + (1 - rho) * step * step
    return w - o["lr"] * step


def rmsprop(w: Tensor, g: Tensor, s: State, o: dict[str, Any], t: int) -> Tensor:
    """Hinton 2012; centred: Graves 2013 (arXiv 1308.0850)."""
    g, alpha = g + o.get("weight_decay", 0) * w, o.get("alpha", 0.99)
    s["v"] = alpha * s.get("v", 0) + (1 - alpha) * g * g
    v = s["v"]
    if o.get("centered"):
        s["mean"] = alpha * s.get("mean", 0) + (1 - alpha) * g
        v = v - s["mean"] ** 2
    g = g / (v.sqrt() + o.get("eps", 1e-8))
    if o.get("momentum", 0):
        g = s["m"] = o["momentum"] * s.get("m", 0) + g
    return w - o["lr"] * g


def rprop(w: Tensor, g: Tensor, s: State, o: dict[str, Any], t: int) -> Tensor:
    """Riedmiller, Braun 1993, without weight backtracking."""
    (less, more), (least, most) = o.get("etas", (0.5, 1.2)), o.get("step_sizes", (1e-6, 50.0))
    agreement = (g * s.get("g", torch.zeros_like(g))).sign()
    size = s.get("size", torch.full_like(g, o["lr"]))
    s["size"] = torch.where(agreement > 0, size * more, torch.where(agreement < 0, size * less, size)).clamp(least, most)
    s["g"] = torch.where(agreement < 0, 0, g)
    return w - s["g"].sign() * s["size"]


def asgd(w: Tensor, g: Tensor, s: State, o: dict[str, Any], t: int) -> Tensor:
    """Polyak, Juditsky 1992; the average is kept beside the weights, which it does not change. As in torch, a changed rate takes effect one step late."""
    eta, lambd = s.get("eta", o["lr"]), o.get("lambd", 1e-4)
    s["eta"] = o["lr"] / (1 + lambd * o["lr"] * t) ** o.get("alpha", 0.75)
    return w * (1 - lambd * eta) - eta * (g + o.get("weight_decay", 0) * w)


def adafactor(w: Tensor, g: Tensor, s: State, o: dict[str, Any], t: int) -> Tensor:
    """Shazeer, Stern 2018 (arXiv 1804.04235), as described in torch's documentation."""
    first, second = o.get("eps", (None, 1e-3))
    first, beta = (torch.finfo(torch.float32).eps if first is None else first), t ** o.get("beta2_decay", -0.8)
    alpha = max(second, _rms(w)) * min(o["lr"], 1 / math.sqrt(t))
    w = w * (1 - o["lr"] * o.get("weight_decay", 0))
    if g.dim() > 1:
        s["rows"] = (1 - beta) * s.get("rows", 0) + beta * (g * g).mean(-1, keepdim=True)
        s["columns"] = (1 - beta) * s.get("columns", 0) + beta * (g * g).mean(-2, keepdim=True)
        v = s["rows"] @ s["columns"] / s["rows"].mean(-2, keepdim=True).clamp(min=first)
    else:
        v = s["v"] = (1 - beta) * s.get("v", 0) + beta * g * g
    step = g / v.sqrt().clamp(min=first)
    return w - alpha * step / max(1.0, _rms(step) / o.get("d", 1.0))


def _rms(values: Tensor) -> float:
    return values.square().mean().sqrt().item()


def muon(w: Tensor, g: Tensor, s: State, o: dict[str, Any], t: int) -> Tensor:
    """Jordan et al. 2024, the matrix's powers in float64 (torch takes bfloat16)."""
    momentum, (a, b, c) = o.get("momentum", 0.95), (3.4445, -4.775, 2.0315)
    s["m"] = momentum * s.get("m", 0) + (1 - momentum) * g
    x = (1 - momentum) * g + momentum * s["m"] if o.get("nesterov", True) else s["m"]
    x = x / x.norm()
    for _ in range(5):
        gram = x @ x.T
        x = a * x + (b * gram + c * gram @ gram) @ x
    w = w * (1 - o["lr"] * o.get("weight_decay", 0.1))
    return w - o["lr"] * math.sqrt(max(1, w.shape[0] / w.shape[1])) * x


def lamb(w: Tensor, g: Tensor, s: State, o: dict[str, Any], t: int) -> Tensor:
    """You et al. 2019 (arXiv 1904.00962), algorithm 2; without decay timm leaves the ratio out."""
    m, v, first, second = _moments(g, s, o)
    step = (m / (1 - first**t)) / ((v / (1 - second**t)).sqrt() + o.get("eps", 1e-6))
    decay = o.get("weight_decay", 0.01)
    step = step + decay * w
    return w - o["lr"] * (_ratio(w.norm(), step.norm()) if decay else 1.0) * step


def lars(w: Tensor, g: Tensor, s: State, o: dict[str, Any], t: int) -> Tensor:
    """You, Gitman, Ginsburg 2017 (arXiv 1708.03888); without decay timm leaves the ratio out."""
    decay = o.get("weight_decay", 0.0)
    ratio = _ratio(o.get("trust_coeff", 0.001) * w.norm(), g.norm() + decay * w.norm() + o.get("eps", 1e-8)) if decay else 1.0
    return sgd(w, ratio * (g + decay * w), s, {**o, "weight_decay": 0}, t)


def _ratio(weights: Tensor, step: Tensor) -> Tensor | float:
    return weights / step if weights > 0 and step > 0 else 1.0


RULES: dict[str, Rule] = {
    "SGD": sgd,
    "Adam": adam,
    "AdamW": adamw,
    "NAdam": nadam,
    "RAdam": radam,
    "Adamax": adamax,
    "Adagrad": adagrad,
    "Adadelta": adadelta,
    "RMSprop": rmsprop,
    "Rprop": rprop,
    "ASGD": asgd,
    "Adafactor": adafactor,
    "Muon": muon,
    "Lamb": lamb,
    "Lars": lars,
}
"""By torch's name, or timm's."""
