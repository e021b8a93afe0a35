"""Processor time per step beside torchaudio's own training scripts, which do the same work, as ratios to the script within one run.

    python tests/benchmarks/bench_scripts.py --torchaudio FOLDER [WORK...]

FOLDER is the folder `examples` of torchaudio's sources. The scripts are in no package, so without it nothing is measured. Each script's function that trains an
epoch is imported and called as it is, and takes turns with samewise. Both start from the same weights and see the same samples, in memory and in the same
order, with features computed beforehand; the optimizer, learning rate and clipping are the script's; deterministic algorithms are on, with one thread. Before
anything is timed, the losses of the first three steps must agree. All but the first depend on the updates before, so a wrong learning rate shows.

At each step the scripts also

- print a line of metrics, which is discarded here (Wav2Letter, WaveRNN);
- compute the batch's character and word error rates (Wav2Letter; one row is without them);
- compute SDR beside SI-SDR, and both for the mixture too (ConvTasNet: its loss is the improvement, which differs from samewise's by a constant of the batch).

samewise also pads the recordings that features were computed from (Wav2Letter), keeps a journal, computes the norm of the gradient and, unless a row says
otherwise, writes a trace with digests of batch, gradients and weights. It uses torch's fused Adam, the scripts torch's default one.
"""

import os

os.environ.update(OMP_NUM_THREADS="1", CUBLAS_WORKSPACE_CONFIG=":4096:8")

import argparse
import copy
import functools
import importlib
import io
import itertools
import json
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest.mock import patch

import torch
import torch.nn.functional as F
from loops import samewise
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader
from turns import Turns, advance, built, in_turns, leave, share_memory, show

from samewise.recipes.parts.si_sdr import si_sdr
from samewise.runner.data.keyed import KeyedDataset
from samewise.runner.interfaces import Batch
from samewise.runner.training.run import Run
from samewise.runner.training.session import session

COMMON = [
    *("tracking=none", "callbacks=[throughput,learning_rate]", "loader.num_workers=0", "loader.shuffle=false", "max_epochs=1000000"),
    *("transforms.train.batch=[]", "evaluate.pictures=false"),
]
OURS = {"samewise, no trace": ["trace.every_steps=0"], "samewise": []}
COMPARED = 3
"""Steps whose losses must agree."""

Samples = list[dict[str, Any]]


def narrow_wav2letter(width: int, top: int) -> str:
    """The config of torchaudio's Wav2Letter with other widths than its 250 and 2000."""
    sizes = [(13, width, 48, 2, 23), *[(width, width, 7, 1, 3)] * 7, (width, top, 32, 1, 16), (top, top, 1, 1, 0), (top, 29, 1, 1, 0)]
    names = ("in_channels", "out_channels", "kernel_size", "stride", "padding")
    layers = [({"_target_": "torch.nn.Conv1d", **dict(zip(names, one, strict=True))}, {"_target_": "torch.nn.ReLU"}) for one in sizes]
    parts = [*itertools.chain.from_iterable(layers), {"_target_": "torch.nn.LogSoftmax", "dim": 1}]
    return json.dumps({"_target_": "torch.nn.Sequential", "_args_": parts})


class Stepping(DataLoader):
    """A script's loader, which calls `stepped` after each step."""

    def __init__(self, run: Run, samples: Sequence[Any], collate: Callable[..., Any], stepped: Callable[[], None]) -> None:
        super().__init__(samples, batch_size=run.batch_size, collate_fn=collate)  # pyright: ignore[reportArgumentType]
        self.stepped = stepped

    def __iter__(self) -> Iterator[Any]:
        for batch in super().__iter__():
            yield batch
            self.stepped()


def imported(folder: Path, name: str) -> ModuleType:
    """A script, by itself: the scripts' folders have modules of the same names."""
    known = set(sys.modules)
    sys.path.insert(0, str(folder))
    try:
        return importlib.import_module(name)
    finally:
        sys.path.remove(str(folder))
        for added in set(sys.modules) - known:
            if str(getattr(sys.modules[added], "__file__", "")).startswith(f"{folder}/"):
                del sys.modules[added]


def spoken(run: Run) -> Samples:
    """Utterances with their features."""
    return [{**sample, "features": run.transforms["eval"](run.recipe.collate([sample]))["features"][0]} for sample in run.splits["train"].dataset]


def wav2letter(run: Run, samples: Samples, folder: Path, stepped: Callable[[], None], *, rates: bool = True) -> None:
    script = imported(folder, "main")
    if not rates:
        script.compute_error_rates = lambda *_: None
    language = script.LanguageModel(f"*{run.config.dataset.letters}", "*", " ")
    pairs = [(sample["features"].t(), torch.tensor(language.encode(sample["transcript"]))) for sample in samples]
    loader = Stepping(run, pairs, script.collate_factory(script.model_length_function), stepped)
    model = copy.deepcopy(run.model)
    optimizer = script.Adadelta(model.parameters(), lr=0.6, weight_decay=1e-5, eps=1e-8, rho=0.95)
    scheduler = script.ReduceLROnPlateau(optimizer, patience=10, threshold=1e-3)
    criterion, decoder = torch.nn.CTCLoss(blank=0, zero_infinity=False), script.GreedyDecoder()
    for epoch in itertools.count():
        script.train_one_epoch(model, criterion, optimizer, scheduler, loader, decoder, language, "cpu", epoch, 0.0)


def clips(run: Run) -> Samples:
    """Clips with their spectrograms."""
    transformed = [run.transforms["eval"](run.recipe.collate([sample])) for sample in run.splits["train"].dataset]
    return [{"waveform": batch["waveform"][0].clone(), "mel": batch["mel"][0]} for batch in transformed]


def wavernn(run: Run, samples: Samples, folder: Path, stepped: Callable[[], None]) -> None:
    script = imported(folder, "main")
    front, length = run.config.transforms.front_end, run.config.dataset.samples
    sizes = {"kernel_size": front.kernel_size, "hop_length": front.hop_length, "seq_len_factor": length // front.hop_length}
    script.args = argparse.Namespace(clip_grad=4.0, loss="crossentropy", mulaw=True, n_bits=8, **sizes)
    margin = front.kernel_size // 2  # in frames: its loader cuts a clip out of a longer recording, which is here just long enough
    padded = [(F.pad(sample["waveform"], (margin * front.hop_length, 0)), F.pad(sample["mel"], (0, 2 * margin))) for sample in samples]
    loader = Stepping(run, padded, script.collate_factory(script.args), stepped)
    model = copy.deepcopy(run.model)
    optimizer = script.Adam(model.parameters(), lr=1e-4)
    for epoch in itertools.count():
        script.train_one_epoch(model, script.LongCrossEntropyLoss(), optimizer, loader, "cpu", epoch)


def mixtures(run: Run) -> Samples:
    """Mixtures of one length: where some are padded, the script takes the padding into its means."""
    frames = int(run.config.dataset.seconds * run.config.dataset.sample_rate * 3 / 4)  # of the shortest
    return [{"mixture": one["mixture"][:frames].clone(), "sources": one["sources"][:, :frames].clone()} for one in run.splits["train"].dataset]


def conv_tasnet(run: Run, samples: Samples, folder: Path, stepped: Callable[[], None]) -> None:
    script, data = (imported(folder, name) for name in ("conv_tasnet.trainer", "utils.dataset.utils"))
    script._LG.info_on_master = script._LG.info  # without a process group
    rate = run.config.dataset.sample_rate
    files = [(rate, sample["mixture"][None], list(sample["sources"][:, None])) for sample in samples]
    collate = data.get_collate_fn("wsj0mix", "train", sample_rate=rate, duration=len(samples[0]["mixture"]) / rate)
    model = copy.deepcopy(run.model)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    trainer = script.Trainer(model, optimizer, Stepping(run, files, collate, stepped), None, None, 5.0, "cpu", debug=False)
    while True:
        trainer.train_one_epoch()


def of_mixtures(samples: Samples) -> float:
    """The SI-SDR of mixtures themselves, in dB."""
    every = [si_sdr(sample["mixture"], sample["sources"], torch.ones_like(sample["mixture"], dtype=torch.bool)).mean() for sample in samples]
    return torch.stack(every).mean().item()


@dataclass(frozen=True)
class Work:
    """What is trained.

    Args:
        folder: Of the scripts, in torchaudio's `examples`.
        overrides: samewise's experiment.
        count: Steps of a turn.
        hold: The samples in memory.
        scripts: Functions that train as a script does, by name.
        offset: What a script's loss has more than samewise's, of the samples of a batch.
    """

    folder: str
    overrides: list[str]
    count: int
    hold: Callable[[Run], Samples]
    scripts: dict[str, Callable[..., None]]
    offset: Callable[[Samples], float] = lambda samples: 0.0


WORK = {
    "Wav2Letter of width 64, batch 16": Work(
        "pipeline_wav2letter",
        ["experiment=wav2letter_librispeech", "model=narrow_wav2letter", "dataset=generated_speech_recognition", "dataset.samples=128", "batch_size=16"],
        4,
        spoken,
        {"torchaudio's main.py": wav2letter, "without its error rates": functools.partial(wav2letter, rates=False)},
    ),
    "WaveRNN of width 64, 275 samples, batch 4": Work(
        "pipeline_wavernn",
        [
            *("experiment=wavernn_ljspeech", "dataset=generated_vocoder", "dataset.clips=64", "dataset.samples=275", "batch_size=4"),
            *("model.n_rnn=64", "model.n_fc=64", "model.n_res_block=3", "model.n_hidden=32", "model.n_output=32"),
        ],
        4,
        clips,
        {"torchaudio's main.py": wavernn},
    ),
    "ConvTasNet, narrow, 0.375 s, batch 2": Work(
        "source_separation",
        ["experiment=conv_tasnet_wsj0_2mix", "model=conv_tasnet_small", "dataset=generated_separation", "dataset.samples=64", "batch_size=2"],
        4,
        mixtures,
        {"torchaudio's trainer.py": conv_tasnet},
        offset=of_mixtures,
    ),
}


def collate(run: Run, samples: Samples) -> Batch:
    batch = run.recipe.collate(samples)
    if "features" not in samples[0]:
        return batch
    features = [sample["features"].t() for sample in samples]
    return {**batch, "features": pad_sequence(features, batch_first=True).mT, "feature_length": torch.tensor([len(one) for one in features])}


def compare(work: Work, runs: dict[str, Run], loops: dict[str, Callable[[int], None]], samples: Samples) -> None:
    """Take the first steps, and assert that their losses agree."""
    losses = dict[str, list[float]]()
    for name, take in loops.items():
        with ExitStack() as stack:
            if name in runs:
                recorder = runs[name].recorder
                record = stack.enter_context(patch.object(recorder, "record", wraps=recorder.record))
                take(COMPARED)
                size = runs[name].batch_size
                offsets = [work.offset(samples[size * step : size * (step + 1)]) for step in range(COMPARED)]
                losses[name] = [call.args[0].losses["loss"] + offset for call, offset in zip(record.call_args_list, offsets, strict=True)]
            else:
                backward = stack.enter_context(patch.object(torch.Tensor, "backward", autospec=True, side_effect=torch.Tensor.backward))
                take(COMPARED)
                losses[name] = [call.args[0].item() for call in backward.call_args_list]
    first = torch.tensor(next(iter(losses.values())))
    for name, ours in losses.items():
        assert torch.allclose(torch.tensor(ours), first, rtol=1e-4, atol=1e-5), f"{name} has other losses: {losses}"


def measure(work: Work, folder: Path) -> dict[str, tuple[float, list[float]]]:
    """As `in_turns`, of a script and samewise."""
    with tempfile.TemporaryDirectory() as place, ExitStack() as stack:
        runs, ours = dict[str, Run](), dict[str, Callable[[int], None]]()
        samples: Samples = []
        for name, own in OURS.items():
            models = {"narrow_wav2letter": narrow_wav2letter(64, 256)}
            run = runs[name] = built([*COMMON, *work.overrides, *own], Path(place) / str(len(runs)), models=models)
            samples = samples or work.hold(run)
            run.splits["train"].keyed = KeyedDataset(samples, functools.partial(collate, run), seed=run.seed, stream="sample")
            stack.enter_context(session(run))
            ours[name] = functools.partial(advance, samewise(run))
        scripts = {name: Turns(functools.partial(train, runs["samewise"], samples, folder)) for name, train in work.scripts.items()}
        loops = {**{name: turns.take for name, turns in scripts.items()}, **ours}
        with redirect_stdout(io.StringIO()):  # the scripts' lines
            compare(work, runs, loops, samples)
            found = in_turns(loops, work.count, clock=time.process_time)
        for turns in scripts.values():
            turns.end()
        for run in runs.values():
            leave(run)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("work", nargs="*", help="measure only what has one of these words in its name")
    parser.add_argument("--torchaudio", type=Path, metavar="FOLDER", help="the folder `examples` of torchaudio's sources")
    args = parser.parse_args()
    if args.torchaudio is None:
        print("torchaudio's scripts are left out: name the folder `examples` of its sources (github.com/pytorch/audio, release 2.6.0) with --torchaudio FOLDER")
        return
    warnings.filterwarnings("ignore")
    share_memory()
    for name, work in WORK.items():
        folder = args.torchaudio.resolve() / work.folder
        if args.work and not any(word in name for word in args.work):
            continue
        if folder.is_dir():
            show(name, measure(work, folder))
        else:
            print(f"{name} is left out: there is no {folder}")


if __name__ == "__main__":
    main()
