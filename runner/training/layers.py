"""Summarises a run's model by layer: shapes, parameters and operations, for `check`."""

from collections import Counter
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from math import ceil, prod
from typing import Any

from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from samewise.runner.data import streams
from samewise.runner.data.device import copied
from samewise.runner.data.loading import MicroBatch
from samewise.runner.optim.parametrise import Mask
from samewise.runner.records.console import align
from samewise.runner.records.digest import tensors_in
from samewise.runner.strategies.tree import unchanged_buffers
from samewise.runner.torch_private import attention_for_cpu
from samewise.runner.training.losses import first_samples, loss_of
from samewise.runner.training.run import Run

Layer = dict[str, Any]


def summarise(run: Run, depth: int) -> list[Layer]:
    """Describe the model and the modules inside it.

    Takes a forward pass of two samples at most. Where that fails, there are no shapes, and no
    operations.

    Args:
        run: The run.
        depth: How many levels of modules to return; 0: only the model.

    Returns:
        Modules in the model's order. `name` is the path in the model, empty for the model itself,
        and `type` the class. `output` has the shapes of the tensors that the first call returned.
        `parameters` counts those of the modules inside too, each once, `trained` those of them that
        are trained, and `pruned` the weights that stay zero. `operations` are floating-point
        operations for a sample in a forward pass of each phase, those of the modules inside too: a
        multiplication and an addition are two. As in torch's `FlopCounterMode`, matrix products,
        convolutions and attention count.
    """
    samples = min(2, ceil(run.batch_size / run.micro_batches))
    outputs, operations = dict[str, list[list[int]]](), Counter[str | None]()
    with suppress(Exception):
        _forward(run, samples, outputs, operations)
    del operations[None]
    return [
        {
            "name": name,
            "type": type(module).__name__,
            "output": outputs.get(name, []),
            "parameters": sum(x.numel() for x in module.parameters()),
            "trained": sum(x.numel() for x in module.parameters() if x.requires_grad),
            "pruned": sum(int((~x.mask).sum()) for x in module.modules() if isinstance(x, Mask)),
            "operations": sum(
                operations[x] for x in operations if not name or f"{x}.".startswith(f"{name}.")
            )
            // samples,
        }
        for name, module in run.model.named_modules()
        if not name or name.count(".") < depth
    ]


def _forward(
    run: Run,
    samples: int,
    outputs: dict[str, list[list[int]]],
    operations: Counter[str | None],
) -> None:
    """Note the outputs' shapes, and each module's operations outside the modules inside it."""
    counter = FlopCounterMode(
        display=False, custom_mapping={attention_for_cpu: _attention_operations}
    )
    # The modules in whose calls the pass is; below them None, the recipe
    calls: list[str | None] = [None]

    def count() -> None:
        operations[calls[-1]] += counter.get_total_flops() - operations.total()

    def enter(name: str, *_: Any) -> None:
        count()
        calls.append(name)

    def leave(name: str, _module: nn.Module, _inputs: Any, output: Any) -> None:
        count()
        calls.pop()
        outputs.setdefault(name, [list(x.shape) for x in tensors_in(output)])

    with streams.preserve_generators(), unchanged_buffers(run.model):
        batch = first_samples(run, samples)
        with watched_calls(run.model, enter, leave), counter:
            for phase in run.phases:
                with phase.training(run.step):
                    loss_of(run, phase, MicroBatch(0, copied(batch)), model=run.model)


@contextmanager
def watched_calls(
    model: nn.Module, enter: Callable[..., None], leave: Callable[..., None]
) -> Generator[None]:
    """Call functions with each module's name and its hook's arguments, before and after a pass."""
    with ExitStack() as stack:
        for name, module in model.named_modules():
            stack.callback(module.register_forward_pre_hook(partial(enter, name)).remove)
            stack.callback(module.register_forward_hook(partial(leave, name)).remove)
        yield


def _attention_operations(
    query: Sequence[int], key: Sequence[int], value: Sequence[int], *_: Any, **_options: Any
) -> int:
    """Count as torch does for attention on CUDA, whose kernel for the CPU has no formula."""
    return 2 * prod(query[:-1]) * key[-2] * (query[-1] + value[-1])


def table_lines(layers: Sequence[Layer]) -> Iterator[str]:
    """Yield the layers as a table."""
    rows = (
        (
            x["name"] or "model",
            x["type"],
            ", ".join(" x ".join(map(str, shape)) for shape in x["output"][:1])
            + ", ..." * (len(x["output"]) > 1),
            f"{x['parameters']:,}"
            + f" ({x['trained']:,} trained)" * (x["trained"] < x["parameters"])
            + f" ({x['pruned'] / (x['parameters'] or 1):.1%} pruned)" * (x["pruned"] > 0),
            f"{x['operations'] / 1e6:,.2f}",
        )
        for x in layers
    )
    return align([("layer", "type", "output", "parameters", "Mflop"), *rows], "<<<>>")
