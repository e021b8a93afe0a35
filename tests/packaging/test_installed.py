"""samewise installed as a wheel and as an editable package beside Hugging Face's `datasets`, really installed, used from several folders.

Each scratch environment sees the packages of the environment that runs the tests through a .pth file, after its own: torch is not installed again. A .pth file
that is found this way is not read, so the samewise of the running environment stays out of sight.
"""

import shutil
import subprocess
import sys
import sysconfig
import venv
from dataclasses import dataclass
from pathlib import Path

import pytest

pytestmark = [pytest.mark.slow]

WHERE_IT_IS = """
import datasets, samewise, samewise.datasets as ours
print(datasets.__file__, samewise.__file__, *ours.__path__, callable(datasets.load_dataset), sep="\\n")
"""


@dataclass(frozen=True)
class Installed:
    """A scratch environment with samewise in it.

    Args:
        folder: The environment.
        home: The folder `samewise` has to be imported from.
        variables: The environment variables of its commands.
    """

    folder: Path
    home: Path
    variables: dict[str, str]

    def __call__(self, command: str, *arguments: str, cwd: Path) -> str:
        """Run one of the environment's commands in `cwd`; return its output."""
        line = [str(self.folder / "bin" / command), *arguments]
        result = subprocess.run(line, cwd=cwd, env=self.variables, capture_output=True, text=True, timeout=240, check=False)
        assert result.returncode == 0, f"{line} in {cwd}\n{result.stdout}\n{result.stderr}"
        return result.stdout


def pip(*arguments: str, python: Path | None = None) -> subprocess.CompletedProcess[str]:
    where = ["--python", str(python)] if python else []
    command = [sys.executable, "-m", "pip", *where, *arguments, "--quiet", "--retries", "1", "--timeout", "20"]
    return subprocess.run(command, capture_output=True, text=True, timeout=240, check=False)


@pytest.fixture(scope="module")
def hugging_face(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A wheel of Hugging Face's `datasets`, from the package index."""
    folder = tmp_path_factory.mktemp("download")
    result = pip("download", "datasets", "--no-deps", "--dest", str(folder))
    if result.returncode != 0:
        pytest.skip(f"no package index that has Hugging Face's datasets: {result.stderr.strip().splitlines()[-1]}")
    (wheel,) = folder.glob("datasets-*.whl")
    return str(wheel)


@pytest.fixture(scope="module")
def installed(
    request: pytest.FixtureRequest, repository: Path, hugging_face: str, clean_environment: dict[str, str], tmp_path_factory: pytest.TempPathFactory
) -> Installed:
    folder = tmp_path_factory.mktemp(request.param) / "environment"
    venv.create(folder, with_pip=False)
    python = folder / "bin" / "python"
    packages = folder / "lib" / f"python{sys.version_info.major}.{sys.version_info.minor}" / "site-packages"
    (packages / "zz_parent.pth").write_text(sysconfig.get_path("purelib") + "\n")
    source = ["--editable", str(repository)] if request.param == "editable" else [str(repository)]
    for arguments in (["--no-deps", "--no-build-isolation", "--ignore-installed", "--no-index", *source], [hugging_face]):
        result = pip("install", *arguments, python=python)
        assert result.returncode == 0, result.stderr
    home = repository / ".package" / "samewise" if request.param == "editable" else packages / "samewise"
    offline = {"HF_HOME": str(folder / "huggingface"), "HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1"}
    return Installed(folder, home, clean_environment | offline)


@pytest.fixture
def cwd(request: pytest.FixtureRequest, repository: Path, tmp_path: Path) -> Path:
    return {"the root": repository, "the tests' folder": repository / "tests", "another folder": tmp_path}[request.param]


PLACES = [("wheel", "another folder"), ("wheel", "the root"), ("editable", "the tests' folder")]
from_places = pytest.mark.parametrize(("installed", "cwd"), PLACES, indirect=True)


@from_places
def test_datasets_is_hugging_faces_and_samewise_datasets_is_ours(installed: Installed, cwd: Path) -> None:
    theirs, package, ours, loads = installed("python", "-c", WHERE_IT_IS, cwd=cwd).splitlines()
    assert Path(theirs).is_relative_to(installed.folder)
    assert Path(package) == installed.home / "__init__.py"
    assert Path(ours) == installed.home / "datasets"
    assert loads == "True"


@pytest.mark.parametrize(("installed", "cwd"), PLACES[1:], indirect=True)
def test_the_command_and_the_module_run(installed: Installed, cwd: Path) -> None:
    answer = installed("samewise", "--help", cwd=cwd)
    assert "train" in answer
    assert installed("python", "-m", "samewise", "--help", cwd=cwd) == answer
    assert "torch.optim.SGD" in installed("samewise", "list", "optimizer", cwd=cwd)


@from_places
def test_pytest_as_a_module_sees_both_packages_pickles_and_spawns(installed: Installed, repository: Path, cwd: Path) -> None:
    """`python -m pytest` puts the current folder first on the path, which is where a shadow would show."""
    test = repository / "tests" / "packaging" / "test_neighbours.py"
    answer = installed("python", "-m", "pytest", "-q", "-p", "no:cacheprovider", "-c", str(repository / "pyproject.toml"), str(test), cwd=cwd)
    assert " passed in " in answer
    assert "skipped" not in answer


@pytest.mark.parametrize("installed", ["wheel", pytest.param("editable", marks=pytest.mark.long)], indirect=True)  # nothing of the tests is installed
def test_all_tests_are_collected_next_to_hugging_faces_package(installed: Installed, repository: Path) -> None:
    installed("python", "-m", "pytest", "-q", "-p", "no:cacheprovider", "--collect-only", cwd=repository)


BYTES = 12 * 2**30
"""Of free disk: torch's libraries for CUDA lie in pip's cache, too."""
COMMANDS = """
import sys
from pathlib import Path
from samewise import configs
from samewise.runner.cli import main

def run(*arguments):
    assert main(list(arguments)) == 0, arguments
    print("done:", *arguments, flush=True)

for name in ("resnet18_digits", "gan_digits"):  # whose data nobody downloads
    run("check", f"experiment={name}")
for file in sorted((Path(configs.__path__[0]) / "experiment").glob("*.yaml")):
    if "transformers" not in file.read_text():  # that package is an extra
        run("check", f"experiment={file.stem}", "debug=tiny")
for name in sys.argv[1:]:
    run("train", f"experiment={name}", "debug=tiny")
"""
OF_RECIPES = ("resnet18_digits", "retinanet_bccd", "wav2letter_spoken_digits", "conv_tasnet_spoken_digits", "wavernn_spoken_digits")


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_experiments_check_and_train_in_an_environment_made_without_the_lock(repository: Path, clean_environment: dict[str, str], tmp_path: Path) -> None:
    if (free := shutil.disk_usage(tmp_path).free) < BYTES:
        pytest.skip(f"no room for another environment: {free / 2**30:.1f} GiB are free")
    pip = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--retries", "1"]
    index = subprocess.run([*pip, "--dest", tmp_path, "xxhash"], capture_output=True, text=True)
    if index.returncode:
        pytest.skip(f"no package index: {index.stderr.strip().splitlines()[-1]}")

    environment = tmp_path / "environment"
    venv.create(environment, with_pip=True)
    python = environment / "bin" / "python"
    install = [python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", repository]
    done = subprocess.run(install, env=clean_environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr

    variables = clean_environment | {"PYTHONHASHSEED": "0"}
    command = [python, "-c", COMMANDS, *OF_RECIPES]
    done = subprocess.run(command, cwd=tmp_path, env=variables, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert len(list(tmp_path.glob("runs/*/*/summary.json"))) == len(OF_RECIPES)
