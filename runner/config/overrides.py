"""Explains errors in overrides and config files, all at once.

`compose` calls this if Hydra raises an error.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from difflib import get_close_matches
from pathlib import Path
from shlex import quote
from typing import Any

import yaml
from hydra.core.override_parser.types import Override
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import (
    InterpolationToMissingValueError,
    MissingMandatoryValue,
    OmegaConfBaseException,
    ValidationError,
)

from samewise.runner.config.annotations import expected_type, is_typed
from samewise.runner.config.file_faults import NO_SUCH_CHOICE, problem_in_file
from samewise.runner.config.loader import apply
from samewise.runner.config.override_text import read_overrides, several_choices
from samewise.runner.config.tree import leaves, list_above, paths
from samewise.runner.errors import Problem, did_you_mean, first_line, same_words

Load = Callable[[Sequence[str]], DictConfig]
Groups = Mapping[str, Sequence[str]]

_MEANT = {
    "gpu": "device=cuda",
    "device=gpu": "device=cuda",
    "amp": "precision=bf16",
    "precision=amp": "precision=bf16 or precision=fp16",
    "precision=16": "precision=bf16 or precision=fp16",
    "precision=16-mixed": "precision=fp16",
    "precision=half": "precision=fp16",
    "precision=mixed": "precision=bf16 or precision=fp16",
    "precision=32": "precision=fp32",
    "mixed_precision": "precision=bf16 or precision=fp16",
    "device=0": "device=cuda",
    "device=mps": "device=auto, which chooses cuda if available, otherwise cpu",
    "bs": "batch_size",
    "debug=True": "debug=tiny",
    "scheduler=none": "scheduler=constant",
    "scheduler=CosineAnnealingLR": "scheduler=cosine",
    "scheduler=ReduceLROnPlateau": "scheduler=plateau",
    "scheduler=reduce_on_plateau": "scheduler=plateau",
    "warmup": "scheduler=warmup_cosine scheduler.schedules.warmup.duration=EPOCHS",
    "grad_clip": "clip_norm",
    "clip_grad": "clip_norm",
    "max_grad_norm": "clip_norm",
    "gradient_clip_val": "clip_norm",
    "patience": "callbacks=[default,early_stopping] callbacks.early_stopping.patience=NUMBER",
    "early_stop": "callbacks=[default,early_stopping]",
    "save_every": "checkpoint.every_epochs or checkpoint.every_steps",
    "output_dir": "run_root",
    "save_dir": "run_root",
    "log_dir": "run_root",
    "logdir": "run_root",
    "wandb": "tracking=wandb",
    "tensorboard": "tracking=tensorboard",
    "strategy=DataParallel": "strategy=ddp",
    "strategy=dp": "strategy=ddp",
    "compile=True": "compile=default",
    "compile=False": "compile=off",
    "learning_rate": "optimizer.lr",
    "wd": "optimizer.weight_decay",
    "gpus": "strategy=ddp strategy.nproc=NUMBER",
    "nproc": "strategy=ddp strategy.nproc=NUMBER",
    "world_size": "strategy=ddp strategy.nproc=NUMBER",
    "devices": "strategy=ddp strategy.nproc=NUMBER",
    "tracking=False": "tracking=none",
    "loss=ce": "loss=cross_entropy",
    "loss=nll": "loss=cross_entropy",
    "loss=mae": "loss=l1",
    "class_weights": "loss=cross_entropy recipe.loss.weight=[NUMBER,NUMBER,...]",
    "param_groups=freeze": "param_groups=head_only",
    "freeze": "initialise.frozen",
    "pretrained": "initialise.weights=torchvision:IMAGENET1K_V1, for a model of torchvision",
}
"""What other tools call what has another name here: a key, or a key with its value."""

_NEEDLESS = {
    "metrics=acc": "leave it out: accuracy is computed without being asked for",
    "augment": "transforms=CHOICE says how samples are changed: `samewise list transforms`",
    "test": "leave it out: `samewise eval RUN --split test` measures a trained run",
    "metrics=accuracy": "leave it out: accuracy is computed without being asked for",
    "resume": "run the same command again: it resumes where the run was stopped",
}


FAILURES = (
    HydraException,
    OmegaConfBaseException,
    yaml.YAMLError,
    ValueError,
    TypeError,
    AssertionError,
    OSError,
)
"""What Hydra and OmegaConf raise over a wrong override or file."""


def diagnose(
    overrides: Sequence[str], *, load: Load, groups: Groups
) -> tuple[DictConfig | None, list[str], list[Problem]]:
    """Find every wrong override by trying them one at a time.

    Returns the config composed with the valid overrides (None if a file is faulty even without
    any), those overrides, and the problems.
    """
    read_well, problems = read_overrides(overrides)
    # Choices come before values, which may be keys of what is chosen
    of_groups = [
        override
        for override in read_well
        if override.key_or_group in groups and not isinstance(override.value(), dict)
    ]
    of_values = [override for override in read_well if override not in of_groups]
    chosen, unknown = list[str](), set[str]()
    for override in of_groups:
        problem = _wrong_choice(override, groups)
        if problem is None:
            chosen.append(str(override.input_line))
        else:
            problems.append(problem)
            unknown.add(override.key_or_group.partition("/")[0])

    cfg, good, refused = _compose_most(chosen, load)
    problems += refused
    if cfg is None:
        return None, [], problems
    for override in of_values:
        problem = try_override(override, cfg, groups)
        if problem is None:
            good.append(str(override.input_line))
        elif (
            override.key_or_group.partition(".")[0] not in unknown
        ):  # otherwise it may be a key of the choice that was meant
            problems.append(problem)
    return cfg, good, problems


def unresolvable(cfg: DictConfig) -> list[Problem]:
    """A problem for every interpolation that leads nowhere.

    If it leads to a missing value, that value is reported instead.
    """
    problems, lacking = list[Problem](), dict[str, list[tuple[str, str]]]()
    for path, raw, node in leaves(cfg):
        if not isinstance(raw, str) or "${" not in raw:
            continue
        try:
            _ = node()
        except (InterpolationToMissingValueError, MissingMandatoryValue):
            continue
        except OmegaConfBaseException as error:
            if variable := re.search(r"Environment variable '([^']+)' not found", str(error)):
                problems.append(
                    Problem(
                        path,
                        f"refers to an environment variable that is not set: {variable[1]}",
                        raw,
                        hint=f"set it (export {variable[1]}=VALUE), or give a default: "
                        f"${{oc.env:{variable[1]},DEFAULT}}",
                    )
                )
                continue
            missing = re.search(r"'([^']+)' not found", str(error))
            if missing and (fact := _missing_fact(missing[1], path, cfg)):
                lacking.setdefault(path.partition(".")[0], []).append((path, fact))
                continue
            problems.append(
                Problem(
                    path,
                    "refers to a value that does not exist" if missing else _line(error),
                    raw,
                    "${PATH.OF.A.VALUE} or ${oc.env:NAME,DEFAULT}",
                    did_you_mean(missing[1], [name for name in paths(cfg) if name != path])
                    if missing
                    else "",
                )
            )
        except (
            Exception
        ) as error:  # an error of a resolver: oc.decode of something that cannot be decoded
            problems.append(
                Problem(path, f"cannot be resolved: {first_line(error).rstrip('.')}", raw)
            )
    for group, places in lacking.items():
        facts = sorted({fact for _, fact in places})
        other = "transforms=none, or others" if group == "transforms" else f"another {group}"
        problems.append(
            Problem(
                places[0][0],
                f"needs {' and '.join(facts)}, which this data set does not have",
                hint=f"choose {other} (`samewise list {group}`), or give the data set what is "
                f"missing: {' '.join(f'+{fact}=VALUE' for fact in facts)}",
            )
        )
    return problems


def _missing_fact(key: str, path: str, cfg: DictConfig) -> str:
    """The property that a group expects from the data set but that it lacks.

    Empty if the name is more likely misspelt.
    """
    group, _, fact = key.partition(".")
    keys = [name.removeprefix("dataset.") for name in paths(cfg) if name.startswith("dataset.")]
    near = same_words(fact, keys) or get_close_matches(fact, keys, n=1, cutoff=0.75)
    return key if group == "dataset" and not path.startswith("dataset.") and not near else ""


def _compose_most(
    chosen: Sequence[str], load: Load
) -> tuple[DictConfig | None, list[str], list[Problem]]:
    """Compose with as many of the group choices as possible; a problem for each other."""
    try:
        return load(chosen), list(chosen), []
    except FAILURES as error:
        whole = error
    try:
        cfg = load([])
    except FAILURES as error:
        # Without any override, the fault is in a file
        return None, [], [problem_in_file(error)]
    good, problems = list[str](), list[Problem]()
    for text in chosen:
        try:
            cfg = load([*good, text])
            good.append(text)
        except FAILURES as error:
            problem = problem_in_file(error)
            # Hydra reports errors in a chosen file's overrides as the root's
            problems.append(
                Problem(text, problem.message, problem.value, problem.expected, problem.hint)
                if problem.path in ("", "config.yaml")
                else problem
            )
    return cfg, good, problems or [problem_in_file(whole)]


def _wrong_choice(override: Override, groups: Groups) -> Problem | None:
    group, value = override.key_or_group, override.value()
    choices = groups[group]
    if override.is_delete():
        return None
    if value is None:
        return Problem(
            group,
            "a choice is needed",
            value,
            "one of the group's choices",
            f"`samewise list {group}` shows them; ~{group} removes the whole group",
        )
    if problem := several_choices(group, value):
        return problem
    for name in value if isinstance(value, list) else [value]:
        if not isinstance(name, str) or name.removesuffix(".yaml") not in choices:
            return Problem(
                group,
                NO_SUCH_CHOICE,
                name,
                f"one of: {', '.join(choices)}"
                if len(choices) <= 12
                else f"a choice that `samewise list {group}` shows",
                _meant(f"{group}={name}") or _hint_for_choice(group, str(name), choices),
            )
    return None


def _hint_for_choice(group: str, name: str, choices: Sequence[str]) -> str:
    if "/" in name and group == "dataset":
        return f"a folder is given to a kind of data set: dataset=image_folder dataset.root={name}"
    if "/" in name or name.endswith((".yaml", ".yml")):
        return (
            f"a choice is named without its folder and .yaml (`samewise list {group}`); your own "
            f"are found by --config-dir {Path(name).parent}"
        )
    return did_you_mean(name.rpartition(".")[2], choices)


def _meant(text: str) -> str:
    if number := re.fullmatch(r"device=cuda:(\d+)", text):
        return (
            f"did you mean device=cuda, with CUDA_VISIBLE_DEVICES={number[1]} before the command?"
        )
    return f"did you mean {_MEANT[text]}?" if text in _MEANT else _NEEDLESS.get(text, "")


def try_override(override: Override, cfg: DictConfig, groups: Groups) -> Problem | None:
    """Apply one override to `cfg`, or return the problem."""
    key = override.key_or_group
    value = None if override.is_delete() else override.value()
    before: Any = (
        deepcopy(OmegaConf.select(cfg, key, throw_on_resolution_failure=False))
        if isinstance(value, dict)
        else None
    )
    try:
        apply([override], cfg)
        return None
    except FAILURES as error:
        cause = error.__cause__ or error
        if whole := list_above(cfg, key):
            return Problem(
                key,
                "is an element of a list, which can be changed only if it exists",
                hint=f"set the whole list: '{whole}=[...]'",
            )
        if isinstance(cause, ValidationError) or "ValidationError" in type(cause).__name__:
            expected = expected_type(cfg, key) or _line(cause)
            return Problem(
                key,
                NO_SUCH_CHOICE if expected.startswith("one of: ") else "wrong type",
                value,
                expected,
                _meant(f"{key}={value}"),
            )
        keys_known = list(paths(cfg))
        if key in keys_known and override.is_add():
            return Problem(key, "already exists", value, hint="write it without the +")
        is_mapping = isinstance(
            OmegaConf.select(cfg, key, throw_on_resolution_failure=False), DictConfig
        )
        if (
            key in keys_known
            and isinstance(value, dict)
            and is_mapping
            and not override.is_force_add()
            and not is_typed(cfg, key)
        ):
            # Hydra has set the keys before the first that is new
            OmegaConf.update(cfg, key, before, merge=False)
            return Problem(
                key,
                "has no such keys yet",
                value,
                hint=f"write {quote(f'++{override.input_line}')} to add them",
            )
        if key in keys_known:
            return Problem(key, _line(error), value)
        # An empty mapping is not among the keys
        if is_mapping:
            return Problem(key, "wrong type", value, expected_type(cfg, key))
        return Problem(
            key,
            "no such key",
            value if not override.is_delete() else ...,
            hint=_nearest_key(key, override, cfg, keys_known, groups),
        )


def _nearest_key(
    key: str, override: Override, cfg: DictConfig, names: Sequence[str], groups: Groups
) -> str:
    """The key that was meant: the same name elsewhere, or a similar one.

    Otherwise how to add the key if that is allowed.
    """
    group, _, rest = key.partition(".")
    chosen = rest.partition(".")[0]
    if (
        group == "callbacks"
        and chosen in groups.get(group, ())
        and f"callbacks.{chosen}" not in names
    ):
        return f"the callback is not among those chosen: callbacks=[default,{chosen}]"
    last, added = key.rsplit(".", 1)[-1], quote(f"+{override.input_line}")
    if suggestion := _meant(last):
        return suggestion
    # Every component has this key, so it says nothing of the right one
    if last == "_target_":
        return f"write {added} to add it"
    same = [path for path in names if path.rsplit(".", 1)[-1] == last]
    if (
        "." not in key
    ):  # a bare word: the name of a choice, or the end of the shortest matching path
        groups_of = [
            other
            for other in ("callbacks", "model", "dataset", "optimizer", "scheduler")
            if key in groups.get(other, ())
        ]
        if groups_of:
            return (
                "did you mean "
                f"{groups_of[0]}={f'[default,{key}]' if groups_of[0] == 'callbacks' else key}?"
            )
    alike = [
        path
        for path in [*names, *groups]
        if get_close_matches(last, [path.rsplit(".", 1)[-1]], cutoff=0.6)
    ]
    at_root = [path for path in names if "." not in path and "." not in key]
    hint = did_you_mean(key, at_root) or (
        f"did you mean '{get_close_matches(key, same, n=1, cutoff=0.0)[0]}'?"
        if same
        else did_you_mean(key, alike)
    )
    parent = key.rpartition(".")[0]
    # Nothing but a component reads a new key
    target = OmegaConf.select(cfg, f"{parent}._target_") if parent in names else None
    if target and not override.is_delete():
        hint += f"{' Or write' if hint else 'write'} {added} to add it, if {target} takes it"
    return hint or "`samewise show` lists the keys"


def _line(error: BaseException) -> str:
    return first_line(error).rstrip(".")
