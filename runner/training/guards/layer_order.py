"""Finds blocks that compute in another order than layer-wise learning rates assume."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import partial
from itertools import pairwise
from typing import final

from torch.utils.hooks import RemovableHandle

from samewise.runner.data.loading import MicroBatch
from samewise.runner.errors import Problem
from samewise.runner.optim.groups import ranked_blocks
from samewise.runner.training.run import Caution, Guard, Run


@final
class LayerOrder(Guard):
    """Compares the order in which blocks compute with that of `param_groups`' `layer_decay`."""

    def __init__(self, run: Run) -> None:
        self._ranked = ranked_blocks(run.model, run.config.param_groups or {})
        self._used = dict[str, None]()
        self._hooks = list[RemovableHandle]()

    def before_step(self, run: Run, micro_batches: Sequence[MicroBatch]) -> Iterable[Caution]:
        self._hooks = [
            part.register_forward_pre_hook(partial(self._note, name))
            for name, part in run.model.named_modules()
            if name in self._ranked
        ]
        return ()

    def _note(self, name: str, *_: object) -> None:
        self._used[name] = None

    def after_step(self, run: Run) -> Iterable[Caution]:
        for hook in self._hooks:
            hook.remove()
        for former, latter in pairwise(self._used):
            if self._ranked.index(latter) < self._ranked.index(former):
                message = (
                    f"layer_decay takes '{latter}' to be further from the output than '{former}', "
                    "after which it computes"
                )
                hint = "define the model's parts in the order in which they compute"
                yield Caution(Problem("param_groups", message, hint=hint))
                return
