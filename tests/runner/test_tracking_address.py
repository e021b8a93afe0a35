from pathlib import Path

import pytest
from omegaconf import OmegaConf

from samewise.runner.config.schema import Tracking
from samewise.runner.errors import ConfigError
from samewise.runner.records.folder import RunFolder
from samewise.runner.tracking.address import problem
from samewise.runner.tracking.tracker import open_tracker


@pytest.mark.parametrize(
    ("uri", "word"),
    [
        ("mlruns", "sqlite:///mlruns/mlflow.db"),
        ("sqlite://", "needs a file"),
        ("htp://host", "did you mean 'http'?"),
        ("postgresql+no_such_driver://me:secret@host/db", "no_such_driver"),
    ],
)
def test_a_uri_that_mlflow_would_reject_is_refused_with_what_to_write(uri: str, word: str) -> None:
    found = problem(uri)
    assert found is not None
    assert word in str(found)
    assert "secret" not in str(found)


def test_a_store_that_cannot_be_written_is_refused_before_training(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path / "run")
    folder.create()
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="store cannot be written"):
        open_tracker(folder, OmegaConf.structured(Tracking(uri=f"sqlite:///{tmp_path}/file/mlflow.db")), resume_step=None)


def test_without_tracking_the_journal_is_the_only_record(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    folder.create()
    tracker = open_tracker(folder, OmegaConf.structured(Tracking(enabled=False, uri="nonsense://")), resume_step=None)
    tracker.start()
    tracker.log({"loss": 1.0}, 1)
    tracker.finish("FINISHED")
    assert tracker.run_id() is None
    assert folder.metrics.read_text().count("\n") == 3
    assert not folder.tracking.exists()
