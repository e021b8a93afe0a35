"""Classes that users subclass: a recipe, its scores, a callback, a batch transform.

Recipes and data sets import this package and `errors` only.
"""

from samewise.runner.interfaces.batch import Batch, batch_size, class_names, of_labels
from samewise.runner.interfaces.callback import Callback, Outcome, RunView
from samewise.runner.interfaces.recipe import Form, Loss, Phase, Recipe, is_loss
from samewise.runner.interfaces.results import MeanLosses, Prediction, Scores
from samewise.runner.interfaces.transform import BatchTransform

# For tables that a recipe writes
from samewise.runner.secrets import plain_cell

__all__ = [
    "Batch",
    "BatchTransform",
    "Callback",
    "Form",
    "Loss",
    "MeanLosses",
    "Outcome",
    "Phase",
    "Prediction",
    "Recipe",
    "RunView",
    "Scores",
    "batch_size",
    "class_names",
    "is_loss",
    "of_labels",
    "plain_cell",
]
