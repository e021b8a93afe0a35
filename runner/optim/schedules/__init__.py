"""Schedules: the learning rate and other options as functions of the step."""

from .adapter import TorchSchedule
from .base import Group, LearningRate, Options, Schedule, Span, Unit
from .combine import ByOptimizer, Chained, Sequential
from .decay import Constant, Cosine, Exponential, MultiStep, Polynomial, Step
from .one_cycle import OneCycle
from .plateau import Plateau
from .warmup import ConstantWarmup, LinearWarmup

__all__ = [
    "ByOptimizer",
    "Chained",
    "Constant",
    "ConstantWarmup",
    "Cosine",
    "Exponential",
    "Group",
    "LearningRate",
    "LinearWarmup",
    "MultiStep",
    "OneCycle",
    "Options",
    "Plateau",
    "Polynomial",
    "Schedule",
    "Sequential",
    "Span",
    "Step",
    "TorchSchedule",
    "Unit",
]
