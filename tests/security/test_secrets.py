"""Secrets (passwords, tokens, keys) stay with their user: they are not shown, not sent, and not recorded where others look."""

import http.server
import json
import subprocess
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, ClassVar

import pytest
import yaml

from samewise.runner.commands.ui import _command
from samewise.runner.config.compose import label_of
from samewise.runner.config.saved import config_in
from samewise.runner.errors import ConfigError, Problem, describe
from samewise.runner.records import header
from samewise.runner.records.environment import git_state
from samewise.runner.records.folder import RunFolder
from samewise.runner.secrets import redact, redact_values
from samewise.runner.tracking import tracker

SECRET = "hunter2x9"
TINY = ("experiment=resnet18_digits", "debug=tiny", "max_steps=2", "callbacks=none", "evaluate.pictures=false")


@pytest.mark.parametrize(
    "text",
    [
        *(f"postgresql+psycopg2://me:{SECRET}@host:5432/mlflow", f"https://{SECRET}@host/x", f"http://host/x?a=1&token={SECRET}&b=2"),
        *(f"https://account.blob/x?sv=1&sig={SECRET}", f"https://host/x?X-Amz-Security-Token={SECRET}", f"AWS_SECRET_ACCESS_KEY={SECRET}"),
        *(f"tracking.api_key={SECRET}", f'{{"password": "{SECRET}"}}', f"a:\n  hf_token: {SECRET}\n", f"postgresql+psycopg2://me:a/{SECRET}@host/db"),
        *(f"postgresql+psycopg2://me:a@{SECRET}@host/db", f"mssql+pyodbc:///?odbc_connect=DRIVER%3Dx%3BUID%3Dme%3BPWD%3D{SECRET}"),
        *(f"mssql+pyodbc:///?odbc_connect=UID=me;PWD={SECRET}", f"Authorization: Bearer {SECRET}", f"AccountName=a;AccountKey={SECRET};EndpointSuffix=x"),
        *(f"PGPASSWORD={SECRET}", f"MYSQL_PWD={SECRET}", f"python tool.py --token {SECRET} --seed 1", f"--api-key '{SECRET}'"),
        *(f"['tool', '--password', '{SECRET}']", f"pw={SECRET}", f"mail.db_pass={SECRET}", f"found sk-proj-{SECRET}Abcdefghij0123456789 in it"),
        *(f"hf_{SECRET}ABCDEFGHIJabcdefghij", f"https://host/x/ghp_{SECRET}abcdefghijABCDEFGHIJ0123456789", f"x: github_pat_{SECRET}_abcdefghijABCDEFGHIJ"),
        f"eyJhbGciOiJIUzI1NiJ9.eyJzdWIiOiIxMjM0In0.{SECRET}",
    ],
)
def test_secrets_are_recognised_by_their_context(text: str) -> None:
    assert SECRET not in redact(text)
    assert "***" in redact(text)
    assert SECRET not in describe(ConfigError(Problem("tracking.uri", text)))[1]


def test_values_are_hidden_by_their_key() -> None:
    told = redact_values({"a": {"access_token": SECRET, "n": [f"http://u:{SECRET}@h"]}, "secret": SECRET, "password": None})
    assert SECRET not in str(told)
    assert told["password"] is None
    assert redact_values({"pw": SECRET, "patch": {"pw": 16}}) == {"pw": "***", "patch": {"pw": 16}}
    assert redact_values(["x", "--token", SECRET, "--seed", "1"]) == ["x", "--token", "***", "--seed", "1"]


def test_the_label_of_a_run_new_or_old_holds_no_secret() -> None:
    """It is the run's name in MLflow and Weights & Biases, and a bundle's description."""
    assert label_of([f"+dataset.api_key={SECRET}", "optimizer.lr=0.1"]) == "api_key=*** lr=0.1"
    assert header.read(header.write({}, f"api_key={SECRET} lr=0.1")) == ({}, "api_key=*** lr=0.1")


@pytest.fixture
def trained(request: pytest.FixtureRequest, samewise: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The run root of a run whose tags have secrets, sent to a store: by its sender, or only by `sync`, since a sender takes seconds to start."""
    if getattr(request, "param", "sync") == "sync":
        monkeypatch.setattr(tracker, "_start", lambda *_: None)
    given = (f"+tracking.tags.api_key={SECRET}", f"+tracking.tags.where=http://me:{SECRET}@host", f"+dataset.api_key={SECRET}", "tracking.log_system=false")
    done = samewise("train", *TINY, f"run_root={tmp_path / 'runs'}", *given, code=0)
    assert SECRET not in done.stdout + done.stderr
    done = samewise("sync", "--run-root", tmp_path / "runs", code=0)
    assert SECRET not in done.stdout + done.stderr
    return tmp_path / "runs"


@pytest.mark.parametrize("trained", ["sync", pytest.param("sender", marks=pytest.mark.slow)], indirect=True)
def test_a_run_reveals_no_secret_but_its_own_config_keeps_it(trained: Path, samewise: Callable[..., Any]) -> None:
    from mlflow import MlflowClient

    (folder,) = trained.glob("resnet18_digits/*/config.yaml")
    client = MlflowClient(f"sqlite:///{trained}/mlflow.db")
    (run,) = client.search_runs([one.experiment_id for one in client.search_experiments()])
    sent = json.dumps([run.data.params, run.data.tags])
    assert SECRET not in sent
    assert "api_key=***" in str(run.info.run_name)
    assert SECRET.encode() not in (trained / "mlflow.db").read_bytes()
    assert "***" in sent
    assert not [file for file in (trained / "mlartifacts").rglob("*") if file.is_file() and SECRET in file.read_text(errors="replace")]
    assert config_in(RunFolder(folder.parent).config).cfg.tracking.tags.api_key == SECRET
    assert folder.parent.stat().st_mode & 0o077 == 0
    assert SECRET not in samewise("show", f"+tracking.tags.api_key={SECRET}").stdout


class _Listening(http.server.BaseHTTPRequestHandler):
    heard: ClassVar[list[str]] = []

    def _answer(self) -> None:
        self.heard.append(str(self.headers))
        self.send_response(401)
        self.end_headers()
        self.wfile.write(b"who are you?")

    do_GET = do_POST = _answer

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def theirs() -> Iterator[tuple[str, list[str]]]:
    """The address of a stranger's server, which refuses everybody, and what it heard."""
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), _Listening)
    _Listening.heard.clear()
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{server.server_address[1]}", _Listening.heard
    server.shutdown()
    thread.join()
    server.server_close()


@pytest.mark.slow
def test_sync_sends_no_token_to_an_address_that_a_received_run_names(
    trained: Path, theirs: tuple[str, list[str]], samewise: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_TOKEN", SECRET)
    address, heard = theirs
    (config,) = trained.glob("resnet18_digits/*/config.yaml")
    changed = yaml.safe_load(config.read_text())
    changed["tracking"]["uri"] = address
    config.write_text(yaml.safe_dump(changed))
    done = samewise("sync", config.parent, "--run-root", trained, code=2)
    assert "--trust" in done.stderr
    assert heard == []
    samewise("sync", config.parent, "--run-root", trained, "--uri", address)  # the user's explicit choice
    assert any(SECRET in line for line in heard)


@pytest.mark.parametrize("uri", [f"me:{SECRET}@host:5000", f"file://me:{SECRET}@host/x", f"http://me:{SECRET}@[::bad", f"http://me:x/{SECRET}@host:1"])
def test_an_invalid_address_is_reported_without_its_password(samewise, uri) -> None:
    done = samewise("ui", "--uri", uri, code=2)
    assert "--uri: is not a " in done.stderr
    assert "address" in done.stderr
    assert SECRET not in done.stderr


def test_the_ui_command_line_holds_no_password() -> None:
    assert SECRET not in " ".join(_command(f"postgresql+psycopg2://me:{SECRET}@host/db", 5000))


@pytest.fixture
def checkout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A git checkout with uncommitted changes, some of them secret."""
    secret = [".env", "deploy/prod.env", "a.pem", "b/server.key", "id_rsa", "credentials.json", "conf/Secrets.yaml", "secrets/x.txt"]
    for name in ("model.py", "keys.py", *secret):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("before\n")
    for command in (["init", "-q"], ["add", "-f", "."], ["-c", "user.name=a", "-c", "user.email=a@b", "commit", "-qm", "x"]):
        subprocess.run(["git", *command], cwd=tmp_path, check=True)
    for name in secret:
        (tmp_path / name).write_text(f"{SECRET}\n")
    (tmp_path / "model.py").write_text("width = 8\n")
    (tmp_path / "keys.py").write_text(
        f"KEY = '''-----BEGIN RSA PRIVATE KEY-----\n{SECRET}\n-----END RSA PRIVATE KEY-----'''\nuri = 'http://me:{SECRET}@host'\n"
    )
    monkeypatch.delenv("SAMEWISE_GIT_DIFF", raising=False)
    return tmp_path


def test_the_recorded_diff_holds_no_secret(checkout: Path) -> None:
    (checkout / "sub").mkdir()
    for here in (checkout, checkout / "sub"):
        state = git_state(here)
        assert state["dirty"]
        assert "+width = 8" in state["diff"]
        assert SECRET not in state["diff"]
