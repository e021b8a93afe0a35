"""The documents: links, commands and what they print, configs, Python code, the notebook, the worked example of CONTRIBUTING.md, and the site."""

import importlib.util
import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from urllib.parse import unquote, urldefrag

import pytest
import samewise_docs_warnings_page
import yaml
from jsonschema import Draft7Validator
from referencing import Registry, Resource
from samewise_docs_pages import EXAMPLES, PAGES, blocks, first_not_printed, links, make_files, make_folder
from samewise_forked import Forked

import samewise
from samewise.runner.commands import commands
from samewise.runner.config import json_schema, project
from samewise.runner.config.compose import compose
from samewise.runner.errors import Problem

WITH_COMMANDS = [name for name, path in PAGES.items() if any(block.commands and block.reason is None for block in blocks(path.read_text()))]
OFTEN = ("README.md", "docs/first_experiment.md", "docs/sweeps.md", *EXAMPLES)
"""Pages whose commands are run with the slow tests; those of the others, which take minutes per page, are run with the long ones."""
OF_OVERRIDES = ("train", "check", "show")


def _shell(command: str, folder: Path, samewise: str = f'{shlex.quote(sys.executable)} -m samewise "$@"') -> subprocess.CompletedProcess[str]:
    """Run a command as a user would type it, with this interpreter's samewise."""
    script = f'samewise() {{ {samewise}; }}\npython() {{ {shlex.quote(sys.executable)} "$@"; }}\n{command}'
    return subprocess.run(["bash", "-c", script], cwd=folder, env=dict(os.environ), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False)


def _forked(command: str, folder: Path, said: Path) -> subprocess.CompletedProcess[str]:
    """Like `_shell`, for a command that is samewise alone: ten seconds quicker, as torch is imported already."""
    words = _shell(command, folder, "printf '%s\\0' \"$@\"").stdout.split("\0")[:-1]
    process = Forked(*words, said=said, before=f"os.chdir({str(folder)!r}); os.dup2(1, 2)")
    code = process.wait(900)
    assert code is not None, process.output
    return subprocess.CompletedProcess(command, code, process.output)


def _follow(page: str, folder: Path, *, only: tuple[str, ...] = ()) -> int:
    """Run the commands of a page from top to bottom, the first as a user would start it; return how many were run."""
    make_folder(page, folder)
    count = 0
    for block in blocks(PAGES[page].read_text()):
        for command in block.commands if block.reason is None else []:
            if only and command.text not in only:
                continue
            alone = re.fullmatch(r"samewise [^|&;<>$`]*", command.text)
            done = _forked(command.text, folder, folder.with_name(f"{folder.name}-said") / str(count)) if count and alone else _shell(command.text, folder)
            assert done.returncode == command.exit_code, f"$ {command.text}\n{done.stdout}"
            missing = first_not_printed(command.shown, done.stdout)
            assert missing is None, f"$ {command.text}\ndoes not print\n{missing}\nbut\n{done.stdout}"
            count += 1
    return count


@pytest.mark.parametrize("page", PAGES)
def test_relative_links_and_pictures_have_existing_targets(page: str) -> None:
    lost = [target for target in links(PAGES[page].read_text()) if not (PAGES[page].parent / target.partition("#")[0]).exists()]
    assert lost == []


@pytest.mark.parametrize("page", WITH_COMMANDS)
def test_every_shell_block_has_commands_and_a_skipped_one_a_reason(page: str) -> None:
    shells = [block for block in blocks(PAGES[page].read_text()) if block.language in ("console", "bash", "sh", "shell")]
    assert {block.language for block in shells} <= {"console", "bash"}, "these would not be run"
    assert all(block.commands for block in shells)
    assert all(block.reason is None or len(block.reason.split()) > 3 for block in shells)


@pytest.mark.parametrize("page", PAGES)
def test_every_named_command_exists(page: str) -> None:
    named = re.findall(r"(?:`|^\$ )samewise ([a-z]+)", PAGES[page].read_text(), re.M)
    assert set(named) <= set(commands())


@pytest.mark.parametrize("page", WITH_COMMANDS)
def test_every_experiment_composes(page: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_folder(page, tmp_path)
    here, seen = project.find(tmp_path), set[tuple[str, ...]]()
    for block in blocks(PAGES[page].read_text()):
        for command in block.commands:
            words = shlex.split(command.text, comments=True)
            if words[:1] == ["samewise"] and words[1] in OF_OVERRIDES:
                overrides = [word for word in words[2:] if not word.startswith("--")]
                if tuple(overrides) in seen:
                    continue
                seen.add(tuple(overrides))
                found = compose(overrides, project=here, strict=False).problems
                if found and all(
                    problem.message.startswith(("no such run", "is not in Hugging Face's cache")) for problem in found if isinstance(problem, Problem)
                ):
                    continue  # it needs the weights of a run that the page trains first, or that the page says to download
                assert bool(found) == bool(command.exit_code), (command.text, found)


@pytest.mark.slow
def test_every_config_shown_is_valid_by_the_schema_for_editors(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for page in WITH_COMMANDS:
        make_files(PAGES[page].read_text(), tmp_path)
    shown = [(file.parent.name, file.read_text()) for file in sorted((tmp_path / "configs").rglob("*.yaml"))]
    every = [block for path in PAGES.values() for block in blocks(path.read_text())]
    shown += [("experiment", block.text) for block in every if block.file is None and block.text.startswith("# @package _global_")]
    schemas, problems = json_schema.project_schemas(project.find(tmp_path))
    registry = Registry().with_resource("definitions.json", Resource.from_contents(schemas["definitions"]))
    found = {text: [error.message for error in Draft7Validator(schemas[group], registry=registry).iter_errors(yaml.safe_load(text))] for group, text in shown}
    assert problems == []
    assert len(found) > 5
    assert {text: wrong for text, wrong in found.items() if wrong} == {}


@pytest.mark.slow
def test_the_page_of_warnings_matches_what_the_commands_print() -> None:
    assert samewise_docs_warnings_page.PAGE.read_text() == samewise_docs_warnings_page.page(), "python tests/docs/warnings_page.py --write"


@pytest.mark.slow
def test_your_own_data_set_and_model_train_as_the_page_says(tmp_path: Path) -> None:
    made = make_files(PAGES["docs/your_own.md"].read_text(), tmp_path)
    assert {"pyproject.toml", "lab/shapes.py", "configs/dataset/shapes.yaml", "lab/small_net.py", "configs/model/small_net.yaml"} <= set(made)
    command = "samewise train dataset=shapes model=small_net optimizer.lr=0.03 max_epochs=3"
    assert _follow("docs/your_own.md", tmp_path, only=(command,)) == 1
    (folder,) = (tmp_path / "runs" / "classification-small_net-shapes").iterdir()
    assert (folder / "checkpoints" / "latest" / "state.pt").is_file()
    assert (folder / "artifacts" / "valid" / "confusion_matrix.png").is_file()
    again = _forked(f"{command} --json", tmp_path, tmp_path.with_name(f"{tmp_path.name}-said") / "again")
    assert '"status": "finished"' in again.stdout
    assert '"valid/accuracy": 0.3' not in again.stdout, "no better than chance"


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("page", [page if page in OFTEN else pytest.param(page, marks=pytest.mark.long) for page in WITH_COMMANDS])
def test_every_command_runs_and_prints_what_is_shown(page: str, tmp_path: Path) -> None:
    assert _follow(page, tmp_path) > 0


PAGE = PAGES["docs/python.md"].read_text()


def test_the_page_names_every_function() -> None:
    functions = {name for name in samewise.__all__ if name.islower()}
    assert set(re.findall(r"^\| `(\w+)\(", PAGE, re.M)) == functions


@pytest.mark.slow
def test_the_code_on_the_page_runs_as_described(tmp_path: Path) -> None:
    (code,) = [block.text for block in blocks(PAGE) if block.language == "python"]
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert len(list(tmp_path.glob("runs/*/*/summary.json"))) == 3, "the sweep has found the run that was trained before"
    assert re.search(r"^True\n10\n.*^\[\('seed', 0, 1\)\]$", done.stdout, re.M | re.S), done.stdout
    assert re.search(r"0\.05 +finished.*\n.*0\.10 +finished", done.stdout), done.stdout


@pytest.mark.slow
def test_the_notebook_runs_and_updates_its_progress_bar_in_place(repository: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import nbformat
    from nbclient import NotebookClient

    for name in ("IPYTHONDIR", "JUPYTER_DATA_DIR", "JUPYTER_CONFIG_DIR", "JUPYTER_RUNTIME_DIR"):
        monkeypatch.setenv(name, str(tmp_path / "jupyter"))
    (tmp_path / "work").mkdir()
    notebook = nbformat.read(repository / "docs" / "notebook.ipynb", as_version=4)
    assert all(not cell.outputs for cell in notebook.cells if cell.cell_type == "code"), "it is kept without what it has printed"
    NotebookClient(notebook, timeout=240, kernel_name="python3", resources={"metadata": {"path": tmp_path / "work"}}).execute()
    composed, trained, loaded, predicted, swept, table = (cell.outputs for cell in notebook.cells if cell.cell_type == "code")
    bars = [one for one in trained if "<progress" in one.get("data", {}).get("text/html", "")]
    assert len(bars) == 1
    assert "88/88" in bars[0].data["text/plain"]
    assert "is_new=True" in trained[-1].data["text/plain"]
    assert any("valid/accuracy" in str(one.get("data") or one.get("text")) and "(best)" in str(one) for one in trained)
    found, true = (re.findall(r"\d", row) for row in re.findall(r"\[[\d, ]+\]", loaded[-1].data["text/plain"]))
    assert sum(one == other for one, other in zip(found, true, strict=True)) >= 6
    assert "'class': '0'" in predicted[-1].data["text/plain"]
    assert swept[-1].data["text/plain"].count("finished") == 2
    assert table[-1].data["text/plain"].count("resnet18_digits") == 3
    assert "resnet18_digits" in composed[-1].data["text/plain"]


CHROMIUM = shutil.which("chromium") or shutil.which("google-chrome")


def test_every_page_is_in_the_navigation_once(repository: Path) -> None:
    named = re.findall(r"^ +- docs/(\S+)\.md$", (repository / "mkdocs.yml").read_text(), re.MULTILINE)
    docs = repository / "docs"
    assert sorted(named) == sorted(str(page.relative_to(docs).with_suffix("")) for page in (*docs.glob("*.md"), *docs.glob("decisions/*.md")))


@pytest.mark.slow
@pytest.mark.skipif(CHROMIUM is None, reason="there is no Chromium: apt-get install chromium")
@pytest.mark.skipif(importlib.util.find_spec("playwright") is None, reason="playwright is not installed")
@pytest.mark.skipif(importlib.util.find_spec("zensical") is None, reason="zensical is not installed: make install")
def test_the_site_builds_without_a_warning_and_every_link_in_it_leads_somewhere(repository: Path, tmp_path: Path) -> None:
    from playwright.sync_api import sync_playwright

    shutil.copy(repository / "mkdocs.yml", tmp_path)
    (tmp_path / ".package").symlink_to(repository / ".package")
    for command in ([repository / "docs" / "reference.py", "build/pages"], ["-m", "zensical", "build", "--strict"]):
        done = subprocess.run([sys.executable, *command], cwd=tmp_path, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout + done.stderr
    first = (tmp_path / "build" / "site" / "index.html").as_uri()
    anchors, links, failed = dict[str, set[str]](), set[tuple[str, str]](), list[str]()
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox", "--disable-dev-shm-usage"])
        page = browser.new_page()
        # A page that is left before its icon has been read aborts that request
        page.on("requestfailed", lambda request: failed.append(request.url) if request.failure != "net::ERR_ABORTED" else None)
        page.on("pageerror", lambda error: failed.append(str(error)))
        page.on("request", lambda request: failed.append(request.url) if request.url.startswith("http") else None)
        left = [first]
        while left:
            here = left.pop()
            page.goto(here)
            anchors[here] = set(page.locator("[id]").evaluate_all("all => all.map(one => one.id)"))
            for href in page.locator("a[href]").evaluate_all("all => all.map(one => one.href)"):
                target = urldefrag(href)[0]
                if target.startswith("file:"):
                    links.add((here, href))
                    if target.endswith(".html") and target not in {*anchors, *left} and Path(unquote(target.removeprefix("file://"))).exists():
                        left.append(target)
        page.goto(first)
        page.locator(".md-search__button").click()
        page.get_by_role("combobox", name="Search").fill("topk_candidates")
        page.get_by_role("listbox").locator("a[href*='groups/model.html']").first.wait_for()
        browser.close()
    lost = {
        (here.rpartition("/")[2], href)
        for here, href in links
        for target, anchor in [urldefrag(href)]
        if not Path(unquote(target.removeprefix("file://"))).exists() or (anchor and target in anchors and unquote(anchor) not in anchors[target])
    }
    assert lost == set()
    assert failed == []
    assert {page.with_suffix(".html").name for page in (repository / "docs").glob("*.md")} <= {here.rpartition("/")[2] for here in anchors}
    assert len(links) > 1000


COPIED = (".package", "configs", "datasets", "docs", "recipes", "runner", "tests", "pyproject.toml")


@pytest.mark.slow
def test_the_loss_of_the_worked_example_passes_its_tests_and_lint(repository: Path, tmp_path: Path) -> None:
    for name in COPIED:
        if (repository / name).is_dir():
            shutil.copytree(repository / name, tmp_path / name, symlinks=True, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy(repository / name, tmp_path)
    text = PAGES["CONTRIBUTING.md"].read_text()
    make_folder("CONTRIBUTING.md", tmp_path)
    changes = "".join(block.text for block in blocks(text) if block.language == "diff")
    subprocess.run(["git", "apply", "-"], input=changes, cwd=tmp_path, text=True, check=True)
    commands = re.findall(r"^    ((?:samewise|python) .+)$", text, re.M)
    assert len(commands) == 3
    variables = {**os.environ, "PYTHONPATH": str(tmp_path / ".package")}
    for command in [*commands, "python -m ruff check recipes tests", "python -m ruff format --check recipes tests"]:
        words = command.replace("samewise ", "python -m samewise ").split()
        done = subprocess.run([sys.executable, *words[1:]], cwd=tmp_path, env=variables, capture_output=True, text=True, check=False)
        assert done.returncode == 0, f"{command}\n{done.stdout}{done.stderr}"
    assert "losses.Poly  a torch.nn.Module, class" in (tmp_path / "tests" / "security" / "reachable.txt").read_text()
