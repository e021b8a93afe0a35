"""What tests of speech recognition share: models with prescribed outputs. Tests import this as `samewise_recipes_heard`."""

import torch
from torch import nn

from samewise.recipes.speech_recognition import SpeechRecognition

LETTERS = " 'abcdefghijklmnopqrstuvwxyz"


class Told(nn.Module):
    """Returns prescribed scores float32[B, K, N], one frame for each frame of features, whatever its input is."""

    def __init__(self, scores: torch.Tensor) -> None:
        super().__init__()
        self.scores = nn.Parameter(scores)

    def forward(self, features: torch.Tensor, length: torch.Tensor) -> torch.Tensor:
        return self.scores

    def output_lengths(self, length: torch.Tensor) -> torch.Tensor:
        return length


def saying(paths: list[str], frames: int) -> torch.Tensor:
    """Scores float32[B, 29, frames] whose best path is as written, with `*` for the blank, and blanks after that."""
    scores = torch.zeros(len(paths), 29, frames)
    for row, path in enumerate(paths):
        for place in range(frames):
            label = 0 if place >= len(path) or path[place] == "*" else 1 + LETTERS.index(path[place])
            scores[row, label, place] = 8.0
    return scores


def understood(recipe: SpeechRecognition, model: nn.Module, frames: list[int]) -> list[str]:
    """What the recipe predicts for utterances without a transcript."""
    batch = {**recipe.collate([{"waveform": torch.randn(160 * count), "transcript": ""} for count in frames])}
    batch |= {"features": torch.zeros(len(frames), 13, max(frames)), "feature_length": torch.tensor(frames)}
    return [prediction.values()["text"] for prediction in recipe.predict(model, batch)]
