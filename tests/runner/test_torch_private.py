"""What samewise needs of torch's private parts is in one list, and is there; and torchaudio beside a torch that its compiled library was not made for."""

import ast
import importlib.util
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from samewise.runner import torch_private

ROOT = Path(__file__).resolve().parents[2]


def missing(names: list[str]) -> Iterator[str]:
    for name in names:
        try:
            getattr(torch_private, name)
        except ImportError as error:
            yield str(error)


def test_torch_has_every_part() -> None:
    assert list(missing(list(torch_private.NEEDED))) == []


def private_names(code: str) -> Iterator[str]:
    """The names below torch with a part that begins with `_`: what is imported, and what is reached by dots."""
    for node in ast.walk(ast.parse(code)):
        if isinstance(node, ast.ImportFrom):
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        else:
            names = [ast.unparse(node)] if isinstance(node, ast.Attribute) else []
        yield from (name for name in names if re.fullmatch(r"(torch|nn|dist)(\.\w+)*\._[a-zA-Z]\w*(\.\w+)*", name))


def test_nothing_else_reaches_for_them() -> None:
    files = [file for folder in ("runner", "recipes", "datasets") for file in (ROOT / folder).rglob("*.py")]
    found = {f"{file.relative_to(ROOT)}: {name}" for file in files for name in private_names(file.read_text())}
    assert found == {"runner/torchaudio_import.py: torch.ops._torchaudio"}  # torchaudio's


USE = """
import torchaudio, torchaudio.functional as AF
torch.manual_seed(0)
print(torchaudio.models.Wav2Letter(num_classes=5)(torch.randn(1, 1, 2000)).shape[1], AF.lowpass_biquad(torch.ones(1, 100), 8000, 1000.0).shape[1])
labels, frames, length = (torch.tensor(values, dtype=torch.int32) for values in ([[1, 2]], [4], [2]))
for compiled in (
    lambda: AF.forced_align(torch.zeros(1, 4, 5), labels),
    lambda: AF.rnnt_loss(torch.zeros(1, 4, 3, 5), labels, frames, length),
):
    try:
        compiled()
        print("computed")
    except RuntimeError as error:
        print(error)
"""


def outcome(path: Path, setting: str = "") -> list[str]:
    code = f"import sys, samewise, torch; sys.path.insert(0, {str(path)!r}); {setting}\n{USE}"
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", code], cwd=path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def test_torchaudios_python_works_without_its_library(tmp_path):
    package = tmp_path / "torchaudio"
    package.mkdir()
    spec = importlib.util.find_spec("torchaudio")
    assert spec is not None
    assert spec.origin is not None
    for part in Path(spec.origin).parent.iterdir():
        if part.name != "lib":
            (package / part.name).symlink_to(part)
    (package / "lib").mkdir()
    (package / "lib" / "_torchaudio.abi3.so").write_text("of another time")
    sizes, *errors = outcome(tmp_path)
    assert sizes == "5 100"
    for name, error in zip(("forced_align", "rnnt_loss"), errors, strict=True):
        assert f"{name} needs torchaudio's compiled library, which does not work with torch {torch.__version__}" in error
        assert "file too short" in error or "invalid ELF header" in error


@pytest.mark.slow
@pytest.mark.skipif(torch.version.cuda is None, reason="torch was built without CUDA")
@pytest.mark.parametrize(("minor", "works"), [("major + '.99'", True), ("'99.0'", False)])
def test_torchaudio_computes_beside_another_minor_version_of_cuda_only(tmp_path, minor, works):
    sizes, *rest = outcome(tmp_path, f"major = torch.version.cuda.partition('.')[0]; torch.version.cuda = {minor}")
    assert sizes == "5 100"
    assert rest == ["computed"] * 2 if works else all("different CUDA versions" in error for error in rest)


def test_what_needs_no_torchaudio_does_not_import_it(tmp_path):
    given = ["check", "experiment=resnet18_digits"]
    code = f"import sys; from samewise.runner.cli import main; sys.exit(main({given}) or 'torchaudio' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
