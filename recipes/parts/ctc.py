"""Connectionist temporal classification: its loss, deterministic on every device, and decoders.

Source: Graves et al. 2006, Connectionist Temporal Classification, ICML,
https://doi.org/10.1145/1143844.1143891.
"""

import importlib.util
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from samewise.runner.errors import ConfigError

BLANK = 0
"""The class that stands for no letter."""


def negative_log_likelihood(
    log_probs: Tensor, lengths: Tensor, target: Tensor, target_lengths: Tensor
) -> Tensor:
    """Return float32[B] in nats: infinite if a target does not fit into its frames.

    Args:
        log_probs: [B, K, N], normalised over the K classes; class 0 is the blank.
        lengths: int64[B], valid frames.
        target: int64[B, U], from 1 to K - 1; values beyond a target's length are not read.
        target_lengths: int64[B].
    """
    # torch's CUDA kernel has no deterministic backward pass, and cuDNN's takes only batches without
    # padding and targets of at most 256 labels. Where our kernel cannot run, the CPU computes the
    # loss in float32, and gradients flow back from there.
    if log_probs.is_cuda and stays_on(log_probs, target):
        from samewise.recipes.parts import ctc_kernel

        return ctc_kernel.negative_log_likelihood(
            log_probs.transpose(1, 2).float(), lengths, target, target_lengths
        )
    frames_first = log_probs.permute(2, 0, 1).float().cpu()
    return F.ctc_loss(
        frames_first,
        target.cpu(),
        lengths.cpu(),
        target_lengths.cpu(),
        blank=BLANK,
        reduction="none",
    )


def stays_on(log_probs: Tensor, target: Tensor) -> bool:
    """Whether the loss is computed on the log-probabilities' device.

    On a CUDA device this requires Triton, and targets int64[B, U] that are not too long.
    """
    if not log_probs.is_cuda or importlib.util.find_spec("triton") is None:
        return log_probs.is_cpu
    from samewise.recipes.parts import ctc_kernel

    return ctc_kernel.takes(target)


def frames_needed(target: Tensor, target_lengths: Tensor) -> Tensor:
    """Return int64[B]: the fewest frames for each target.

    They are one for each label, and a blank between equal neighbours.
    """
    inside = (
        torch.arange(1, max(1, target.shape[1]), device=target.device) < target_lengths[:, None]
    )
    return target_lengths + ((target[:, 1:] == target[:, :-1]) & inside).sum(1)


def greedy(log_probs: Tensor, lengths: Tensor) -> list[list[int]]:
    """Return the labels of each sample's most likely path, without repetitions and blanks.

    Args:
        log_probs: [B, K, N].
        lengths: int64[B], valid frames.
    """
    best = log_probs.argmax(1)
    new = torch.ones_like(best, dtype=torch.bool)
    new[:, 1:] = best[:, 1:] != best[:, :-1]
    is_label = (
        new & (best != BLANK) & (torch.arange(best.shape[1], device=best.device) < lengths[:, None])
    )
    return [
        labels[positions].tolist()
        for labels, positions in zip(best.cpu(), is_label.cpu(), strict=True)
    ]


def beam_search(log_probs: Tensor, lengths: Tensor, *, letters: str, **settings: Any) -> list[str]:
    """Return the likeliest texts according to flashlight's beam search, on the CPU.

    Args:
        log_probs: [B, K, N].
        lengths: int64[B], valid frames.
        letters: The letters of the labels from 1 on.
        settings: Further arguments of `beam_decoder`.
    """
    decoder = beam_decoder(letters, **settings)
    hypotheses: Sequence[Sequence[Any]] = decoder(
        log_probs.permute(0, 2, 1).float().cpu().contiguous(), lengths.to("cpu", torch.int64)
    )
    if settings.get("lexicon"):
        return [" ".join(best[0].words) if best else "" for best in hypotheses]
    # The search begins and ends each text with a silence of its own
    return [
        " ".join(
            "".join(
                letters[token - 1] for token in best[0].tokens.tolist() if token > BLANK
            ).split()
        )
        if best
        else ""
        for best in hypotheses
    ]


# Building a decoder may read a large language model
@lru_cache(maxsize=4)
def beam_decoder(
    letters: str,
    *,
    size: int = 50,
    size_token: int | None = None,
    threshold: float = 50.0,
    lexicon: str | None = None,
    language_model: str | None = None,
    lm_weight: float = 2.0,
    word_score: float = 0.0,
) -> Any:
    """Return the `ctc_decoder` of torchaudio, which is flashlight-text's.

    Args:
        letters: The letters of the labels from 1 on.
        size: Number of hypotheses kept from frame to frame.
        size_token: Number of labels considered at each frame; None: all.
        threshold: Hypotheses this far below the best are dropped, in nats.
        lexicon: A file of the words that may occur, one in each line: the word, then its letters
            and a final `|`, separated by spaces; None: any letters in any order.
        language_model: A KenLM file, of words with a lexicon, else of letters; None: none.
        lm_weight: Weight of the language model's score.
        word_score: Score added for each word, with a lexicon.

    Raises:
        ConfigError: flashlight-text is not installed, or a file is missing.
    """
    ConfigError.raise_if(
        importlib.util.find_spec("flashlight") is None,
        "recipe.decoder",
        "beam search requires the package flashlight-text, which is not installed",
        "beam",
        hint="pip install '.[beam]' in samewise's folder, or set recipe.decoder=greedy",
    )
    for name, file in (("lexicon", lexicon), ("language_model", language_model)):
        ConfigError.raise_if(
            file is not None and not Path(file).is_file(),
            f"recipe.beam.{name}",
            "the file does not exist",
            file,
        )
    ConfigError.raise_if(
        language_model is not None and importlib.util.find_spec("kenlm") is None,
        "recipe.beam.language_model",
        "the package kenlm is not installed",
        language_model,
        hint="pip install kenlm",
    )
    from torchaudio.models.decoder import ctc_decoder

    tokens = ["<blank>", *("|" if letter == " " else letter for letter in letters)]
    return ctc_decoder(
        lexicon=lexicon,
        tokens=tokens,
        lm=language_model,
        nbest=1,
        beam_size=size,
        beam_size_token=size_token,
        beam_threshold=threshold,
        lm_weight=lm_weight,
        word_score=word_score,
        # A text's score is the sum over its paths, not the best of them
        log_add=True,
        blank_token="<blank>",
        sil_token="|" if "|" in tokens else "<blank>",
        unk_word="<unk>",
    )
