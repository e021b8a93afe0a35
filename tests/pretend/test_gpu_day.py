"""`tests/gpu/day.py` checks in one go what only a GPU can show; the tests here check that the script itself works, without a GPU."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from samewise.runner.records import environment


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


def test_variables_that_choose_cuda_kernels_are_recorded_as_deciding(device: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def facts() -> dict[str, Any]:
        return environment._device(torch.device("cuda"))

    before = facts()
    assert (before["multiprocessors"], before["nccl"]) == (132, ".".join(map(str, torch.cuda.nccl.version())))
    monkeypatch.setenv("NCCL_ALGO", "Ring")
    assert facts() == {**before, "variables": {**before["variables"], "NCCL_ALGO": "Ring"}}
    one, two = ({"decides": {"device": each}} for each in (before, facts()))
    assert environment.differences(one, two)
