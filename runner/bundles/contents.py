"""Collects the content of a bundle: all that trains a finished run again elsewhere and compares it.

Imports torch.
"""

import json
import platform
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import yaml
from packaging.utils import canonicalize_name

from samewise.runner.bundles import data_files, rebuilding
from samewise.runner.bundles.archive import CODE, DATA, FACTS, LOCK, OWN, RUN, Part
from samewise.runner.config import saved
from samewise.runner.config.project import Project
from samewise.runner.config.schema import SOURCES
from samewise.runner.config.tree import at
from samewise.runner.config.yaml_files import read_yaml
from samewise.runner.errors import ConfigError, Problem
from samewise.runner.launchers.snapshot import CONFIGS, collect_sources, settings_text
from samewise.runner.records import environment, kept_checkpoints, own_code, shapes, sources
from samewise.runner.records.files import read_json, read_text
from samewise.runner.records.folder import RunFolder
from samewise.runner.secrets import (
    looks_secret,
    redact,
    redact_file,
    redact_values,
    remove_private_keys,
)


def gather(
    folder: RunFolder, project: Project, *, with_weights: bool = False, hash_data: bool = True
) -> dict[str, Part]:
    """Collect the parts of a run's bundle, without secrets and files that look like secrets.

    Args:
        folder: The folder of a finished run.
        project: The project whose packages and config folders are included.
        with_weights: Whether to include the best and the last checkpoint.
        hash_data: Whether to read all files of the data for their SHA-256.

    Raises:
        ConfigError: The run is not finished, or has no trace; or code or versions have
            changed since the training.
    """
    summary = _require_sound(folder)
    recorded: dict[str, Any] = read_json(folder.environment, shapes.ENVIRONMENT) or {}
    pins = rebuilding.pins(
        [
            *recorded.get("libraries", {}),
            *(x.partition("/")[0].removesuffix(".py") for x in sources.files_in(folder.sources)),
        ]
    )
    _require_the_same(folder, recorded, pins)
    composed = saved.config_in(folder.config)
    facts = {
        "name": folder.path.parent.name,
        "label": composed.label,
        "fingerprint": summary.get("fingerprint", folder.path.name),
        "level": summary["level"],
        "steps": summary["steps"],
        "weights_sha256": summary["weights_sha256"],
        "python": platform.python_version(),
        "packages": list(project.packages),
    }
    lock = [f"# Python {platform.python_version()}\n", *(f"{x}=={pins[x]}\n" for x in pins)]
    data = {
        "splits": recorded.get("data", {}),
        "files": data_files.list_files(composed.whole, hashed=hash_data),
    }
    parts: dict[str, Part] = {
        FACTS: _json(facts),
        DATA: _json(data),
        LOCK: "".join(lock).encode(),
    }
    parts |= {
        f"{RUN}/{path.name}": remove_private_keys(
            redact_file(path.name, read_text(path) or "")
        ).encode()
        for path in (folder.config, folder.environment, folder.sources, folder.summary)
        if path.exists()
    }
    # Digests and numbers, which hold no secrets
    parts |= {
        f"{RUN}/{path.name}": path for path in (folder.trace, folder.metrics) if path.exists()
    }
    parts |= dict(_code(folder, project))
    if with_weights:
        parts |= dict(_weights(folder))
        kept_checkpoints.note_if_not_meant(folder.checkpoints, summary, "best")
    return parts


def outside_weights(whole: Mapping[str, Any]) -> dict[str, str]:
    """Return the settings that name files of weights on this machine, which no bundle contains."""
    settings = {key: at(whole, key) for key in SOURCES}
    return {
        key: value
        for key, value in settings.items()
        if isinstance(value, str) and Path(value).expanduser().exists()
    }


def _require_sound(folder: RunFolder) -> Mapping[str, Any]:
    summary: dict[str, Any] | None = read_json(folder.summary, shapes.SUMMARY)
    if summary is None or summary["status"] != "finished":
        raise ConfigError(
            Problem(
                str(folder.path),
                "the run is not finished",
                hint="run its `samewise train` command again to finish it",
            )
        )
    ConfigError.raise_if(
        not folder.trace.is_file(),
        str(folder.trace),
        "is missing: nothing could be compared with it",
        hint="train with trace.every_steps=1",
    )
    return summary


def _require_the_same(
    folder: RunFolder, recorded: Mapping[str, Any], pins: Mapping[str, str]
) -> None:
    """Raise a ConfigError if code or packages differ from those of the training."""
    # A bundle contains the code and the versions of now
    changes = sources.list_changes(folder.sources) + own_code.changes(recorded)
    problems = [
        Problem(
            str(folder.path),
            f"cannot be bundled with the current code: {x}",
            hint="use the code that it was trained with (`samewise init FOLDER --from RUN` writes "
            "it), or train again with `samewise train --fresh`",
        )
        for x in changes
    ]
    trained_with = {
        name: recorded.get("versions", {}).get(name) for name in environment.NUMERIC
    } | recorded.get("libraries", {})
    installed = {name: pins.get(canonicalize_name(name), "none") for name in trained_with}
    problems += [
        Problem(
            str(folder.path),
            f"was trained with {name} {version}, but {installed[name]} is installed here",
            hint=f"install {name}=={version}",
        )
        for name, version in trained_with.items()
        if version and installed[name] != version
    ]
    ConfigError.raise_all(problems)


def _code(folder: RunFolder, project: Project) -> Iterator[tuple[str, Part]]:
    """Yield samewise's own files, and the user's: packages, code of the run, config folders."""
    reached = sources.files_in(folder.sources)
    has_configs = False
    for name, file in sorted(
        dict(collect_sources(project.packages, project.configs, reached)).items()
    ):
        if name.parts[0] == "samewise":
            yield f"{OWN}/{name.as_posix()}", file
            continue
        secret = _secret_in(name, file)
        if not secret:
            has_configs |= name.parts[0] == CONFIGS
            yield f"{CODE}/{name.as_posix()}", file
        elif name.as_posix() in reached:
            raise ConfigError(
                Problem(
                    str(file),
                    f"{secret}, and the run needs this file",
                    hint="keep secrets in a file that is not code",
                )
            )
        else:
            print(f"warning: {file} is left out: it {secret}", file=sys.stderr)
    yield (
        f"{CODE}/pyproject.toml",
        settings_text(project.packages, configs=CONFIGS if has_configs else "").encode(),
    )


def _secret_in(name: Path, file: Path) -> str:
    """Return why a file of the user's is not included; empty if it may be."""
    if looks_secret(name):
        return "has a name that files of secrets usually have"
    text = file.read_bytes().decode("utf-8", "replace")
    if remove_private_keys(text) != text:
        return "contains a private key"
    if file.suffix in (".yaml", ".yml"):
        try:
            value = read_yaml(text)
        except yaml.YAMLError:
            value = None
        return (
            "contains a password or a token"
            if redact(text) != text or redact_values(value) != value
            else ""
        )
    return ""


def _weights(folder: RunFolder) -> Iterator[tuple[str, Part]]:
    paths = {
        kept_checkpoints.choose_checkpoint(folder.checkpoints, which).path
        for which in ("best", "last")
    }
    for path in sorted(paths):
        yield from (
            (f"{RUN}/checkpoints/{path.name}/{file.relative_to(path).as_posix()}", file)
            for file in sorted(path.rglob("*"))
            if file.is_file()
        )


def _json(value: Any) -> bytes:
    return (json.dumps(value, indent=1, sort_keys=True, ensure_ascii=False) + "\n").encode()
