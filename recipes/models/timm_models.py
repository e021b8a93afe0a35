"""timm's image models (`pip install 'samewise[timm]'`) by name, without timm's own loading of
weights.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import partial
from typing import Any

from torch import nn

from samewise.runner.errors import ConfigError, Problem, nearest

_OF_WEIGHTS = re.compile("pretrained|checkpoint|cache_dir|hub|url")
_GIVEN = frozenset({"num_classes", "in_chans", "img_size"})
"""Arguments whose difference shows in the weights' shapes."""
_OTHER = frozenset(
    {"features_only", "feature_cfg", "out_indices", "scriptable", "exportable", "no_jit"}
)


def timm_model(
    name: str,
    *,
    num_classes: int,
    in_chans: int = 3,
    image_size: int | None = None,
    drop_rate: float = 0.0,
    drop_path_rate: float | None = None,
    settings: Mapping[str, Any] | None = None,
) -> nn.Module:
    """A model of timm (github.com/huggingface/pytorch-image-models): images float32[B, in_chans, H,
    W] to logits float32[B, num_classes].

    Nothing is read or downloaded, whatever the environment says: weights are `initialise.weights`.
    Attention is torch's fused one, also where the variable TIMM_FUSED_ATTN says another, since that
    changes bits.

    Args:
        name: Of `timm.list_models()`: "resnet18", "vit_base_patch16_224", ....
        num_classes: Outputs.
        in_chans: Channels of the images.
        image_size: Of the images, in pixels; only for models that are made for one size, such as
            ViTs.
        drop_rate: Dropout before the last layer.
        drop_path_rate: Stochastic depth; None: the model's own.
        settings: More arguments that the model takes, such as global_pool.

    Raises: ConfigError: timm is not installed, it has no such model, or an argument would have it
        load something.
    """
    try:
        import timm
        from timm.layers import set_fused_attn
    except ImportError:
        raise ConfigError(
            Problem(
                "",
                "needs the package timm, which is not installed",
                name,
                hint="pip install 'samewise[timm]'",
            )
        ) from None
    base, _, tag = name.partition(".")
    if not timm.is_model(base):
        raise ConfigError(
            Problem("name", "timm has no such model", name, hint=nearest(base, timm.list_models()))
        )
    if tag:
        hint = f"model.name={base} initialise.weights=hf:timm/{name}"
        raise ConfigError(
            Problem(
                "name",
                "includes a weights tag, but a model's name does not choose weights",
                name,
                f"the name of a model, such as {base}",
                hint,
            )
        )
    given = dict(settings or {})
    if wrong := next((key for key in given if _OF_WEIGHTS.search(key) or key in _OTHER), None):
        hint = "weights are given by initialise.weights" if _OF_WEIGHTS.search(wrong) else ""
        raise ConfigError(
            Problem(
                f"settings.{wrong}",
                "is not an argument that a config may set",
                given[wrong],
                hint=hint,
            )
        )
    if image_size is not None and timm.get_pretrained_cfg_value(base, "fixed_input_size"):
        given.setdefault("img_size", image_size)
    if drop_path_rate is not None:
        given["drop_path_rate"] = drop_path_rate
    set_fused_attn(enable=True)
    try:
        model = timm.create_model(
            base,
            pretrained=False,
            num_classes=num_classes,
            in_chans=in_chans,
            drop_rate=drop_rate,
            **given,
        )
    except TypeError as error:
        unknown = re.search(r"unexpected keyword argument '(\w+)'", str(error))
        if unknown is None or unknown[1] not in given:
            raise
        raise ConfigError(
            Problem(
                f"settings.{unknown[1]}",
                f"is not an argument of {base}",
                given[unknown[1]],
                hint="remove it",
            )
        ) from error
    model.checkpoint_problems = partial(
        _checkpoint_problems, base, {"global_pool": _pooling(model), **given}
    )
    return model


def _pooling(model: nn.Module) -> str | None:
    """How a model pools before its head, in timm's word; None if it does not say."""
    pool: Any = getattr(model, "global_pool", None) or getattr(
        getattr(model, "head", None), "global_pool", None
    )
    return pool if isinstance(pool, str) else getattr(pool, "pool_type", None)


def _checkpoint_problems(
    name: str, settings: Mapping[str, Any], config: Mapping[str, Any]
) -> list[Problem]:
    """The entries of a checkpoint's config.json that belong to another model, or with which timm
    makes one that computes something else.
    """
    there = str(config.get("architecture", name)).partition(".")[0]
    if there != name:
        return [
            Problem(
                "model.name", "differs from the checkpoint's", name, there, f"model.name={there}"
            )
        ]
    made_with: Any = config.get("model_args") or {}
    plain = {
        key: list(value) if isinstance(value, tuple) else value for key, value in settings.items()
    }
    return [
        Problem(
            f"model.settings.{key}",
            "differs from the checkpoint's",
            plain.get(key),
            f"{value}",
            f"+model.settings.{key}={value}",
        )
        for key, value in (made_with.items() if isinstance(made_with, dict) else ())
        if key not in _GIVEN and "drop" not in key and value is not None and plain.get(key) != value
    ]
