"""Loads weights, from a file or published, into a model, and reports every mismatch by name."""

import pickle
import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, Final, cast

import torch
from torch import Tensor, nn

from samewise.runner.errors import ConfigError, Problem, did_you_mean, first_line, nearest
from samewise.runner.optim.published import SOURCES, load_published
from samewise.runner.records import checkpoint, hugging_face
from samewise.runner.records.files import read_json, require_downloaded
from samewise.runner.records.folder import SHARDS
from samewise.runner.records.tensor_file import read_tensors

PATH: Final = "initialise.weights"
WRAPPERS: Final = ("model", "state_dict", "model_state_dict", "model_ema", "net", "network")
"""Keys under which training scripts, and samewise's checkpoints, keep the model."""
PREFIXES: Final = ("module.", "_orig_mod.", "model.")
"""Prefixes of all names from data parallelism, torch.compile and trainer classes."""
SHOWN: Final = 10


def load_weights(
    model: nn.Module,
    file: str | None,
    *,
    sha256: str | None = None,
    into: str | None = None,
    strict: bool,
    exclude: Sequence[str] | str = (),
    parametrise: Callable[[], object] = lambda: None,
    made_by: str = "",
) -> None:
    """Load a state_dict.

    Args:
        model: The model; changed in place.
        file: A file that torch.save wrote, a .safetensors file, a folder with a checkpoint of
            samewise or of Hugging Face's libraries, one of their cache (`hf:OWNER/NAME`), or
            published weights by name (`published`). None loads nothing.
        sha256: The file's SHA-256, or its beginning.
        into: Module of the model to load into (`backbone.body`); None for the model itself.
        strict: Whether names that only the file, or only the model, has are an error. Other shapes
            always are.
        exclude: Patterns of names that are not taken from the file, and that it may lack (`fc.*`).
        parametrise: Parametrises the model's weights; called before loading if the file's weights
            are parametrised, otherwise after.
        made_by: The model's `_target_`.

    Raises:
        ConfigError: The file does not exist, is not a state_dict, or does not fit.
    """
    if file is None:
        parametrise()
        return
    if file.startswith(SOURCES):
        state = load_published(file, made_by=made_by, sha256=sha256)
        _require_same_input(model)
    else:
        paths = _locate_files(file)
        _verify(paths, sha256)
        _require_same_model(model, paths[0].parent)
        state = {name: tensor for path in paths for name, tensor in _unwrap(_read(path)).items()}
    # The first checkpoints of BERT have TensorFlow's names
    state = {
        name.replace("LayerNorm.gamma", "LayerNorm.weight").replace(
            "LayerNorm.beta", "LayerNorm.bias"
        ): tensor
        for name, tensor in state.items()
    }
    target = _target(model, into)
    own_state = target.state_dict()
    state = _rename_parametrised(_fitting_prefix(state, own_state), own_state)
    is_parametrised = any("parametrizations." in name and name not in own_state for name in state)
    if is_parametrised:
        parametrise()
        own_state = target.state_dict()
    patterns = [exclude] if isinstance(exclude, str) else list(exclude)
    _require_same_kinds(state, own_state, patterns, file)
    state = _split_normed(state, target, own_state)
    _require_matches(patterns, {**own_state, **state})
    _load(
        target,
        {
            name: tensor
            for name, tensor in state.items()
            if not any(fnmatchcase(name, pattern) for pattern in patterns)
        },
        patterns,
        strict=strict,
    )
    if not is_parametrised:
        parametrise()


def _locate_files(file: str) -> list[Path]:
    if str(file).startswith(hugging_face.PREFIX):
        return hugging_face.files_at(hugging_face.snapshot(file))
    ConfigError.raise_if(
        "://" in str(file),
        PATH,
        "is not a local file",
        file,
        "a path",
        "download it first, and put its SHA-256 into initialise.sha256; published weights "
        f"have names: {', '.join(f'{x}NAME' for x in SOURCES)}",
    )
    path = Path(file).expanduser()
    ConfigError.raise_if(
        (path / "config.yaml").is_file() and (path / "checkpoints").is_dir(),
        PATH,
        "is a run's folder, not a file of weights",
        str(file),
        hint=f"the run's best checkpoint is run:{file}",
    )
    paths = hugging_face.files_at(path)
    # Reading a pipe would wait for a program that writes to it
    ConfigError.raise_if(
        paths[0].exists() and not paths[0].is_file(),
        PATH,
        "is a pipe or a device, not a file of weights",
        str(file),
    )
    if not paths[0].is_file():
        hint = (
            did_you_mean(str(path), map(str, path.parent.iterdir()))
            or f"samewise looked for it at {paths[0].absolute()}"
            if path.parent.is_dir()
            else f"the folder {path.parent} does not exist"
        )
        # A fingerprint is 64 hexadecimal digits; a folder's name may end in a number
        if re.fullmatch(r"[0-9a-f]{4,64}(-\d+)?", str(file)):
            hint = f"if it is the start of a run's fingerprint, write run:{file}"
        raise ConfigError(Problem(PATH, "the file does not exist", str(file), hint=hint))
    # Before a checksum is compared, which would say only that the file is another one
    for path in paths:
        require_downloaded(path)
    return paths


def _verify(paths: Sequence[Path], expected: str | None) -> None:
    digest = hugging_face.digest_of(paths)
    ConfigError.raise_if(
        expected is not None
        and (len(str(expected)) < 8 or not digest.startswith(str(expected).lower())),
        "initialise.sha256",
        f"does not match {paths[0] if len(paths) == 1 else paths[0].parent}",
        expected,
        digest,
        "the file is a different one, or was cut short",
    )


def _require_same_model(model: nn.Module, folder: Path) -> None:
    """Call the model's method `checkpoint_problems`, if it has one, with the weights' config.json.

    Hugging Face's libraries build the model from this file.
    """
    if check := getattr(model, "checkpoint_problems", None):
        ConfigError.raise_all(check(read_json(folder / "config.json", {str: object}) or {}))


def _read(path: Path) -> Any:
    # The tensors of a sharded checkpoint are in other files
    if (path.parent / SHARDS).is_dir():
        return checkpoint.load(path.parent)
    if path.suffix == ".safetensors":
        return _read_safetensors(path)
    try:
        return checkpoint.load_tensors(path)
    except pickle.UnpicklingError as error:
        raise ConfigError(
            Problem(
                PATH,
                f"was not loaded: {error}",
                str(path),
                "a state_dict",
                "save a state_dict: torch.save(model.state_dict(), FILE)",
            )
        ) from None
    except Exception as error:
        raise ConfigError(
            Problem(
                PATH,
                f"cannot be read: {first_line(error)}"
                if isinstance(error, OSError | RuntimeError)
                else "is not a file of weights",
                str(path),
                "a state_dict written by torch.save, or a .safetensors file",
            )
        ) from None


def _read_safetensors(path: Path) -> dict[str, Tensor]:
    try:
        return read_tensors(path)
    except ValueError as error:
        raise ConfigError(
            Problem(PATH, f"cannot be read: {error}", str(path), "a complete .safetensors file")
        ) from None


def _unwrap(content: Any) -> dict[str, Tensor]:
    """Return the state_dict in a file's content."""
    while isinstance(content, Mapping) and not any(
        isinstance(value, Tensor) for value in cast("Mapping[Any, Any]", content).values()
    ):
        inner = next((key for key in WRAPPERS if isinstance(content.get(key), Mapping)), None)  # pyright: ignore[reportUnknownMemberType]
        if inner is None:
            break
        content = content[inner]  # pyright: ignore[reportUnknownVariableType]
    ConfigError.raise_if(
        not isinstance(content, Mapping) or not content,
        PATH,
        "is not a state_dict",
        type(content).__name__,
        "a mapping from names to tensors",
    )
    entries = {str(name): value for name, value in cast("Mapping[Any, Any]", content).items()}
    # torch.optim.swa_utils.AveragedModel adds this count.
    entries.pop("n_averaged", None)
    for name, value in entries.items():
        ConfigError.raise_if(
            not isinstance(value, Tensor) and not name.endswith("_extra_state"),
            PATH,
            f"is not a state_dict: '{name}' is not a tensor",
            type(value).__name__,
            "a mapping from names to tensors, at the top level or under one of: "
            f"{', '.join(WRAPPERS)}",
        )
    return entries


def _fitting_prefix(state: dict[str, Tensor], own_state: Mapping[str, Any]) -> dict[str, Tensor]:
    """Remove the prefix that a wrapper has added to all names, unless the model has it too."""
    # Twice, since wrappers may be around each other in any order
    for prefix in (*PREFIXES, *PREFIXES):
        if all(name.startswith(prefix) for name in state) and not any(
            name.startswith(prefix) for name in own_state
        ):
            state = {name.removeprefix(prefix): tensor for name, tensor in state.items()}
    return state


def _rename_parametrised(
    state: dict[str, Tensor], own_state: Mapping[str, Any]
) -> dict[str, Tensor]:
    """Rename weight norm's tensors in a file older than torch 2.1."""
    new_names = {
        f"{module}.{old}": f"{module}.parametrizations.weight.original{number}"
        for number, old in enumerate(("weight_g", "weight_v"))
        for module in (
            name.removesuffix(".parametrizations.weight.original0") for name in own_state
        )
    }
    return {
        new_names[name]
        if name not in own_state and new_names.get(name) in own_state
        else name: tensor
        for name, tensor in state.items()
    }


def _split_normed(
    state: dict[str, Tensor], target: nn.Module, own_state: Mapping[str, Any]
) -> dict[str, Tensor]:
    """Split plain weights, as exports have them, into the two tensors of a model's weight norm."""
    split = dict(state)
    for parametrisation in [
        name.removesuffix(".original0") for name in own_state if name.endswith(".original0")
    ]:
        plain, parts = (
            _plain_name(f"{parametrisation}.original0"),
            [f"{parametrisation}.original0", f"{parametrisation}.original1"],
        )
        if (
            plain in state
            and parts[0] not in state
            and own_state[parts[1]].shape == state[plain].shape
        ):
            norm: Any = target.get_submodule(f"{parametrisation}.0")
            split |= dict(zip(parts, norm.right_inverse(split.pop(plain)), strict=True))
    return split


def _plain_name(name: str) -> str:
    """Return the name of the weight that a parametrisation's tensor is part of.

    `fc.weight` for `fc.parametrizations.weight.original0`.
    """
    return re.sub(r"(^|\.)parametrizations\.([^.]+)\..*", r"\1\2", name)


def _require_same_input(model: nn.Module) -> None:
    """Refuse Inception and GoogLeNet without the rescaling of images that their weights need."""
    ConfigError.raise_if(
        getattr(model, "transform_input", None) is False,
        "model.transform_input",
        "must be true for published weights, which were trained on images in another range",
        False,
        hint="model.transform_input=true, with images normalised as transforms=imagenet does",
    )


def _target(model: nn.Module, into: str | None) -> nn.Module:
    if not into:
        return model
    modules = dict(model.named_modules())
    ConfigError.raise_if(
        into not in modules,
        "initialise.into",
        "is not a module of the model",
        into,
        hint=nearest(into, modules),
    )
    return modules[into]


def _require_same_kinds(
    state: Mapping[str, Any], own_state: Mapping[str, Any], patterns: Sequence[str], file: str
) -> None:
    """Refuse tensors that torch would copy into the model's with other values, or not at all."""
    targets = {**{_plain_name(name): tensor for name, tensor in own_state.items()}, **own_state}
    misfits = [
        name
        for name, tensor in state.items()
        if isinstance(targets.get(name), Tensor)
        and not _is_same_kind(tensor, targets[name])
        and not any(fnmatchcase(name, pattern) for pattern in patterns)
    ]
    if misfits:
        rest = f", and {len(misfits) - 1} more are of another kind" if len(misfits) > 1 else ""
        raise ConfigError(
            Problem(
                f"{PATH}={file}",
                f"'{misfits[0]}' is {_kind(state[misfits[0]])}{rest}",
                expected=f"{_kind(targets[misfits[0]])}; other floating-point types are converted",
            )
        )


def _is_same_kind(tensor: Tensor, target: Tensor) -> bool:
    if tensor.layout != torch.strided or tensor.is_quantized or tensor.is_meta:
        return False
    if target.is_floating_point() or target.is_complex():
        return (tensor.is_floating_point(), tensor.is_complex()) == (
            target.is_floating_point(),
            target.is_complex(),
        )
    # An average of weights may keep the count of batches as a whole float
    return bool((tensor.to(target.dtype) == tensor).all())


def _kind(tensor: Tensor) -> str:
    kind = str(tensor.dtype).removeprefix("torch.")
    if tensor.layout != torch.strided:
        kind = f"{kind} and {str(tensor.layout).removeprefix('torch.')}"
    return f"{kind} without values (device meta)" if tensor.is_meta else kind


def _require_matches(patterns: Sequence[str], state: Mapping[str, Tensor]) -> None:
    parts = [f"{part}.*" for part in dict.fromkeys(name.partition(".")[0] for name in state)]
    # The first and the last parts, as the head is the last.
    example = f"such as {', '.join([*parts[:4], *parts[4:][-4:]])}"
    folders = {
        f"{name[:place]}.*" for name in state for place in range(len(name)) if name[place] == "."
    }
    ConfigError.raise_all(
        Problem(
            "initialise.exclude",
            "matches nothing in the file or in the model",
            pattern,
            example,
            did_you_mean(pattern, folders | set(state)) or example,
        )
        for pattern in patterns
        if not any(fnmatchcase(name, pattern) for name in state)
    )


def _load(
    target: nn.Module, state: Mapping[str, Tensor], patterns: Sequence[str], *, strict: bool
) -> None:
    own_state: dict[str, Any] = target.state_dict()
    common = [name for name in state if name in own_state]
    tied_names = _tied_names(target)
    # Files older than torch 0.4.1 lack the count of batches, which torch adds. Frozen batch norm
    # does not need it.
    missing = [
        name
        for name in own_state
        if not tied_names.get(name, {name}) & state.keys()
        and not name.endswith("num_batches_tracked")
    ]
    unexpected = [
        name for name in state if name not in own_state and not name.endswith("num_batches_tracked")
    ]
    problems = [*_shape_problems(state, own_state), *_tied_problems(tied_names, state)]
    merged = {
        name: _plain_name(name)
        for name in unexpected
        if _plain_name(name) != name and _plain_name(name) in missing
    }
    if strict or not common:
        problems += _parametrised_problems(merged)
    if strict:
        missing = [
            name
            for name in missing
            if name not in merged.values()
            and not any(
                fnmatchcase(tied_name, pattern)
                for tied_name in tied_names.get(name, {name})
                for pattern in patterns
            )
        ]
        unexpected = [name for name in unexpected if name not in merged]
        problems += [
            Problem(
                PATH, f"the model's '{name}' is not in the file", hint=nearest(name, unexpected)
            )
            for name in missing
        ] + _unused_problems(unexpected, missing, own_state)
    if not common and not merged:
        problems = [
            Problem(
                PATH,
                "has no name in common with the model",
                sorted(state)[:3],
                f"such as {', '.join(list(own_state)[:3])}",
            )
        ]
    if len(problems) > SHOWN:
        problems[SHOWN:] = [
            Problem(
                PATH,
                f"and {len(problems) - SHOWN} more",
                hint="initialise.strict=false loads what fits by name",
            )
        ]
    ConfigError.raise_all(problems)
    # The model's own state_dict keeps the version of each module, which torchvision's MNASNet
    # needs.
    own_state.update((name, state[name]) for name in common)
    target.load_state_dict(own_state, strict=False)


def _shape_problems(state: Mapping[str, Tensor], own_state: Mapping[str, Any]) -> list[Problem]:
    shapes = {name: x.shape for name, x in own_state.items() if isinstance(x, Tensor)}
    return [
        Problem(
            PATH,
            f"the shape of '{name}' differs",
            list(tensor.shape),
            str(list(shapes[name])),
            _exclude_hint(name),
        )
        for name, tensor in state.items()
        if name in shapes and tensor.shape != shapes[name]
    ]


def _tied_names(target: nn.Module) -> dict[str, set[str]]:
    """Return all names of each tensor that has several, by each of them."""
    by_tensor = dict[int, set[str]]()
    # With `keep_vars`, a tied tensor is one object under all of its names
    for name, tensor in target.state_dict(keep_vars=True).items():
        by_tensor.setdefault(id(tensor), set()).add(name)
    return {name: names for names in by_tensor.values() if len(names) > 1 for name in names}


def _tied_problems(
    tied_names: Mapping[str, set[str]], state: Mapping[str, Tensor]
) -> list[Problem]:
    """Describe tensors with several names for which the file has several values."""
    problems = list[Problem]()
    for names in sorted({tuple(sorted(names)) for names in tied_names.values()}):
        first_name, *other_names = [name for name in names if name in state] or [""]
        values = [state[name].to(state[first_name].dtype) for name in other_names]
        if not all(state[first_name].equal(value) for value in values):
            problems.append(
                Problem(
                    PATH,
                    f"the model ties {' and '.join(names)} to one tensor, and the file has several "
                    "values for it",
                    hint=f"leave out all but one: initialise.exclude={other_names}",
                )
            )
    return problems


def _unused_problems(
    unexpected: Sequence[str], missing: Sequence[str], own_state: Mapping[str, Any]
) -> list[Problem]:
    """Describe the names that only the file has.

    A whole part that the model lacks, such as Inception's auxiliary output, is one problem.
    """
    parts = {name.partition(".")[0] for name in own_state}
    foreign = Counter(
        part
        for name in unexpected
        if (part := name.partition(".")[0]) != name
        and part not in parts
        and not did_you_mean(name, missing)
    )
    several = {part: count for part, count in foreign.items() if count > 1}
    problems = [
        Problem(
            PATH,
            f"the file's '{part}.*' is not in the model: {count} names",
            hint=f"leave it out: initialise.exclude=[{part}.*]",
        )
        for part, count in several.items()
    ]
    return problems + [
        Problem(PATH, f"the file's '{name}' is not in the model", hint=nearest(name, missing))
        for name in [name for name in unexpected if name.partition(".")[0] not in several]
    ]


def _parametrised_problems(merged: Mapping[str, str]) -> list[Problem]:
    """Describe a file with tensors from which the model's plain weights are computed."""
    if not merged:
        return []
    tensor_name, plain = next(iter(merged.items()))
    rest = f" and {count - 1} more" if (count := len(set(merged.values()))) > 1 else ""
    message = (
        "the file is parametrised (LoRA, weight norm or another), and the model is not: it "
        f"has no '{plain}'{rest}, but what it is computed from"
    )
    return [
        Problem(
            PATH,
            message,
            tensor_name,
            plain,
            "`samewise export RUN --to safetensors --out F` merges them: use "
            "F/weights.safetensors; or set initialise.parametrisations as in the run of the file",
        )
    ]


def _exclude_hint(name: str) -> str:
    module = name.rpartition(".")[0]
    return (
        f"leave it out, and keep it as initialised: initialise.exclude=[{module}.*]"
        if module
        else f"leave it out: initialise.exclude=['{name}']"
    )
