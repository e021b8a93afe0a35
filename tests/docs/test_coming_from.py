"""docs/coming_from.md and docs/gallery.md are made from their tables and from runs, and what the tables say composes."""

import importlib
import json
import re
import runpy
import shlex
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from PIL import Image
from samewise_docs_coming_from import PAGE, page, tables
from samewise_docs_gallery import PAGE as GALLERY
from samewise_docs_gallery import in_page, of_runs, written
from samewise_docs_pages import PAGES, blocks, make_folder
from samewise_tiny import DIGITS
from sklearn.datasets import load_digits
from torch.optim import SGD, Adam
from torchvision.transforms.v2.functional import pil_to_tensor

import samewise
from samewise.runner.errors import ConfigError

PLACEHOLDER = re.compile(r"\b(NAME|RUN|FILE|KEY|GROUP|CHOICE|FOLDER)\b|hf:|torchvision:|^--")


def test_the_page_is_that_of_the_table() -> None:
    assert PAGE.read_text(encoding="utf-8") == page(), "python tests/docs/coming_from.py --write"


@pytest.mark.variant
@pytest.mark.parametrize("table", tables(), ids=lambda table: table["title"])
def test_every_override_of_the_table_composes(table: dict[str, Any]) -> None:
    tried = 0
    for _, ours, *_ in table["works"]:
        for code in re.findall(r"`([^`]+)`", ours):
            command = re.match(r"samewise \w+", code)
            # A sweep's values are settings of the same keys
            overrides = [part for part in shlex.split(code.removeprefix(command[0] if command else "")) if not (command and re.search(r"[,(]", part))]
            if not overrides or PLACEHOLDER.search(code.replace("experiment=NAME", "")) or not all(re.match(r"~|[^=]+=", part) for part in overrides):
                continue
            tried += 1
            try:
                samewise.compose(*table["experiment"], *(part for part in overrides if part != "experiment=NAME"))
            except ConfigError as error:
                pytest.fail(f"{code}: {error}")
    assert tried > 2


def test_the_page_has_the_figures_of_the_headers() -> None:
    page = GALLERY.read_text()
    assert len(in_page()) > 1
    assert page == written(page, in_page()), "python tests/docs/gallery.py --write RUN_ROOT"


@pytest.mark.slow
def test_a_row_has_the_result_of_its_run(samewise: Callable[..., Any], tmp_path: Path) -> None:
    done = samewise("train", *DIGITS, "model.width=4", "max_steps=3", f"run_root={tmp_path}", "--json")
    result = json.loads(done.stdout.splitlines()[-1])
    ((experiment, task, metric, time, _, digest),) = of_runs(tmp_path)
    assert "resnet18_digits" in experiment
    assert "width=4" in experiment
    assert "handwritten digits" in task
    assert metric == f"valid/accuracy {result['metrics']['final']['valid/accuracy']:.4f}"
    assert time.endswith("s, 3 steps")
    assert digest == f"`{samewise('digest', next(tmp_path.glob('*/*'))).stdout.split()[0][:16]}`"


LIGHTNING = "docs/coming_from_lightning.md"
SAME = ["loader.shuffle=false", "initialise.weights=initial.pt", "tracking=none", "max_epochs=2", "evaluate.pictures=false", "device=cpu"]
STEPS = 28
"""Of an epoch, after which Lightning counts batches from 0 again."""
Logged = dict[str, list[float]]


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """The page's project in the current folder, and initial weights of its networks; gives these."""
    make_folder(LIGHTNING, tmp_path)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    networks = importlib.import_module("lab.networks").Networks(width=64, code=8)
    torch.save(networks.state_dict(), "initial.pt")
    yield networks
    for name in [name for name in sys.modules if name.partition(".")[0] == "lab"]:
        del sys.modules[name]


def in_samewise(samewise: Any) -> tuple[Logged, torch.Tensor]:
    """What samewise logs, by Lightning's names, and its last picture."""
    done = samewise("train", "experiment=autoencoder", *SAME, "--json", code=0)
    folder = Path(json.loads(done.stdout)["folder"])
    lines = [json.loads(line).get("metrics", {}) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    names = {
        "train/distance_step": "train/autoencoder/distance",
        "train/distance_epoch": "train/mean/autoencoder/distance",
        "train/critic": "train/critic/loss",
        "valid/error": "valid/error",
    }
    return {name: [line[own] for line in lines if own in line] for name, own in names.items()}, pil_to_tensor(
        Image.open(folder / f"restored-{2 * STEPS:06d}.png")
    )


def by_hand(networks: Any) -> tuple[Logged, torch.Tensor | None]:
    """The same of a plain loop."""
    images = torch.tensor(load_digits().images, dtype=torch.float32)[:, None] / 16
    adam, sgd = Adam(networks.autoencoder.parameters(), lr=1e-3), SGD(networks.critic.parameters(), lr=0.05, momentum=0.9, weight_decay=1e-3)
    logged: Logged = {"train/distance_step": [], "train/distance_epoch": [], "train/critic": [], "valid/error": []}
    for _ in range(2):
        for number, batch in enumerate(images[:1400].split(50)):
            restored = networks.autoencoder(batch)
            distance = (restored - batch).square().mean()
            logged["train/distance_step"].append(distance.item())
            adam.zero_grad()
            (distance + 0.1 * torch.log1p(torch.exp(-networks.critic(restored))).mean()).backward()
            torch.nn.utils.clip_grad_norm_(networks.autoencoder.parameters(), 1.0)
            adam.step()
            if number % 2 == 0:
                sgd.zero_grad()
                with torch.no_grad():
                    restored = networks.autoencoder(batch)
                loss = -(F.logsigmoid(networks.critic(batch)) + F.logsigmoid(-networks.critic(restored))).mean()
                loss.backward()
                sgd.step()
                logged["train/critic"].append(loss.item())
        logged["train/distance_epoch"].append(sum(logged["train/distance_step"][-STEPS:]) / STEPS)
        with torch.no_grad():
            logged["valid/error"].append((networks.autoencoder(images[1400:]) - images[1400:]).abs().mean().item())
    return logged, None


def in_lightning(networks: Any) -> tuple[Logged, torch.Tensor | None]:
    """The same of the page's Lightning project, without shuffling."""
    lightning = pytest.importorskip("lightning", reason="lightning is in the extra `bench` only, not in the lock; a plain loop stands for it there")
    text = next(block.text for block in blocks(PAGES[LIGHTNING].read_text()) if "import lightning" in block.text)
    assert "shuffle=True, num_workers=2" in text
    Path("lit.py").write_text(text.replace("shuffle=True, num_workers=2", "shuffle=False"))
    lit = runpy.run_path("lit.py")
    logged: Logged = {"train/distance_step": [], "train/distance_epoch": [], "train/critic": [], "valid/error": []}

    class Log(lightning.pytorch.loggers.logger.DummyLogger):
        def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
            for name in logged.keys() & metrics.keys():
                logged[name].append(metrics[name])

    module = lit["LitAutoencoder"]()
    module.model.load_state_dict(networks.state_dict())
    quiet = {"enable_progress_bar": False, "enable_checkpointing": False, "enable_model_summary": False, "num_sanity_val_steps": 0}
    trainer = lightning.Trainer(max_epochs=2, log_every_n_steps=1, logger=Log(), callbacks=[lit["Pictures"]()], accelerator="cpu", **quiet)
    trainer.fit(module, lit["Digits"]())
    # Lightning logs the critic's last loss again in the steps that leave it out
    logged["train/critic"] = logged["train/critic"][::2]
    return logged, pil_to_tensor(Image.open(max(Path().glob("restored-*.png"))))


@pytest.mark.parametrize("reference", [by_hand, in_lightning])
def test_the_port_trains_as_the_lightning_project_and_a_plain_loop_do(samewise: Any, project: Any, reference: Any) -> None:
    logged, picture = in_samewise(samewise)
    expected, its_picture = reference(project)
    assert {name: len(values) for name, values in logged.items()} == {
        "train/distance_step": 56,
        "train/distance_epoch": 2,
        "train/critic": 28,
        "valid/error": 2,
    }
    for name, values in logged.items():
        assert values == pytest.approx(expected[name], rel=1e-4), name
    if its_picture is not None:
        assert (picture.int() - its_picture.int()).abs().max() <= 1
