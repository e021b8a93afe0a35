"""Add the training's mean losses to each evaluation."""

from collections.abc import Mapping
from typing import Any

from samewise.runner.interfaces import Callback, Outcome, RunView


class TrainingMeans(Callback):
    """Adds `train/mean/NAME`, the mean of a loss or its part since the last evaluation.

    Means are over the items that the recipe counts, in all steps, on all ranks. A subclass may
    compute metrics from them in `metrics`, such as an F1 score from parts that count.
    """

    adds = ("train/mean/",)

    def __init__(self) -> None:
        self._sums = dict[str, list[float]]()

    def on_step(self, run: RunView, outcome: Outcome) -> None:
        for name, mean in outcome.losses.items():
            total, count = self._sums.get(name, (0.0, 0.0))
            self._sums[name] = [total + mean * outcome.count, count + outcome.count]

    def metrics(self) -> Mapping[str, float]:
        sums, self._sums = self._sums, {}
        return {f"train/mean/{name}": total / count for name, (total, count) in sums.items()}

    def state_dict(self) -> dict[str, Any]:
        return {"sums": {**self._sums}}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._sums = {**state.get("sums", {})}
