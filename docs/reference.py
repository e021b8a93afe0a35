"""The pages of the documentation site: README.md, docs/, and the reference, made from the code.

python docs/reference.py FOLDER    write them there; `make docs` builds the site from them
"""

from __future__ import annotations

import ast
import contextlib
import io
import itertools
import json
import os
import re
import shutil
import sys
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import is_dataclass
from pathlib import Path
from typing import Any, get_type_hints

from samewise.runner.cli import main
from samewise.runner.commands import commands
from samewise.runner.config import annotations
from samewise.runner.config.catalogue import group_summaries
from samewise.runner.config.json_schema import Writer
from samewise.runner.config.project import Project
from samewise.runner.config.schema import Experiment

ROOT = Path(__file__).resolve().parents[1]
SOURCES = ("runner", "recipes", "datasets")
API = (
    "compose",
    "train",
    "load",
    "predict",
    "evaluate",
    "verify",
    "compare",
    "diff",
    "export",
    "runs",
    "sweep",
    "LoadedRun",
    "Transforms",
    "Trained",
    "Evaluation",
    "Verification",
    "Differences",
    "Exported",
)
OF_EVERY_FILE = ("defaults", "_target_", "_partial_", "_args_")
WORDS = {"array": "list", "object": "mapping"}
OTHER_VARIABLES = {
    "CUDA_VISIBLE_DEVICES": "Which GPUs there are. Jobs of a sweep each get theirs.",
    "CUBLAS_WORKSPACE_CONFIG": "Set by `reproducibility=strict`, so that cuBLAS repeats to the bit.",
    "GLIBC_TUNABLES": "With it, or any `MALLOC_...`, freed memory is not kept.",
    "HF_HOME, HF_DATASETS_CACHE": "Where Hugging Face's caches are.",
    "MASTER_ADDR, MASTER_PORT, RANK, WORLD_SIZE": "The rendezvous of ranks, as torchrun sets it.",
    "MKL_CBWR": "MKL's reproducible mode: `AUTO` unless set.",
    "MLFLOW_TRACKING_USERNAME, MLFLOW_TRACKING_PASSWORD, MLFLOW_TRACKING_TOKEN": "For the server.",
    "MLFLOW_HTTP_REQUEST_TIMEOUT": "Seconds to wait for an answer of the server: 30 unless set.",
    "OMP_WAIT_POLICY": "How idle threads wait: `PASSIVE` unless set; it changes no bits.",
    "PYTHONHASHSEED": "0 in every process of samewise; set it yourself for scripts and notebooks.",
    "RAY_API_SERVER_ADDRESS, RAY_ADDRESS": "Ray's dashboard, for `launcher=ray`.",
    "RAY_AUTH_TOKEN, RAY_AUTH_TOKEN_PATH": "The token that is sent to it.",
    "TORCH_HOME": "Where torch's cache of published weights is.",
    "TORCHINDUCTOR_CACHE_DIR": "Where compiled code is kept.",
    "WANDB_MODE": "`offline`: W&B's files are kept for `wandb sync`.",
    "XDG_CACHE_HOME, XDG_CONFIG_HOME": "Where samewise's cache and key are.",
}
WRITTEN_BY_COMMANDS = {
    "eval/": "Pictures of `samewise eval`.",
    "predictions/": "What `samewise predict` wrote.",
    "tensorboard/, wandb/": "Files of these stores, with `tracking.report_to`.",
    "metrics.csv": "The metrics as a table, with `tracking=csv`.",
    "sender.log": "What the process that sends to MLflow printed.",
}


def code(text: object) -> str:
    """Text as code, in a cell of a table."""
    return f"`{text}`".replace("|", "\\|")


def prose(text: str) -> str:
    """A docstring's text, in which nothing but code is markup, in a cell of a table."""
    parts = re.split(r"(`+[^`]+`+)", text)
    escaped = [
        part if place % 2 else re.sub(r"([\\*_<>\[\]#~^])", r"\\\1", part)
        for place, part in enumerate(parts)
    ]
    return " ".join("".join(escaped).replace("|", "\\|").split())


def table(head: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    """A table in Markdown."""
    head = list(head)
    return "\n".join(f"| {' | '.join(row)} |" for row in (head, ["---"] * len(head), *rows)) + "\n"


def kind(schema: Mapping[str, Any]) -> str:
    """The values that a schema describes, in words."""
    if schema == annotations.REFERENCE:
        return ""
    if "enum" in schema:
        return " / ".join(map(code, schema["enum"]))
    if "anyOf" in schema:
        several = schema["anyOf"]
        if any(
            one.get("type") == "array" for one in several
        ):  # a component or a text that can stand for a list seldom does
            several = [one for one in several if one.get("type") in ("array", "null")]
        return " or ".join(dict.fromkeys(filter(None, map(kind, several))))
    if "type" not in schema:
        return "any" if schema.get("$ref") == annotations.ANY["$ref"] else "component"
    names = schema["type"] if isinstance(schema["type"], list) else [schema["type"]]
    inner = kind(schema["items"]) if isinstance(schema.get("items"), dict) else "any"
    return " or ".join(WORDS.get(name, name) for name in names) + (
        f" of {inner}" if inner != "any" else ""
    )


def keys(properties: Mapping[str, Any], under: str = "") -> str:
    """A table of keys: type, default and meaning."""
    found = {name: one for name, one in properties.items() if name not in OF_EVERY_FILE}
    rows = (
        (
            code(under + name),
            kind(one),
            code(json.dumps(one["default"])) if "default" in one else "",
            prose(one.get("description", "")),
        )
        for name, one in found.items()
    )
    return table(("key", "type", "default", "meaning"), rows) if found else "No arguments.\n"


def command_page() -> str:
    """Every command's help."""
    os.environ["COLUMNS"] = "100"
    page = "# Commands\n\n"
    for name in ("", *commands()):
        said = io.StringIO()
        with contextlib.redirect_stdout(said):
            main([*filter(None, [name]), "--help"])
        page += f"## {f'samewise {name}'.strip()}\n\n```text\n{said.getvalue().strip()}\n```\n\n"
    return page


def settings_page(found: Mapping[str, Any]) -> str:
    """The typed settings: those of the root, and of each section."""
    root: dict[str, Any] = found["root"]["allOf"][0]["properties"]
    sections = {
        name: found.get(name, root[name])
        for name, one in get_type_hints(Experiment).items()
        if is_dataclass(one)
    }
    page = "# Settings\n\nThe keys whose types are fixed. Keys of components are those of their [groups](groups.md).\n\n"
    page += keys(
        {name: one for name, one in root.items() if name not in sections and name not in found}
    )
    for name, one in sections.items():
        page += (
            f"\n## {name}\n\n{root[name]['description']}\n\n{keys(one['properties'], f'{name}.')}"
        )
    return page


def group_pages(
    writer: Writer, found: Mapping[str, Any], summaries: Mapping[str, str]
) -> Iterator[tuple[str, str]]:
    """Each group and its page: choices, keys, and the arguments of its choices' components."""
    for group, names in writer.choices.items():
        path = writer.elsewhere.get(group, group)
        page = f"# {group}\n\n{prose(summaries[group])}\n\n" + table(
            ("choice", "what it is"), ((code(name), prose(text)) for name, text in names.items())
        )
        own = found.get(group, {}).get("properties", {})
        page += (
            f"\n## Keys\n\n{keys(own, f'{group}.')}"
            if group in ("dataset", "transforms", "initialise")
            else ""
        )
        used = {
            name
            for place, targets in writer.used.items()
            if f"{place}.".startswith(f"{path}.")
            for name in targets
        }
        for name in sorted(used):
            page += f"\n## {name.rpartition('.')[2]}\n\n{code(name)}: {prose(found[name].get('description', ''))}\n\n{keys(found[name]['properties'])}"
        yield group, page


def documented(file: Path) -> Iterator[tuple[str, str]]:
    """The source of each assignment in a module or its classes, and the string below it."""
    for scope in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        body = scope.body if isinstance(scope, ast.Module | ast.ClassDef) else []
        for line, after in itertools.pairwise(body):
            if (
                isinstance(line, ast.Assign)
                and isinstance(after, ast.Expr)
                and isinstance(after.value, ast.Constant)
            ):
                yield ast.unparse(line), str(after.value.value)


def variable_page() -> str:
    """The environment variables that samewise reads."""
    files = [file for folder in SOURCES for file in sorted((ROOT / folder).rglob("*.py"))]
    found = {
        name[0]: text
        for file in files
        for line, text in documented(file)
        if (name := re.search(r"\bSAMEWISE_\w+", line))
    }
    page = "# Environment variables\n\n"
    for head, texts in (
        ("Of samewise", dict(sorted(found.items()))),
        ("Of other libraries", OTHER_VARIABLES),
    ):
        rows = ((", ".join(map(code, name.split(", "))), text) for name, text in texts.items())
        page += f"## {head}\n\n{table(('variable', 'meaning'), ((a, prose(b)) for a, b in rows))}\n"
    return page


def message_page() -> str:
    """Every message of a problem in the code, by room: what it says, what was expected, a hint."""
    page = "# Messages\n\nEach error and warning, with `...` for what differs from case to case. "
    page += "[Troubleshooting](../docs/troubleshooting.md) says what to do about common ones, and "
    page += "[warnings](../docs/warnings.md) shows warnings with commands that cause them.\n"
    names = ("path", "message", "value", "expected", "hint")
    rooms = dict[str, set[tuple[str, ...]]]()
    for file in sorted(file for top in SOURCES for file in (ROOT / top).rglob("*.py")):
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Call) and getattr(node.func, "id", "") == "Problem":
                arguments = dict(zip(names, node.args, strict=False))
                arguments |= {
                    keyword.arg: keyword.value for keyword in node.keywords if keyword.arg
                }
                texts = tuple(map(spelled, map(arguments.get, ("message", "expected", "hint"))))
                room = "/".join(file.relative_to(ROOT).parts[:2]).removesuffix(".py")
                rooms.setdefault(room, set()).update([texts] if texts[0] else [])
    for room, rows in rooms.items():
        cells = ((prose(text) for text in row) for row in sorted(rows))
        page += f"\n## {room}\n\n{table(('message', 'expected', 'hint'), cells)}" if rows else ""
    return page


def spelled(node: ast.expr | None) -> str:
    """A text in the code, with `...` for the values in it; empty if it is none."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value
    if isinstance(node, ast.JoinedStr):
        return "".join(spelled(part) or "..." for part in node.values)
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        return spelled(node.left) + spelled(node.right)
    return ""


def file_page() -> str:
    """The files in the folder of a run."""
    found = [
        (match[1], text)
        for line, text in documented(ROOT / "runner" / "records" / "folder.py")
        if (match := re.search(r"_In\('(.+)'\)", line))
    ]
    head = "# Files of a run\n\nThe folder of a run is `RUN_ROOT/NAME/FINGERPRINT`, with the first 12 digits of the fingerprint.\n\n"
    rows = [*found, *WRITTEN_BY_COMMANDS.items()]
    return head + table(
        ("file", "what it is"),
        ((", ".join(map(code, name.split(", "))), prose(text)) for name, text in rows),
    )


def exit_code_page(help_: str) -> str:
    """The exit codes that `samewise --help` lists."""
    rows = re.findall(r"^  (\d)  (.+)$", help_, re.MULTILINE)
    return "# Exit codes\n\n" + table(
        ("exit code", "meaning"), ((number, prose(text)) for number, text in rows)
    )


def python_page() -> str:
    """What mkdocstrings makes into the reference of the Python interface."""
    page = "# Python\n\nThe functions of `samewise`, and the classes from which your own components inherit.\n\n"
    return (
        page
        + "".join(f"::: samewise.{name}\n\n" for name in API)
        + "::: samewise.runner.interfaces\n"
    )


def write(folder: Path) -> None:
    """Write all pages, and what they link to, into a folder."""
    shutil.rmtree(folder, ignore_errors=True)
    folder = folder.resolve()
    for name in ("docs", "examples"):
        shutil.copytree(
            ROOT / name, folder / name, ignore=shutil.ignore_patterns("reference.py", "build")
        )
    for page in ROOT.glob("*.md"):
        shutil.copy(page, folder)
    for page in folder.rglob("*.md"):
        for target in re.findall(r"\]\(((?![a-z]+:)[^)#\s]+)", page.read_text(encoding="utf-8")):
            linked = (page.parent / target).resolve()
            if not linked.exists():  # a file elsewhere in the repository
                linked.parent.mkdir(parents=True, exist_ok=True)
                shutil.copy(ROOT / linked.relative_to(folder), linked)
    writer, summaries = Writer(Project(Path())), group_summaries(Project(Path()))
    found = writer.definitions()
    pages = {
        "commands": command_page(),
        "settings": settings_page(found),
        "environment": variable_page(),
        "files": file_page(),
        "messages": message_page(),
        "python": python_page(),
    }
    pages["exit_codes"] = exit_code_page(pages["commands"])
    rows = ((f"[{group}](groups/{group}.md)", prose(text)) for group, text in summaries.items())
    pages["groups"] = (
        "# Groups and their choices\n\nGROUP=CHOICE on the command line takes a choice of a group.\n\n"
        + table(("group", "what it is"), rows)
    )
    pages |= {f"groups/{group}": page for group, page in group_pages(writer, found, summaries)}
    for name, page in pages.items():
        file = folder / "reference" / f"{name}.md"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(page, encoding="utf-8")


if __name__ == "__main__":
    write(Path(sys.argv[1]))
