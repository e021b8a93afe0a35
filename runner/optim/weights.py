"""Loads weights from a file, or published ones, into a model, and reports every mismatch by name."""

from __future__ import annotations

import pickle
import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, Final, cast

from torch import Tensor, nn

from samewise.runner.errors import ConfigError, Problem, did_you_mean, first_line, nearest
from samewise.runner.optim.published import SOURCES, load_published
from samewise.runner.records import checkpoint, hugging_face
from samewise.runner.records.files import read_json
from samewise.runner.records.folder import SHARDS
from samewise.runner.records.tensor_file import read_tensors

PATH: Final = "initialise.weights"
WRAPPERS: Final = ("model", "state_dict", "model_state_dict", "model_ema", "net", "network")
"""Where training scripts, and samewise's own checkpoints, keep the model among other things."""
PREFIXES: Final = ("module.", "_orig_mod.", "model.")
"""What data parallelism, torch.compile and trainer classes put before every name."""
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

    ConfigError if the file does not exist, is not a state_dict, or does not fit.

    Args:
        model: Changed in place.
        file: A file that torch.save wrote, a .safetensors file, a folder with a checkpoint of
            samewise or of Hugging Face's libraries, one of their cache (`hf:OWNER/NAME`), or
            published weights by name (`published`); None: nothing is loaded.
        sha256: What the file's must be, or begin with.
        into: A module of the model to load into (`backbone.body`); None: the model itself.
        strict: Whether names that only the file, or only the model, has are an error. Shapes that
            differ always are.
        exclude: Patterns of names that are not taken from the file, and that it may lack (`fc.*`).
            Of a tensor with several names either all or none, unless the file has several values
            for it.
        parametrise: Parametrises the model's weights; called before loading if the file's are
            parametrised, otherwise after.
        made_by: The `_target_` of the model.
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
    target = _target(model, into)
    held = target.state_dict()
    state = _split_normed(_rename_parametrised(_fitting_prefix(state, held), held), target, held)
    parametrised = any("parametrizations." in name and name not in held for name in state)
    if parametrised:
        parametrise()
    patterns = [exclude] if isinstance(exclude, str) else list(exclude)
    _require_matches(patterns, {**held, **state})
    kept = {
        name: tensor
        for name, tensor in state.items()
        if not any(fnmatchcase(name, pattern) for pattern in patterns)
    }
    _require_none_by_another_name(target, state, kept, patterns)
    _load(target, kept, patterns, strict=strict)
    if not parametrised:
        parametrise()


def _locate_files(file: str) -> list[Path]:
    if str(file).startswith(hugging_face.PREFIX):
        return hugging_face.files_at(hugging_face.snapshot(file))
    if "://" in str(file):
        hint = (
            "download it first, and put its SHA-256 into initialise.sha256; published weights "
            f"have names: {', '.join(f'{one}NAME' for one in SOURCES)}"
        )
        raise ConfigError(Problem(PATH, "is not a local file", file, "a path", hint))
    path = Path(file).expanduser()
    if (path / "config.yaml").is_file() and (path / "checkpoints").is_dir():
        raise ConfigError(
            Problem(
                PATH,
                "is a run's folder, not a file of weights",
                str(file),
                hint=f"the run's best checkpoint is run:{file}",
            )
        )
    paths = hugging_face.files_at(path)
    if paths[0].exists() and not paths[0].is_file():
        raise ConfigError(Problem(PATH, "is a pipe or a device, not a file of weights", str(file)))
    if not paths[0].is_file():
        hint = (
            did_you_mean(str(path), map(str, path.parent.iterdir()))
            or f"samewise looked for it at {paths[0].absolute()}"
            if path.parent.is_dir()
            else f"the folder {path.parent} does not exist"
        )
        if re.fullmatch(r"[0-9a-f]{4,64}(-\d+)?", str(file)):
            hint = f"if it is the start of a run's fingerprint, write run:{file}"
        raise ConfigError(Problem(PATH, "the file does not exist", str(file), hint=hint))
    return paths


def _verify(paths: Sequence[Path], expected: str | None) -> None:
    digest = hugging_face.digest_of(paths)
    if expected is not None and (
        len(str(expected)) < 8 or not digest.startswith(str(expected).lower())
    ):
        where = paths[0] if len(paths) == 1 else paths[0].parent
        raise ConfigError(
            Problem(
                "initialise.sha256",
                f"does not match {where}",
                expected,
                digest,
                "the file is a different one, or was cut short",
            )
        )


def _require_same_model(model: nn.Module, folder: Path) -> None:
    """If the model has a method `checkpoint_problems`, call it with the config.json beside the
    weights, from which Hugging Face builds the model.
    """
    ask = getattr(model, "checkpoint_problems", None)
    if ask is not None and (
        problems := ask(read_json(folder / "config.json", {str: object}) or {})
    ):
        raise ConfigError(*problems)


def _read(path: Path) -> Any:
    if (path.parent / SHARDS).is_dir():
        return checkpoint.load(path.parent)
    if path.suffix == ".safetensors":
        return _read_safetensors(path)
    try:
        return checkpoint.load_tensors(path)
    except pickle.UnpicklingError as error:
        hint = "save a state_dict: torch.save(model.state_dict(), FILE)"
        raise ConfigError(
            Problem(
                PATH,
                f"contains more than tensors and plain values, or is damaged: {error}",
                str(path),
                "a state_dict",
                hint,
            )
        ) from None
    except Exception as error:
        words = (
            f"cannot be read: {first_line(error)}"
            if isinstance(error, OSError | RuntimeError)
            else "is not a file of weights"
        )
        raise ConfigError(
            Problem(
                PATH, words, str(path), "a state_dict written by torch.save, or a .safetensors file"
            )
        ) from None


def _read_safetensors(path: Path) -> dict[str, Tensor]:
    try:
        return read_tensors(path)
    except ValueError as error:
        raise ConfigError(
            Problem(PATH, f"cannot be read: {error}", str(path), "a complete .safetensors file")
        ) from None


def _unwrap(found: Any) -> dict[str, Tensor]:
    """The state_dict in a file's content."""
    while isinstance(found, Mapping) and not any(
        isinstance(value, Tensor) for value in cast("Mapping[Any, Any]", found).values()
    ):
        inner = next((key for key in WRAPPERS if isinstance(found.get(key), Mapping)), None)  # pyright: ignore[reportUnknownMemberType]
        if inner is None:
            break
        found = found[inner]  # pyright: ignore[reportUnknownVariableType]
    if not isinstance(found, Mapping) or not found:
        raise ConfigError(
            Problem(
                PATH, "is not a state_dict", type(found).__name__, "a mapping from names to tensors"
            )
        )  # pyright: ignore[reportUnknownArgumentType]
    entries = {str(name): value for name, value in cast("Mapping[Any, Any]", found).items()}
    entries.pop("n_averaged", None)  # torch.optim.swa_utils.AveragedModel's own
    wrong = [
        name
        for name, value in entries.items()
        if not isinstance(value, Tensor) and not name.endswith("_extra_state")
    ]
    if wrong:
        expected = (
            "a mapping from names to tensors, at the top level or under one of: "
            + ", ".join(WRAPPERS)
        )
        raise ConfigError(
            Problem(
                PATH,
                f"is not a state_dict: '{wrong[0]}' is not a tensor",
                type(entries[wrong[0]]).__name__,
                expected,
            )
        )
    return entries


def _fitting_prefix(state: dict[str, Tensor], held: Mapping[str, Any]) -> dict[str, Tensor]:
    """The names without the prefix that a wrapper has added to all of them, unless the model has it
    too.
    """
    for prefix in (*PREFIXES, *PREFIXES):
        if all(name.startswith(prefix) for name in state) and not any(
            name.startswith(prefix) for name in held
        ):
            state = {name.removeprefix(prefix): tensor for name, tensor in state.items()}
    return state


def _rename_parametrised(state: dict[str, Tensor], held: Mapping[str, Any]) -> dict[str, Tensor]:
    """The names that weight norm uses since torch 2.1, for a model that has them and an older file."""
    new = {
        f"{module}.{old}": f"{module}.parametrizations.weight.original{number}"
        for number, old in enumerate(("weight_g", "weight_v"))
        for module in (name.removesuffix(".parametrizations.weight.original0") for name in held)
    }
    return {
        new[name] if name not in held and new.get(name) in held else name: tensor
        for name, tensor in state.items()
    }


def _split_normed(
    state: dict[str, Tensor], target: nn.Module, held: Mapping[str, Any]
) -> dict[str, Tensor]:
    """The two tensors of weight norm, for a model that has them and a file with the weight itself,
    as exports have it.
    """
    split = dict(state)
    for place in [name.removesuffix(".original0") for name in held if name.endswith(".original0")]:
        plain, parts = (
            _plain_name(f"{place}.original0"),
            [f"{place}.original0", f"{place}.original1"],
        )
        if plain in state and parts[0] not in state and held[parts[1]].shape == state[plain].shape:
            norm: Any = target.get_submodule(f"{place}.0")
            split |= dict(zip(parts, norm.right_inverse(split.pop(plain)), strict=True))
    return split


def _plain_name(name: str) -> str:
    """The name of the weight that a parametrisation's tensor is part of: `fc.weight` for
    `fc.parametrizations.weight.original0`.
    """
    return re.sub(r"(^|\.)parametrizations\.([^.]+)\..*", r"\1\2", name)


def _require_same_input(model: nn.Module) -> None:
    """Refuse a model that does not rescale images if the weights were trained with it:
    torchvision's Inception and GoogLeNet.
    """
    if getattr(model, "transform_input", None) is False:
        hint = "model.transform_input=true, with images normalised as transforms=imagenet does"
        words = "must be true for published weights, which were trained on images in another range"
        raise ConfigError(Problem("model.transform_input", words, False, hint=hint))


def _target(model: nn.Module, into: str | None) -> nn.Module:
    if not into:
        return model
    modules = dict(model.named_modules())
    if into not in modules:
        raise ConfigError(
            Problem(
                "initialise.into", "is not a module of the model", into, hint=nearest(into, modules)
            )
        )
    return modules[into]


def _require_matches(patterns: Sequence[str], state: Mapping[str, Tensor]) -> None:
    idle = [
        pattern for pattern in patterns if not any(fnmatchcase(name, pattern) for name in state)
    ]
    if idle:
        parts = [f"{part}.*" for part in dict.fromkeys(name.partition(".")[0] for name in state)]
        folders = {
            f"{name[:place]}.*"
            for name in state
            for place in range(len(name))
            if name[place] == "."
        }
        # The head is the last of them
        words, such_as = (
            "matches nothing in the file or in the model",
            f"such as {', '.join([*parts[:4], *parts[4:][-4:]])}",
        )
        raise ConfigError(
            *(
                Problem(
                    "initialise.exclude",
                    words,
                    one,
                    such_as,
                    did_you_mean(one, folders | set(state)) or such_as,
                )
                for one in idle
            )
        )


def _require_none_by_another_name(
    target: nn.Module,
    state: Mapping[str, Tensor],
    kept: Mapping[str, Tensor],
    patterns: Sequence[str],
) -> None:
    """Raise a ConfigError if a tensor is excluded by one of its names and loaded by another, unless
    that chooses among the file's values for it.
    """
    problems = list[Problem]()
    for names in sorted({tuple(sorted(names)) for names in _tied_names(target).values()}):
        loaded, excluded = (
            [name for name in names if name in kept],
            [name for name in names if any(fnmatchcase(name, pattern) for pattern in patterns)],
        )
        if (
            loaded
            and excluded
            and all(
                state[name].equal(state[loaded[0]].to(state[name].dtype))
                for name in excluded
                if name in state
            )
        ):
            words = (
                f"leaves out {excluded[0]}, but the model ties it to {loaded[0]}, which would "
                "be loaded"
            )
            problems.append(
                Problem(
                    "initialise.exclude",
                    words,
                    hint=f"leave out {' and '.join(names)}, or none of them",
                )
            )
    if problems:
        raise ConfigError(*problems)


def _load(
    target: nn.Module, state: Mapping[str, Tensor], patterns: Sequence[str], *, strict: bool
) -> None:
    held: dict[str, Any] = target.state_dict()
    common = [name for name in state if name in held]
    twins = _tied_names(target)
    # files older than torch 0.4.1 lack the count of batches, which torch adds; frozen batch norm
    # does not need it
    missing = [
        name
        for name in held
        if not twins.get(name, {name}) & state.keys() and not name.endswith("num_batches_tracked")
    ]
    unexpected = [
        name for name in state if name not in held and not name.endswith("num_batches_tracked")
    ]
    problems = [
        Problem(
            PATH,
            f"the shape of '{name}' differs",
            list(state[name].shape),
            str(list(held[name].shape)),
            _exclude_hint(name),
        )
        for name in common
        if isinstance(held[name], Tensor) and state[name].shape != held[name].shape
    ]
    for names in sorted({tuple(sorted(names)) for names in twins.values()}):
        first, *others = [name for name in names if name in state] or [""]
        if any(not state[first].equal(state[other].to(state[first].dtype)) for other in others):
            words = (
                f"the model ties {' and '.join(names)} to one tensor, and the file has several "
                "values for it"
            )
            problems.append(
                Problem(PATH, words, hint=f"leave out all but one: initialise.exclude={others}")
            )
    merged = {
        name: _plain_name(name)
        for name in unexpected
        if _plain_name(name) != name and _plain_name(name) in missing
    }
    if strict or not common:
        problems += _parametrised_problems(merged)
    if strict:
        missing, unexpected = (
            [name for name in missing if name not in merged.values()],
            [name for name in unexpected if name not in merged],
        )
        wanted = [
            name
            for name in missing
            if not any(
                fnmatchcase(each, pattern)
                for each in twins.get(name, {name})
                for pattern in patterns
            )
        ]
        problems += [
            Problem(
                PATH, f"the model's '{name}' is not in the file", hint=nearest(name, unexpected)
            )
            for name in wanted
        ]
        problems += _unused_problems(unexpected, missing, held)
    if not common and not merged:
        problems = [
            Problem(
                PATH,
                "has no name in common with the model",
                sorted(state)[:3],
                f"such as {', '.join(list(held)[:3])}",
            )
        ]
    if problems:
        more = (
            [
                Problem(
                    PATH,
                    f"and {len(problems) - SHOWN} more",
                    hint="initialise.strict=false loads what fits by name",
                )
            ]
            if len(problems) > SHOWN
            else []
        )
        raise ConfigError(*problems[:SHOWN], *more)
    # Keeps the version of each module's state, which torchvision's MNASNet needs
    held.update((name, state[name]) for name in common)
    target.load_state_dict(held, strict=False)


def _tied_names(target: nn.Module) -> dict[str, set[str]]:
    """For each name of a tensor that has several, all of them."""
    by_tensor = dict[int, set[str]]()
    for name, tensor in target.state_dict(keep_vars=True).items():
        by_tensor.setdefault(id(tensor), set()).add(name)
    return {name: names for names in by_tensor.values() if len(names) > 1 for name in names}


def _unused_problems(
    unexpected: Sequence[str], missing: Sequence[str], held: Mapping[str, Any]
) -> list[Problem]:
    """Problems for names that only the file has.

    One for a whole part that the model lacks, such as Inception's auxiliary output.
    """
    parts = {name.partition(".")[0] for name in held}
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
    others = [name for name in unexpected if name.partition(".")[0] not in several]
    return problems + [
        Problem(PATH, f"the file's '{name}' is not in the model", hint=nearest(name, missing))
        for name in others
    ]


def _parametrised_problems(merged: Mapping[str, str]) -> list[Problem]:
    """A problem if the file has tensors from which the model's plain weights are computed."""
    if not merged:
        return []
    first, plain = next(iter(merged.items()))
    others = f" and {count - 1} more" if (count := len(set(merged.values()))) > 1 else ""
    words = (
        "the file is parametrised (LoRA, weight norm or another), and the model is not: it "
        f"has no '{plain}'{others}, but what it is computed from"
    )
    hint = (
        "`samewise export RUN --to safetensors --out F` merges them: use "
        "F/weights.safetensors; or set initialise.parametrisations as in the run of the file"
    )
    return [Problem(PATH, words, first, plain, hint)]


def _exclude_hint(name: str) -> str:
    module = name.rpartition(".")[0]
    return (
        f"leave it out, and keep it as initialised: initialise.exclude=[{module}.*]"
        if module
        else f"leave it out: initialise.exclude=['{name}']"
    )
