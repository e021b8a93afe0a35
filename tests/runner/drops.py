"""The source of a schedule that changes the momentum at a given step, for packages that tests write: a change that a trace has to show."""

DROPS = """
from samewise.runner.optim.schedules import Schedule

class Drops(Schedule):
    def __init__(self, drops_at, *, momentum):
        super().__init__(unit="step")
        self.drops_at, self.momentum = drops_at, momentum

    def at(self, step, options, group):
        return {**options, "momentum": self.momentum} if step + 1 >= self.drops_at else options
"""
