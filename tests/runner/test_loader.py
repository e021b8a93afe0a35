"""Configs are what Hydra composes, though samewise reads and merges the files; and a program's own use of Hydra stays as it was."""

import random
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import hydra
import pytest
from hydra.core.config_store import ConfigStore
from omegaconf import OmegaConf

from samewise.runner.config.loader import Loader
from samewise.runner.config.overrides import FAILURES
from samewise.runner.config.project import Project
from samewise.runner.config.schema import Experiment
from samewise.runner.config.tree import at, flat, plain

ROOT = Path(__file__).resolve().parents[2]
EXPERIMENTS = sorted(file.stem for file in (ROOT / "configs" / "experiment").glob("*.yaml"))[::4]
BARE = Project(ROOT)
RULES: Any = {"version_base": "1.3"} if hydra.__version__.startswith("1.3.") else {}


@pytest.fixture(scope="module", autouse=True)
def initialized() -> Iterator[None]:
    """Hydra, with samewise's configs, as a program of a user's sets it up."""
    ConfigStore.instance().store(name="schema", node=Experiment)
    with hydra.initialize_config_module("samewise.configs", **RULES):
        yield
    for resolver in ("hydra", "now", "python_version", "hydra_override_dirname", "hydra_deprecated_override_dirname"):
        OmegaConf.clear_resolver(resolver)


@pytest.mark.parametrize("experiment", EXPERIMENTS)
def test_every_experiment_composes_as_in_hydra(experiment: str) -> None:
    for more in ([], ["debug=tiny"]):
        given = [f"experiment={experiment}", *more]
        assert plain(Loader(BARE).compose(given)) == plain(hydra.compose("config", given))


def drawn(whole: Any, chance: random.Random) -> Iterator[str]:
    """Overrides, most of them wrong in some way."""
    paths = [path for path, _ in flat(whole)]
    for _ in range(chance.randint(1, 3)):
        path = chance.choice(paths)
        above, _, last = path.rpartition(".")
        path = chance.choice([path, path, above or path, f"{path}x", f"{above}.new" if above else "new"])
        mark, now = chance.choice(["", "", "+", "++", "~"]), at(whole, path)
        if mark == "~":
            if now is not None:  # which Hydra 1.4 removes, and 1.3 does not find
                yield f"~{path}{chance.choice(['', '=1'])}"
            continue
        yield f"{mark}{path}={chance.choice(['1', '0.5', 'null', 'word', '[1,2]', '{a:1}', f'{{{last}:2}}', 'true', '${seed}'])}"


@pytest.mark.parametrize("seed", range(15))
def test_overrides_of_values_apply_as_in_hydra(seed: int) -> None:
    base = ["experiment=resnet18_digits", "callbacks=[default,ema]"]
    given = [*base, *drawn(plain(Loader(BARE).compose(base)), random.Random(seed))]

    def outcome(compose: Any) -> Any:
        try:
            return OmegaConf.to_container(compose(given), resolve=False)
        except FAILURES:
            return "refused"

    assert outcome(Loader(BARE).compose) == outcome(lambda given: hydra.compose("config", given)), given


PROGRAM = """
import hydra, warnings
from hydra import compose, initialize_config_dir, version
from hydra.core.global_hydra import GlobalHydra
from hydra.core.utils import JobRuntime
from omegaconf import OmegaConf
from samewise.runner.config import compose as composing, project
warnings.simplefilter("error")
if AT_ONCE:
    composed = composing.compose(["experiment=resnet18_digits", "++dataset.x=${now:%Y}"], project=project.find(), strict=False)
    assert [one.path for one in composed.problems] == ["dataset.x"], composed.problems
rules = {"version_base": "1.2"} if hydra.__version__.startswith("1.3.") else {}
with initialize_config_dir(FOLDER, job_name="own", **rules):
    before = GlobalHydra.instance(), GlobalHydra.instance().hydra, version.getbase(), JobRuntime.instance().get("name")
    composing.compose(["experiment=resnet18_digits"], project=project.find())
    after = GlobalHydra.instance(), GlobalHydra.instance().hydra, version.getbase(), JobRuntime.instance().get("name")
    assert all(one is other for one, other in zip(before, after)), (before, after)
    cfg = compose("theirs", return_hydra_config=True)
assert (cfg.value, cfg.hydra.job.name, cfg.hydra.launcher._target_) == (3, "own", "hydra._internal.core_plugins.basic_launcher.BasicLauncher"), cfg
assert OmegaConf.create({"year": "${now:%Y}"}).year.isdecimal()
"""


@pytest.mark.parametrize("at_once", [True, False], ids=["before", "within"])
def test_a_program_that_uses_hydra_is_not_disturbed(at_once: bool, tmp_path: Path) -> None:
    (tmp_path / "theirs.yaml").write_text("value: 3\n")
    head = f"AT_ONCE, FOLDER = {at_once}, {str(tmp_path)!r}"
    done = subprocess.run([sys.executable, "-c", head + PROGRAM], capture_output=True, text=True, check=False, cwd=tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
