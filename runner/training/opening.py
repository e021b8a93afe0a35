"""Opens a run's folder: its lock, and the records of config, code and environment."""

import sys
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import replace
from itertools import zip_longest
from typing import Any

from omegaconf import OmegaConf

from samewise.runner.config import compose
from samewise.runner.config.catalogue import title_of
from samewise.runner.config.fingerprint import contents, finds_data, fingerprint_of
from samewise.runner.config.tree import differing_keys
from samewise.runner.errors import ConfigError, Problem
from samewise.runner.records import checkpoint, environment, kept_sources, shapes, sources, trust
from samewise.runner.records.files import read_json, read_mapping, write_atomically, write_json
from samewise.runner.secrets import redact
from samewise.runner.training.run import Run


def open_folder(run: Run, resources: ExitStack, alike: list[Mapping[str, Any]]) -> str:
    """Lock a run's folder, and write the records of its start.

    Args:
        run: The run, before its first step of this session.
        resources: The stack that releases the lock.
        alike: Each rank's `surroundings`.

    Returns:
        The level of reproducibility that the run can promise.

    Raises:
        ConfigError: Code or environment are not the run's, or the ranks differ.
    """
    _require_its_code(run)
    run.folder.create()
    run.recorder.require_folder = resources.enter_context(run.folder.hold_lock())
    _write_down(run, alike)
    return run.recorder.level


def _write_down(run: Run, surroundings: list[Mapping[str, Any]]) -> None:
    """Write config and environment to the folder.

    An environment that gives other bits lowers the level, or raises a ConfigError where
    `reproducibility.other_environment` is refuse.
    """
    _require_alike(run, surroundings)
    _warn_of_missing(run)
    _compare_environment(run)
    write_json(
        run.folder.environment,
        {
            **run.environment,
            "fingerprint": run.fingerprint,
            "level": run.recorder.level,
            "name": run.composed.name,
            "reproducibility": run.config.reproducibility.level,
            "total_steps": run.total_steps,
            "contents": contents(run.composed.whole),
            "title": title_of(run.composed),
        },
    )
    saved = compose.dump(run.composed)
    # Resuming needs a secret as it is, so it cannot be redacted: only the user may read the folder
    if redact(saved) != saved:
        run.folder.path.chmod(0o700)
    write_atomically(run.folder.config, saved)
    trust.sign(run.folder.config)
    _write_code(run)


def _compare_environment(run: Run) -> None:
    """Lower the level, or raise a ConfigError, if the run began in another environment."""
    before = read_json(run.folder.environment, shapes.ENVIRONMENT)
    if not before:
        return
    differing = environment.differences(before, run.environment)
    resumes = bool(checkpoint.list_checkpoints(run.folder.checkpoints))
    if resumes and before.get("level") == "none":
        # An earlier session lowered it, and this one continues from its steps
        run.recorder.level = "none"
    # A run without a checkpoint starts again, so its earlier environment has no effect
    if differing and resumes:
        if run.config.reproducibility.other_environment == "refuse":
            raise ConfigError(
                # Other data have an error of their own, which names their places
                _other_data(run)
                if all(line.startswith("data.") for line in differing)
                else Problem(
                    str(run.folder.path),
                    "this run began in another environment, so it may not continue to the "
                    "same bits: " + "; ".join(differing),
                    hint="resume it in that environment; or add `--fresh` to train it again from "
                    "the start; or, to continue here without the promise of the same bits (level "
                    "none), add reproducibility.other_environment=record",
                )
            )
        run.recorder.level = "none"
    elif not all(hasattr(part.dataset, "fingerprint") for part in run.splits.values()) and (
        moved := _moved_data(run)
    ):
        print(
            f"warning: {'; '.join(moved)}: the data set has as many samples as before, and nine of "
            "them are the same; the others were not compared, since it has no method fingerprint()",
            file=sys.stderr,
        )


def _warn_of_missing(run: Run) -> None:
    """Warn if a run with checkpoints lacks records of its start, which are then written again."""
    records = [
        run.folder.environment,
        run.folder.config,
        *([run.folder.sources] if run.composed.code.files else []),
    ]
    for path in records if checkpoint.list_checkpoints(run.folder.checkpoints) else ():
        if not path.exists():
            unknown = (
                "; samewise cannot tell whether the run began in the same environment, and so "
                "has the same bits" * (path == run.folder.environment)
            )
            print(
                f"warning: {path}: is missing, and is written again as it is now{unknown}",
                file=sys.stderr,
            )


def _other_data(run: Run) -> Problem:
    """Return the problem that the folder's run was trained on other data."""
    paths = _moved_data(run)
    is_finished = read_mapping(run.folder.summary, shapes.SUMMARY).get("status") == "finished"
    how = "is finished, and was trained" if is_finished else "is unfinished, and was started"
    return Problem(
        str(run.folder.path),
        f"this run {how} on other data: "
        f"{'; '.join(paths) or 'the files in its data folder have changed since'}",
        hint="name=NAME starts a separate run"
        if is_finished
        else "resume it with its own data; name=NAME starts a separate run",
    )


def _moved_data(run: Run) -> list[str]:
    """Describe the data's places that differ from the folder's config."""
    if not run.folder.config.exists():
        return []
    before, now = compose.load(run.folder.config).cfg, run.composed.cfg
    return [
        f"{key} was {OmegaConf.select(before, key)} and is {OmegaConf.select(now, key)}"
        for key in differing_keys(before, now)
        if finds_data(key)
    ]


def _require_its_code(run: Run) -> None:
    """Raise a ConfigError if the user's code was edited since training was requested."""
    # The imported code may then not match the fingerprint in the folder's name
    edited = sources.describe_changes(run.composed.code.files, replace(run.composed).code.files)
    ConfigError.raise_if(
        edited,
        str(run.folder.path),
        f"the code was edited while the run was starting: {'; '.join(edited)}",
        hint="run the command again",
    )


def _write_code(run: Run) -> None:
    """Keep the user's code, and write its digests to the folder."""
    code = run.composed.code
    sources.note_imported(code)
    for name in sources.hidden_imports(code, run.composed.project.packages) if code.files else ():
        print(
            f"warning: {name} was imported by a name that only appears when the code runs; "
            "samewise will not notice later changes in it",
            file=sys.stderr,
        )
    if code.files:
        kept_sources.write_record(
            run.folder.sources, fingerprint_of(run.composed.whole), code.files
        )


def surroundings(run: Run) -> dict[str, Any]:
    """Return what must be alike in all processes of a run, for `open_folder`."""
    return {
        "environment": run.environment,
        "tensors": [
            f"{name} {list(tensor.shape)}" for name, tensor in run.model.state_dict().items()
        ],
    }


def _require_alike(run: Run, surroundings: list[Mapping[str, Any]]) -> None:
    """Raise an error, or lower the level, if the run's processes compute differently."""
    for rank, other in enumerate(surroundings):
        # Processes exchange tensors by number, so other models are an error at any level
        for tensor, its_tensor in zip_longest(
            surroundings[0]["tensors"], other["tensors"], fillvalue="nothing"
        ):
            ConfigError.raise_if(
                tensor != its_tensor,
                "model",
                f"rank {rank} has {its_tensor} where rank 0 has {tensor}",
                hint="make the model depend on its arguments only: not on the order of a "
                "set or of a folder's files, nor on the rank",
            )
        differing = [
            # `differences` speaks of an earlier session, and these two run now
            line.replace(" was ", " is ", 1).replace(" and is ", " for rank 0 and ", 1)
            for line in environment.differences(run.environment, other["environment"])
        ]
        ConfigError.raise_if(
            differing and run.config.reproducibility.other_environment == "refuse",
            f"rank {rank}",
            "runs in another environment than rank 0, so the run may not repeat: "
            + "; ".join(differing),
            hint="use machines of one kind, or accept different bits with "
            "reproducibility.other_environment=record",
        )
        if differing:
            run.recorder.level = "none"
