"""`tests/gpu/day.py` checks in one go what only a GPU can show; the tests here check that the script itself works, without a GPU."""

import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.slow
@pytest.mark.long
def test_the_script_compares_the_bits_of_trainings_and_prints_the_results(repository: Path, clean_environment: dict[str, str]) -> None:
    command = [sys.executable, repository / "tests/gpu/day.py", "--device", "cpu", "--only", "bits", "--match", "JPEG", "--jobs", "2"]
    done = subprocess.run(command, env={**clean_environment, "OMP_NUM_THREADS": "1"}, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    results = [line for line in done.stdout.splitlines() if line.startswith("ok")]
    assert [line.split(":")[0] for line in results] == ["ok  classification"] * 3
    assert all("same bits (" in line for line in results)
    assert done.stdout.splitlines()[-1] == "3 of 3 as they should be"
