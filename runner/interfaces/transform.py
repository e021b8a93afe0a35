"""A transform of a whole batch."""

import abc

from torch import Tensor, nn

from samewise.runner.interfaces.batch import Batch, batch_size


class BatchTransform(nn.Module, abc.ABC):
    """A transform of a whole batch on its device, with random choices of its own for each sample.

    Drawing and applying are apart so that a batch gives what its samples give one by one: `draw`
    uses the CPU's default generator (which the step's stream has seeded; so CPU and CUDA choose
    alike), `apply` is a pure function of the batch and the choices.
    """

    takes_encoded = False
    """Whether it decodes the images of a data set whose attribute `encoded` is true; it must then
    be the first."""

    needs_places = False
    """Whether in training it needs the entry `place`, int64[B, 2], on the batch's device: each
    sample's epoch, from 0, and its index in the data set."""

    mixes = False
    """Whether it mixes each sample with the one before, in its micro-batch: training warns if that
    is the same image."""

    def draw(self, batch: Batch, size: int) -> dict[str, Tensor]:
        """Random choices for `size` samples: names to CPU tensors whose first dimension is `size`.

        Default: none.
        """
        return {}

    @abc.abstractmethod
    def apply(self, batch: Batch, choices: dict[str, Tensor]) -> Batch:  # pyright: ignore[reportIncompatibleMethodOverride] (Module.apply is for submodules: it has none)
        """A new batch (its own dict; tensors not changed in place).

        `choices` as drawn, still on the CPU.
        """

    def forward(self, batch: Batch) -> Batch:
        # Drawn apart, on the CPU, so that CPU and CUDA choose alike
        return self.apply(batch, self.draw(batch, batch_size(batch)))
