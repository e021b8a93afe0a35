"""torchaudio's wav2vec 2.0 and HuBERT as the speech recipe calls them: each choice is torchaudio's own network, in its settings and in its outputs."""

import re
from pathlib import Path
from typing import Any

import pytest
import torch
import torchaudio
import yaml

from samewise.recipes.models.wav2letter import shortest_input
from samewise.recipes.models.wav2vec2 import Wav2Vec2
from samewise.recipes.speech_recognition import SpeechRecognition
from samewise.runner.interfaces import Phase

CONFIGS = Path(__file__).parents[2] / "configs" / "model"
CHOICES = sorted(path.stem for path in CONFIGS.glob("*.yaml") if "models.wav2vec2.Wav2Vec2" in path.read_text())
SHAPES = [[16, 10, 5], [16, 8, 4], [16, 4, 4]]
SMALL: dict[str, Any] = {
    "extractor_conv_layer_config": SHAPES,
    "encoder_embed_dim": 16,
    "encoder_num_layers": 2,
    "encoder_num_heads": 2,
    "encoder_ff_interm_features": 16,
    "encoder_pos_conv_kernel": 4,
    "encoder_pos_conv_groups": 2,
}


def make(**more: Any) -> Wav2Vec2:
    torch.manual_seed(0)
    return Wav2Vec2(num_classes=5, **SMALL, **more)


def test_each_encoder_of_torchaudio_is_a_choice() -> None:
    builders = {name for name in vars(torchaudio.models) if re.fullmatch(r"(wav2vec2|hubert)_(?!model|pretrain).*", name)}
    assert set(CHOICES) == builders
    assert len(CHOICES) == 9


@pytest.mark.parametrize("mode", ["group_norm", "layer_norm"])
def test_outputs_equal_torchaudios_with_the_same_weights(mode: Any) -> None:
    arguments = {key: value for key, value in yaml.safe_load((CONFIGS / "wav2vec2_base.yaml").read_text()).items() if key not in ("_target_", "num_classes")}
    own = torchaudio.models.wav2vec2_model(**{**arguments, **SMALL, "extractor_mode": mode, "aux_num_out": 5}).eval()
    model = make(extractor_mode=mode).eval()
    own.load_state_dict(model.state_dict())
    waveforms, lengths = torch.randn(2, 900), torch.tensor([900, 500])
    logits, frames = own(waveforms, lengths)
    assert torch.equal(model(waveforms[:, None], lengths), logits.transpose(1, 2))
    assert torch.equal(model.output_lengths(lengths), frames)


def test_the_recipe_trains_every_parameter_and_output_lengths_are_right() -> None:
    model = make(encoder_layer_drop=0.0)
    shortest = shortest_input(model.convolutions())
    assert [int(model.output_lengths(torch.tensor(shortest + more))) for more in (-1, 0)] == [0, 1]
    batch = {
        "features": torch.randn(2, 1, 900),
        "feature_length": torch.tensor([900, 700]),
        "name": ["a", "b"],
        "transcript": ["ab", "c"],
        "target": torch.tensor([[1, 2], [3, 0]]),
        "target_length": torch.tensor([2, 1]),
    }
    SpeechRecognition(letters="abcd").loss(model, batch, Phase("train")).total.backward()
    assert all(parameter.grad is not None for parameter in model.parameters())


@pytest.mark.parametrize("mode", ["group_norm", "layer_norm"])
def test_an_evaluation_does_not_depend_on_the_batch(mode: Any) -> None:
    """The first norm of the base models is over time: beside a longer recording it would count the padding in, and other letters would be read."""
    model, recipe = make(extractor_mode=mode).double().eval(), SpeechRecognition(letters="abcd")
    waveforms = [torch.randn(length, dtype=torch.float64) for length in (2000, 700, 170, 1999)]

    def batch(chosen: list[torch.Tensor]) -> dict[str, Any]:
        made = recipe.collate([{"waveform": one, "transcript": "a", "name": "x"} for one in chosen])
        padded = torch.nn.utils.rnn.pad_sequence(chosen, batch_first=True)
        return {**made, "features": padded[:, None], "feature_length": made["length"]}

    with torch.no_grad():
        together = recipe.measure(model, batch(waveforms))
        alone = [recipe.measure(model, batch([one])) for one in waveforms]
        assert torch.allclose(together.loss, torch.cat([one.loss for one in alone]), rtol=1e-6)
        assert [line.hypothesis for line in together.lines] == [one.lines[0].hypothesis for one in alone]
        read = [one.text for one in recipe.predict(model, batch(waveforms))]
    assert read == [line.hypothesis for line in together.lines]
    assert len(set(read)) > 1
