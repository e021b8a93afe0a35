"""Log the learning rate of each parameter group that begins with a different one."""

from typing import final

from samewise.runner.interfaces import Callback, Outcome, RunView


@final
class LearningRateLog(Callback):
    """Logs `train/lr`, or `train/lr/0`, `train/lr/1`, ... if groups differ.

    With several optimizers, `train/lr/PHASE` and so on for each.

    Args:
        every_steps: Steps between two entries.
    """

    def __init__(self, *, every_steps: int = 1) -> None:
        self._every = max(every_steps, 1)

    def on_step(self, run: RunView, outcome: Outcome) -> None:
        if outcome.step % self._every:
            return
        rates_by_phase = run.learning_rates()
        for phase, rates in rates_by_phase.items():
            name = "train/lr" if len(rates_by_phase) == 1 else f"train/lr/{phase}"
            run.log(
                {name: rates[0]}
                if len(rates) == 1
                else {f"{name}/{number}": rate for number, rate in enumerate(rates)}
            )
