"""Two trainings of the project's experiment, much reduced, give the same weights."""

from __future__ import annotations

from pathlib import Path

import samewise


def test_two_trainings_give_the_same_weights(tmp_path: Path) -> None:
    tiny = ["debug=tiny", "max_steps=6", "tracking=none"]
    first, second = (
        samewise.train(*tiny, f"run_root={tmp_path / name}") for name in ("first", "second")
    )
    assert first.is_new
    assert second.is_new
    assert first.weights_sha256 == second.weights_sha256
