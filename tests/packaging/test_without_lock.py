"""What `pip install FOLDER` makes of an empty environment: the newest releases that the index, or pip's configuration, allows."""

import shutil
import subprocess
import sys
import venv
from pathlib import Path

import pytest

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
