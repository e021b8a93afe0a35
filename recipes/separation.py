"""Speech separation: a mixture of S speakers into S signals.

The loss is the permutation-invariant scale-invariant SDR. Source: Luo and Mesgarani 2018,
Conv-TasNet, arXiv 1809.07454.
"""

from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, final

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence

from samewise.datasets.parts.audio_files import read_audio
from samewise.datasets.parts.folders import SOUNDS
from samewise.recipes.parts.forms import form_of
from samewise.recipes.parts.losses import SignalToNoise, of_samples
from samewise.recipes.parts.separation_scores import (
    FULL_SCALE,
    Example,
    MeasuredSeparation,
    SeparationScores,
)
from samewise.recipes.parts.si_sdr import (
    best_assignment,
    order_by_assignment,
    pairwise_si_sdr,
    select_assigned,
    si_sdr,
)
from samewise.recipes.parts.sounds import save_spectrograms, save_wav
from samewise.runner.errors import (
    ConfigError,
    DataError,
    Problem,
    none_hint,
    require_at_least,
)
from samewise.runner.interfaces import Batch, Loss, Phase, Prediction, Recipe

_HEARD_S = 4.0
_MOST_SDR = 160.0
"""Largest SDR in dB: 1 / (1 - coherence), with the largest float64 coherence below 1."""


@final
class Separation(Recipe):
    """Speech separation; batches have `mixture`, `sources`, `length` and `name`.

    A batch is `{"mixture": float32[B, T], "sources": float32[B, S, T], "length": int64[B], "name":
    [B]}`, padded with zeros. The model takes float32[B, 1, T] and returns float32[B, S, T] in any
    order and at any loudness, as `torchaudio.models.ConvTasNet` does.

    Evaluation separates mixtures at their own length, so that its figures do not depend on how the
    split is cut into batches: ConvTasNet's normalisation covers all of its input, with the padding.
    In training it does: a mixture's loss depends on the longest one of its micro-batch, unless all
    have the same length, as with `dataset.seconds` below the shortest.

    Args:
        sample_rate: The rate of all signals in Hz.
        loss: A module from estimates and true signals float[N, T] to float[N] (`parts.losses`), of
            which a mixture's loss is the mean over speakers under their best assignment; None:
            minus the SI-SDR. Losses other than `SignalToNoise` count as means over T. Evaluation
            reports this loss too, and assigns speakers by SI-SDR.
        sdr: Also evaluate the SDR of BSS eval (Vincent et al. 2006, by torchmetrics: no filter of
            up to 512 taps counts as distortion), which takes some 20 ms for a signal on one core.
            It ranges from -160 dB, for silence, to 160 dB, for signals that float64 cannot
            distinguish from the source. A silent source has no SDR and is left out of the means.

    Raises:
        ConfigError: `sample_rate` is less than 1.
    """

    gives = (
        "one signal for each speaker, in any order and at any loudness, at recipe.sample_rate Hz"
    )
    takes = "recordings"
    extensions = SOUNDS

    def __init__(
        self, *, sample_rate: int = 8000, sdr: bool = True, loss: nn.Module | None = None
    ) -> None:
        require_at_least({"recipe.sample_rate": sample_rate})
        self.criterion = loss
        self.sample_rate = sample_rate
        self.sdr = sdr

    def collate(self, samples: Sequence[Any]) -> Batch:
        """Collate and pad samples with `mixture` float32[T] and `sources` float32[S, T].

        In prediction, samples have no sources.

        Raises:
            DataError: A sample has another form, or its sources differ in length from the mixture,
                or in number from other samples'.
        """
        _check(samples)
        mixtures = [sample["mixture"] for sample in samples]
        batch: Batch = {"mixture": pad_sequence(mixtures, batch_first=True)}
        if "sources" in samples[0]:
            batch["sources"] = (
                # pad_sequence pads the first dimension
                pad_sequence([sample["sources"].t() for sample in samples], batch_first=True)
                .transpose(1, 2)
                .contiguous()
            )
        batch["length"] = torch.tensor([len(mixture) for mixture in mixtures])
        batch["name"] = [str(sample.get("name", "")) for sample in samples]
        return batch

    def loss(self, model: nn.Module, batch: Batch, phase: Phase) -> Loss:
        """Return minus the SI-SDR in dB, averaged over speakers, summed over the B mixtures.

        Speakers have their best assignment. This is the published formula, whose 1e-8 counts in
        very quiet signals (`si_sdr`); evaluation's is the same at any loudness.
        """
        pairwise = self._pairwise(
            _separate(model, batch["mixture"], batch["sources"].shape[1]), batch
        )
        reached = select_assigned(pairwise, best_assignment(pairwise)).mean(1)
        return Loss(-reached.sum(), count=len(reached))

    def measure(self, model: nn.Module, batch: Batch) -> MeasuredSeparation:
        sources, inside = batch["sources"].double(), _inside(batch)
        estimates = self._separate_one_by_one(model, batch, sources.shape[1]).double()
        pairwise = pairwise_si_sdr(estimates, sources, inside, any_loudness=True)
        assignment = best_assignment(pairwise)
        estimates = order_by_assignment(estimates, assignment)
        reached = select_assigned(pairwise, assignment).cpu()
        loss = (
            -reached
            if self.criterion is None
            else -self._pairwise(estimates, batch).diagonal(dim1=1, dim2=2).cpu()
        )
        before = si_sdr(
            batch["mixture"].double()[:, None], sources, inside[:, None], any_loudness=True
        ).cpu()
        after_sdr, before_sdr = self._bss_eval(estimates, batch) if self.sdr else (None, None)
        gain = (reached - before).mean(1)
        # The worst and the best mixture of a batch are drawn, once if they are the same
        shown = dict.fromkeys((int(gain.argmin()), int(gain.argmax())))
        examples = tuple(Example(place, self._excerpt(batch, estimates, place)) for place in shown)
        return MeasuredSeparation(
            list(batch["name"]),
            sources.any(-1).cpu(),
            reached,
            before,
            after_sdr,
            before_sdr,
            examples,
            loss,
        )

    def scores(self, dataset: Any) -> SeparationScores:
        return SeparationScores(sample_rate=self.sample_rate)

    def read(self, file: Path) -> dict[str, Any]:
        """Read a recording of several speakers."""
        waveform, _ = read_audio(file, sample_rate=self.sample_rate)
        return {"mixture": waveform, "length": len(waveform), "name": file.name}

    def predict(self, model: nn.Module, batch: Batch) -> list[Prediction]:
        estimates = self._separate_one_by_one(model, batch, None).double().cpu()
        mixtures = batch["mixture"].double().cpu()
        lengths = batch["length"].tolist()
        return [
            Separated(at_natural_loudness(mixture[:length], estimate[:, :length]), self.sample_rate)
            for mixture, estimate, length in zip(mixtures, estimates, lengths, strict=True)
        ]

    def _pairwise(self, estimates: Tensor, batch: Batch) -> Tensor:
        """Return minus the loss of each estimate (rows) for each source (columns)."""
        inside, sources = _inside(batch), batch["sources"].to(estimates.dtype)
        if self.criterion is None:
            return pairwise_si_sdr(estimates, sources, inside)
        shape, frames = (*sources.shape[:2], sources.shape[1]), sources.shape[2]
        # The padding counts as exact in each pair
        pairs = (
            (signals * inside[:, None, None]).expand(*shape, frames).reshape(-1, frames)
            for signals in (estimates[:, :, None], sources[:, None])
        )
        losses = of_samples(self.criterion, *pairs).view(shape)
        if isinstance(self.criterion, SignalToNoise):
            return -losses
        return -losses * frames / batch["length"][:, None, None]

    def _separate_one_by_one(self, model: nn.Module, batch: Batch, count: int | None) -> Tensor:
        """Return float32[B, S, T], each mixture separated at its own length."""
        mixture, lengths = batch["mixture"], batch["length"].tolist()
        if min(lengths) == mixture.shape[1]:
            return _separate(model, mixture, count)
        signals = [
            _separate(model, mixture[place : place + 1, :length], count)[0]
            for place, length in enumerate(lengths)
        ]
        return torch.stack(
            [
                nn.functional.pad(signal, (0, mixture.shape[1] - signal.shape[1]))
                for signal in signals
            ]
        )

    def _bss_eval(self, estimates: Tensor, batch: Batch) -> tuple[Tensor, Tensor]:
        """Return the SDR in dB of the estimates, and of the mixtures, float64[B, S] each."""
        # Importing torchmetrics takes seconds
        from torchmetrics.functional.audio import (
            signal_distortion_ratio,
        )

        after, before = list[Tensor](), list[Tensor]()
        sources, mixtures = batch["sources"].double().cpu(), batch["mixture"].double().cpu()
        for place, length in enumerate(batch["length"].tolist()):
            true = sources[place, :, :length]
            estimate_and_mixture = torch.stack(
                [estimates[place, :, :length].cpu(), mixtures[place, :length].expand_as(true)]
            )
            ratios, is_audible = (
                torch.full(estimate_and_mixture.shape[:2], torch.nan, dtype=torch.float64),
                true.any(1),
            )
            if bool(is_audible.any()):
                with _one_thread():
                    audible_ratios = signal_distortion_ratio(
                        estimate_and_mixture[:, is_audible],
                        true.expand_as(estimate_and_mixture)[:, is_audible],
                        filter_length=min(512, length),
                    )
                ratios[:, is_audible] = (
                    audible_ratios.nan_to_num(_MOST_SDR, _MOST_SDR, -_MOST_SDR)
                    if bool(torch.isfinite(estimate_and_mixture).all())
                    else audible_ratios
                )
            after.append(ratios[0])
            before.append(ratios[1])
        return torch.stack(after), torch.stack(before)

    def _excerpt(self, batch: Batch, estimates: Tensor, place: int) -> Tensor:
        length = min(int(batch["length"][place]), round(_HEARD_S * self.sample_rate))
        mixture, sources = (
            batch["mixture"][place, :length].double().cpu(),
            batch["sources"][place, :, :length].double().cpu(),
        )
        # One scale for all signals keeps their relative loudness
        signals = torch.cat(
            [
                mixture[None],
                sources,
                at_natural_loudness(mixture, estimates[place, :, :length].cpu()),
            ]
        )
        return (signals / signals.abs().max().clamp(min=1.0) * FULL_SCALE).round().to(torch.int16)


@final
class Separated(Prediction):
    """The S separated signals of one recording.

    Args:
        signals: float[S, T].
        sample_rate: Rate of the signals in Hz.
    """

    def __init__(self, signals: Tensor, sample_rate: int) -> None:
        self.signals = signals
        self.sample_rate = sample_rate

    def values(self) -> dict[str, Any]:
        return {
            "speakers": len(self.signals),
            "seconds": round(self.signals.shape[1] / self.sample_rate, 3),
        }

    def save(self, folder: Path, name: str) -> list[Path]:
        # One scale for all keeps their relative loudness
        signals = self.signals / self.signals.abs().max().clamp(min=1.0)
        files = [
            save_wav(folder / f"{name}_speaker_{number}.wav", signal, sample_rate=self.sample_rate)
            for number, signal in enumerate(signals, start=1)
        ]
        rows = [
            [(f"{name}: speaker {number}", signal)]
            for number, signal in enumerate(signals, start=1)
        ]
        return [
            *files,
            save_spectrograms(
                folder / f"{name}_spectrograms.png", rows, sample_rate=self.sample_rate
            ),
        ]


def at_natural_loudness(mixture: Tensor, estimates: Tensor) -> Tensor:
    """Scale estimates of any loudness so that their sum is closest to the mixture (least squares).

    Args:
        mixture: float64[T].
        estimates: float64[S, T].

    Returns:
        float64[S, T].
    """
    estimates = estimates / estimates.norm(dim=1, keepdim=True).clamp(min=1e-12)
    # A small diagonal keeps the solution finite for signals that are similar, or silent
    products = estimates @ estimates.t() + 1e-6 * torch.eye(len(estimates), dtype=estimates.dtype)
    return torch.linalg.solve(products, estimates @ mixture)[:, None] * estimates


def _separate(model: nn.Module, mixture: Tensor, count: int | None) -> Tensor:
    """Return the model's output, float32[B, S, T] or wider, checked."""
    output = model(mixture[:, None])
    expected = [len(mixture), "speakers" if count is None else count, mixture.shape[1]]
    if (
        not isinstance(output, Tensor)
        or output.dim() != 3
        or output.shape[0] != expected[0]
        or output.shape[2] != expected[2]
    ):
        raise ConfigError(
            Problem(
                "model",
                "does not return one signal per speaker, as long as the mixture",
                form_of(output),
                f"a tensor {expected}",
                none_hint(output),
            )
        )
    if count is not None and output.shape[1] != count:
        raise ConfigError(
            Problem(
                "model",
                f"gives {output.shape[1]} signals, but the data set's mixtures have "
                f"{count} speakers",
                hint="set model.num_sources=${dataset.num_speakers}",
            )
        )
    return output.to(torch.promote_types(output.dtype, torch.float32))


def _inside(batch: Batch) -> Tensor:
    """Return bool[B, T]: true before each mixture's end."""
    return (
        torch.arange(batch["mixture"].shape[1], device=batch["mixture"].device)
        < batch["length"][:, None]
    )


def _check(samples: Sequence[Any]) -> None:
    for sample in samples:
        if (
            not isinstance(sample, Mapping)
            or "mixture" not in sample
            or ("sources" in sample) != ("sources" in samples[0])
        ):
            raise DataError(
                Problem(
                    "dataset",
                    "a sample is not a mixture with its sources",
                    form_of(sample),
                    "a dict with `mixture` [T] and `sources` [S, T]",
                )
            )
        if "sources" in sample and sample["sources"].shape != (
            len(samples[0]["sources"]),
            len(sample["mixture"]),
        ):
            shape, name = list(sample["sources"].shape), sample.get("name", "a mixture")
            raise DataError(
                Problem(
                    "dataset",
                    f"the sources of {name} do not fit",
                    shape,
                    f"{[len(samples[0]['sources']), len(sample['mixture'])]}",
                )
            )


@contextmanager
def _one_thread() -> Generator[None]:
    """Have torch use one thread in a block."""
    # MKL's batched solver fails with two threads ("Parameter 6 was incorrect on entry to DLASWP",
    # torch 2.14.1)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)
