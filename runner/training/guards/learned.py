"""Finds what is learned outside of the model, and parameters that nothing trains."""

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any, final

from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from samewise.runner.data.loading import MicroBatch
from samewise.runner.errors import ConfigError, Problem, first_few
from samewise.runner.interfaces import Recipe
from samewise.runner.training.run import Caution, Guard, Run


@final
class LearnedElsewhere(Guard):
    """Refuses tensors that require gradients but are not the model's parameters.

    No optimizer trains such tensors, and no checkpoint holds them.
    """

    def at_start(self, run: Run) -> Iterable[Caution]:
        trained = {id(x) for x in (*run.parameters, *run.model.parameters())}
        packages = {name.partition(".")[0] for name in run.composed.project.packages}
        hints = {
            "recipe": "move it into the model, whose forward then computes with it",
            "model": "make it an nn.Parameter, or keep modules in an nn.ModuleList or "
            "nn.ModuleDict",
        }
        # Without the model where a strategy gives its layers pieces of their weights
        parts = {"recipe": run.recipe} | ({"model": run.model} if run.strategy.compiles else {})
        problems = list[Problem]()
        for path, part in parts.items():
            learned = [name for name, x in _learned(part, packages, set()) if id(x) not in trained]
            if not learned:
                continue
            names = first_few([f"{type(part).__name__}{name}" for name in learned], 3)
            problems.append(
                Problem(
                    path,
                    f"{names}: requires a gradient, but is not part of the model: no optimizer trains "
                    "it, and no checkpoint holds it",
                    expected="everything learned in the model",
                    hint=f"{hints[path]}; or freeze it, if it is constant: requires_grad_(False)",
                )
            )
        ConfigError.raise_all(problems)
        return ()


@final
class UntrainedParameters(Guard):
    """Finds parameters that get no gradient in the first step."""

    def __init__(self, run: Run) -> None:
        self._reached = set[nn.Parameter]()
        self._trained = dict[str, nn.Parameter]()
        self._hooks = list[RemovableHandle]()
        self._is_first = run.strategy.compiles

    def before_step(self, run: Run, micro_batches: Sequence[MicroBatch]) -> Iterable[Caution]:
        if self._is_first:
            # The first entry has all parameters that wait, however long
            waiting = [
                x for phase in run.phases for later in phase.waiting[:1] for x in later.parameters
            ]
            skipped = [
                x
                for phase in run.phases
                if not phase.spec.turns(run.step)
                for x in phase.parameters
            ]
            untrained = {*map(id, (*waiting, *skipped))}
            self._trained = {
                name: x
                for name, x in run.model.named_parameters()
                if x.requires_grad and id(x) not in untrained
            }
            self._hooks = [
                x.register_post_accumulate_grad_hook(self._reached.add)
                for x in self._trained.values()
            ]
        return ()

    def after_step(self, run: Run) -> Iterable[Caution]:
        for hook in self._hooks:
            hook.remove()
        trained, self._trained = self._trained, {}
        self._hooks, self._is_first = [], False
        if idle := [name for name, x in trained.items() if x not in self._reached]:
            yield Caution(
                Problem(
                    "model",
                    f"nothing trains {first_few(idle, 3)}: no phase's loss gave a gradient in the "
                    "first step",
                    hint="train them in a phase, or freeze them: initialise.frozen=[NAMES]",
                )
            )


def _learned(
    value: Any, packages: Collection[str], visited: set[int]
) -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors that require gradients in an object, with their path: `.loss.centres`.

    It enters containers, modules, recipes and objects of the user's classes.
    """
    if id(value) in visited:
        return
    # Objects may refer to each other in a circle
    visited.add(id(value))
    inside: Iterable[tuple[Any, Any]] = ()
    if isinstance(value, Tensor):
        if value.requires_grad and value.is_leaf:
            yield "", value
    elif isinstance(value, Mapping):
        inside = value.items()
    elif isinstance(value, list | tuple | set):
        inside = enumerate(value)
    elif isinstance(value, nn.Module):
        attributes = [
            (name, item) for name, item in vars(value).items() if name not in vars(nn.Module())
        ]
        inside = [*value.named_parameters(recurse=False), *value.named_children(), *attributes]
    elif isinstance(value, Recipe) or (
        type(value).__module__.partition(".")[0] in packages and hasattr(value, "__dict__")
    ):
        inside = vars(value).items()
    for name, item in inside:
        yield from (
            (f".{name}{further}", tensor) for further, tensor in _learned(item, packages, visited)
        )
