"""Draws cases from the space of what a config may combine."""

from typing import Any

from hypothesis import strategies as st
from samewise_steps.cases import SMOOTH, Case

OPTIMIZERS: list[tuple[str, dict[str, Any]]] = [
    ("SGD", {"lr": 0.3}),
    ("SGD", {"lr": 0.1, "momentum": 0.9, "nesterov": True, "weight_decay": 0.1}),
    ("SGD", {"lr": 0.1, "momentum": 0.9, "dampening": 0.5, "fused": False}),
    ("SGD", {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.1, "foreach": True}),
    ("Adam", {"lr": 0.01}),
    ("Adam", {"lr": 0.05, "eps": SMOOTH, "weight_decay": 0.1, "amsgrad": True}),
    ("Adam", {"lr": 0.05, "eps": SMOOTH, "foreach": True}),
    ("AdamW", {"lr": 0.05, "eps": SMOOTH, "weight_decay": 0.2, "betas": [0.8, 0.95]}),
    ("NAdam", {"lr": 0.05, "eps": SMOOTH, "weight_decay": 0.1}),
    ("RAdam", {"lr": 0.05, "eps": SMOOTH, "betas": [0.9, 0.5]}),
    ("RAdam", {"lr": 0.05, "eps": SMOOTH, "weight_decay": 0.1}),
    ("Adamax", {"lr": 0.02, "eps": SMOOTH, "weight_decay": 0.1}),
    ("Adagrad", {"lr": 0.05, "eps": SMOOTH, "lr_decay": 0.1, "weight_decay": 0.1}),
    ("Adadelta", {"lr": 1.0, "eps": SMOOTH, "weight_decay": 0.1}),
    ("RMSprop", {"lr": 0.02, "eps": SMOOTH, "centered": True, "momentum": 0.9, "weight_decay": 0.1}),
    *(("Rprop", {"lr": 0.01}), ("ASGD", {"lr": 0.2, "weight_decay": 0.1})),
    *(("Adafactor", {"lr": 0.05, "weight_decay": 0.1}), ("Muon", {"lr": 0.05, "weight_decay": 0.1})),
    ("Lamb", {"lr": 0.02, "eps": SMOOTH, "weight_decay": 0.1, "max_grad_norm": None}),
    ("Lamb", {"lr": 0.02, "eps": SMOOTH, "weight_decay": 0.0, "max_grad_norm": None}),
    ("Lars", {"lr": 10.0, "momentum": 0.9, "nesterov": True, "weight_decay": 0.1}),
]
GROUPS: list[dict[str, Any]] = [
    {},
    {"norms": {"match": "norm", "weight_decay": 0.0}, "head": {"match": "head.*", "lr_factor": 3.0}},
    {"stem": {"match": "stem.*", "frozen": True}},
    {"stem": {"match": "stem.*", "frozen": True, "frozen_statistics": "train"}},
]
LATER: dict[str, Any] = {"stem": {"match": "stem.*", "frozen_until": 1}}
NORMLESS, CUTTABLE = ("Letters", "Matrices", "Tied", "Sums"), {"Image": "head", "Letters": "body", "Matrices": "body"}
PLAIN = ("SGD", "ASGD")


@st.composite
def cases(draw: st.DrawFn, strategy: str = "single") -> Case:
    """A case under one of the strategies, on several processes if it needs them."""
    optimizer, options = draw(st.sampled_from(OPTIMIZERS))
    cut = strategy in ("pipeline", "rpc")
    models = ["Matrices"] if optimizer == "Muon" else list(CUTTABLE) if cut else ["Image", "Pyramid", "Letters", "Masks", "Waves", "Tied", "Sums"]
    model = draw(st.sampled_from(models))
    replicas = 1 if cut else 2 if strategy in ("ddp", "fsdp") else draw(st.integers(1 if strategy == "single" else 2, 4))
    accumulate = draw(st.integers(2 if cut else 1, 3))
    batch_size = replicas * accumulate * draw(st.integers(3, 4))
    drop_last = draw(st.booleans())
    rest = draw(st.integers(replicas, batch_size - 1))
    # torch supports neither on shards; Rprop steps by signs, which rounding turns where stages add in another order
    if (strategy == "fsdp" and optimizer in ("Adafactor", "Rprop")) or (cut and optimizer == "Rprop"):
        optimizer, options = "SGD", {"lr": 0.3}
    rules = GROUPS if model not in NORMLESS and optimizer != "Rprop" else [{}, *GROUPS[2:]]
    groups = draw(st.sampled_from([*rules, LATER] if strategy in ("single", "elastic") else rules))
    frozen = draw(st.sampled_from([(), ("stem.*",)])) if not groups else ()
    two_phases = not cut and draw(st.booleans())
    return Case(
        model=model,
        optimizer=optimizer,
        options=options,
        memory_format=draw(st.sampled_from(["contiguous", "channels_last"])),
        replicas=replicas,
        accumulate=accumulate,
        batch_size=batch_size,
        samples=2 * batch_size + rest,
        steps=2 + (not drop_last) + 2 * (groups is LATER),
        drop_last=drop_last,
        uneven=draw(st.booleans()),
        clip_norm=draw(st.sampled_from([None, 0.1, 100.0])),
        dtype=draw(st.sampled_from(["float32", "float32", "bfloat16", "float16"])) if optimizer in PLAIN else "float32",
        cosine=draw(st.booleans()),
        average=draw(st.sampled_from([None, (0.7, 1), (0.5, 2)])),
        parts=(("stem", "body"), ("head",)) if two_phases else (),
        groups=groups,
        frozen=frozen,
        statistics=draw(st.sampled_from(["freeze", "train"])),
        second={"lr": 0.5 * options["lr"]} if two_phases and draw(st.booleans()) else {},
        recomputed=() if cut else draw(st.sampled_from([(), ("body",), ("stem", "head")])),
        strategy=strategy,
        settings={"split": [CUTTABLE[model]]} if cut else {"find_unused_parameters": True} if strategy == "ddp" and two_phases else {},
        processes=1 if strategy == "single" else 3 if strategy == "elastic" and replicas == 3 else 2,
    )
