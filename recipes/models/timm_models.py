"""timm's image models by name, without timm's loading of weights (extra `timm`)."""

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
    """Create a model of timm: images float32[B, in_chans, H, W] to logits float32[B, num_classes].

    Source: https://github.com/huggingface/pytorch-image-models. Nothing is read or downloaded,
    whatever the environment says: `initialise.weights` names weights. Attention is always torch's
    fused one, even if the variable TIMM_FUSED_ATTN selects another, since that changes bits.

    Args:
        name: A name of `timm.list_models()`: "resnet18", "vit_base_patch16_224", ....
        num_classes: Number of outputs, one for each class.
        in_chans: Channels of the images.
        image_size: Height and width of the images in pixels, for models that are made for one size,
            such as ViTs.
        drop_rate: Dropout before the last layer.
        drop_path_rate: Stochastic depth; None: the model's own.
        settings: Further arguments of the model, such as global_pool.

    Returns:
        The model.

    Raises:
        ConfigError: timm is not installed or has no such model, or an argument would load
            something.
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
                hint="pip install '.[timm]' in samewise's folder",
            )
        ) from None
    # timm's names of weights are MODEL.TAG
    base, _, tag = name.partition(".")
    if not timm.is_model(base):
        raise ConfigError(
            Problem("name", "timm has no such model", name, hint=nearest(base, timm.list_models()))
        )
    ConfigError.raise_if(
        tag,
        "name",
        "includes a weights tag, but a model's name does not choose weights",
        name,
        f"the name of a model, such as {base}",
        f"model.name={base} initialise.weights=hf:timm/{name}",
    )
    options = dict(settings or {})
    if refused := next((key for key in options if _OF_WEIGHTS.search(key) or key in _OTHER), None):
        raise ConfigError(
            Problem(
                f"settings.{refused}",
                "is not an argument that a config may set",
                options[refused],
                hint="weights are given by initialise.weights"
                if _OF_WEIGHTS.search(refused)
                else "",
            )
        )
    # Only models that are made for one size take it
    if image_size is not None and timm.get_pretrained_cfg_value(base, "fixed_input_size"):
        options.setdefault("img_size", image_size)
    if drop_path_rate is not None:
        options["drop_path_rate"] = drop_path_rate
    # An environment variable selects the attention otherwise, which changes bits
    set_fused_attn(enable=True)
    try:
        model = timm.create_model(
            base,
            pretrained=False,
            num_classes=num_classes,
            in_chans=in_chans,
            drop_rate=drop_rate,
            **options,
        )
    # timm passes settings on to the model's class, which refuses unknown ones
    except TypeError as error:
        unknown = re.search(r"unexpected keyword argument '(\w+)'", str(error))
        if unknown is None or unknown[1] not in options:
            raise
        raise ConfigError(
            Problem(
                f"settings.{unknown[1]}",
                f"is not an argument of {base}",
                options[unknown[1]],
                hint="remove it",
            )
        ) from error
    model.checkpoint_problems = partial(
        _checkpoint_problems, base, {"global_pool": _pooling(model), **options}
    )
    return model


def _pooling(model: nn.Module) -> str | None:
    """Return how a model pools before its head, in timm's term; None if it does not say."""
    pool: Any = getattr(model, "global_pool", None) or getattr(
        getattr(model, "head", None), "global_pool", None
    )
    return pool if isinstance(pool, str) else getattr(pool, "pool_type", None)


def _checkpoint_problems(
    name: str, settings: Mapping[str, Any], config: Mapping[str, Any]
) -> list[Problem]:
    """Return the entries of a checkpoint's config.json that belong to another model.

    Entries with which timm computes something else from the same weights count too.
    """
    published = str(config.get("architecture", name)).partition(".")[0]
    if published != name:
        return [
            Problem(
                "model.name",
                "differs from the checkpoint's",
                name,
                published,
                f"model.name={published}",
            )
        ]
    arguments: Any = config.get("model_args") or {}
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
        for key, value in (arguments.items() if isinstance(arguments, dict) else ())
        if key not in _GIVEN and "drop" not in key and value is not None and plain.get(key) != value
    ]
