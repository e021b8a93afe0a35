"""transformers' wav2vec 2.0 and HuBERT as the speech recipe calls them, compared with transformers itself, which also saves the checkpoints."""

import json
from pathlib import Path
from typing import Any

import pytest
import samewise_runner_jobs as jobs
import torch
from safetensors.torch import load_file, save_file

from samewise.recipes.models.transformers_ctc import TransformersCTC
from samewise.recipes.models.transformers_text import TransformersClassifier
from samewise.recipes.models.wav2letter import shortest_input
from samewise.runner.errors import ConfigError
from samewise.runner.optim.initialise import initialise

pytestmark = pytest.mark.slow  # transformers takes seconds to import

SMALL: dict[str, Any] = {
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 16,
    "num_conv_pos_embeddings": 4,
    "num_conv_pos_embedding_groups": 2,
    "conv_dim": [8, 8, 8],
    "conv_kernel": [10, 8, 4],
    "conv_stride": [5, 4, 4],
}
ENCODERS = ("wav2vec2", "hubert")
ENCODERS_OF_TEXTS = {"bert": "Bert", "roberta": "Roberta", "electra": "Electra"}


def make(encoder: Any = "wav2vec2", classes: int = 5, **settings: Any) -> TransformersCTC:
    torch.manual_seed(0)
    return TransformersCTC(encoder=encoder, num_classes=classes, settings={**SMALL, **settings})


def theirs(encoder: str, classes: int = 5, **settings: Any) -> Any:
    import transformers

    kind = {"wav2vec2": "Wav2Vec2", "hubert": "Hubert"}[encoder]
    torch.manual_seed(1)
    return getattr(transformers, f"{kind}ForCTC")(getattr(transformers, f"{kind}Config")(vocab_size=classes, **SMALL, **settings)).eval()


@pytest.mark.parametrize("encoder", ENCODERS)
@pytest.mark.parametrize("norm", ["group", "layer"])
def test_a_checkpoint_of_transformers_gives_the_same_outputs_here(tmp_path: Path, encoder: str, norm: str) -> None:
    own = theirs(encoder, feat_extract_norm=norm)
    own.save_pretrained(tmp_path)
    assert (tmp_path / "model.safetensors").is_file()
    model = make(encoder, feat_extract_norm=norm)
    initialise(model, {"weights": str(tmp_path)})
    waveforms, lengths = torch.randn(2, 900), torch.tensor([900, 500])
    inside = (torch.arange(900) < lengths[:, None]).long() if norm == "layer" else None  # as the processors' return_attention_mask requires
    expected = own(waveforms, attention_mask=inside).logits
    assert torch.equal(model.eval()(waveforms[:, None], lengths), expected.transpose(1, 2))
    assert torch.equal(model.output_lengths(lengths), own._get_feat_extract_output_lengths(lengths))
    assert [int(model.output_lengths(torch.tensor(shortest_input(model.convolutions()) + more))) for more in (-1, 0)] == [0, 1]


def test_a_sharded_checkpoint_without_a_head_keeps_the_new_head(tmp_path: Path) -> None:
    own = theirs("hubert").hubert
    own.save_pretrained(tmp_path, max_shard_size="4KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 1
    model, before = make("hubert"), make("hubert")
    initialise(model, {"weights": str(tmp_path), "into": "hubert"})
    assert all(torch.equal(value, own.state_dict()[name]) for name, value in model.hubert.state_dict().items())
    assert torch.equal(model.lm_head.weight, before.lm_head.weight)


@pytest.mark.parametrize("encoder", ENCODERS_OF_TEXTS)
def test_a_checkpoint_of_a_text_encoder_gives_the_same_outputs_for_each_padded_text(tmp_path: Path, encoder: Any) -> None:
    import transformers

    small = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32}
    kind = ENCODERS_OF_TEXTS[encoder]
    own = getattr(transformers, f"{kind}ForSequenceClassification")(getattr(transformers, f"{kind}Config")(vocab_size=50, num_labels=3, **small)).eval()
    own.save_pretrained(tmp_path)
    if encoder == "bert":  # the names of the published checkpoint
        file = tmp_path / "model.safetensors"
        weights = load_file(file)
        save_file({name.replace("LayerNorm.weight", "LayerNorm.gamma").replace("LayerNorm.bias", "LayerNorm.beta"): weights[name] for name in weights}, file)
    model = TransformersClassifier(encoder=encoder, vocabulary=50, num_classes=3, settings=small)
    initialise(model, {"weights": str(tmp_path), "into": "model"})
    tokens = torch.tensor([[7, 8, 9, 10, 11], [12, 13, 14, -1, -1]])
    logits = model.eval()(tokens)
    for row, length in ((0, 5), (1, 3)):
        assert torch.allclose(logits[row], own(tokens[row : row + 1, :length]).logits[0], atol=1e-6)
    other = TransformersClassifier(encoder=encoder, vocabulary=50, num_classes=3, settings={**small, "num_attention_heads": 4})
    with pytest.raises(ConfigError, match=r"model.settings.num_attention_heads: differs from the checkpoint's"):
        initialise(other, {"weights": str(tmp_path), "into": "model"})


@pytest.mark.parametrize(
    "setting", ["hiden_size", "attn_implementation", "vocab_size", "name_or_path", "_attn_implementation", "auto_map", "quantization_config"]
)
def test_only_settings_of_the_network_are_accepted(setting: str) -> None:
    """Other settings would make transformers fetch kernels or code."""
    with pytest.raises(ConfigError, match=rf"settings\.{setting}: is not a setting of Wav2Vec2Config"):
        make(**{setting: "someone/kernel"})


def test_training_repeats_and_two_processes_give_the_same_bits(samewise, tmp_path: Path) -> None:
    settings = json.dumps({**SMALL, "mask_time_length": 2, "layerdrop": 0.5}).replace('"', "").replace(" ", "")
    given = ["recipe=speech_recognition", "debug=tiny", "model=wav2vec2_transformers", f"model.settings={settings}", "transforms=waveform", "replicas=2"]
    given += ["tracking=none", "evaluate.pictures=false", "callbacks=none", "max_steps=3", "batch_size=4", "optimizer=adamw"]
    weights = {jobs.weights(jobs.run(tmp_path / "ranks", 2, "strategy=elastic", experiment=given))}
    for number in range(2):
        done = samewise("train", *given, f"run_root={tmp_path}/{number}", "--json", code=0)
        weights.add(json.loads(done.stdout.splitlines()[-1])["weights_sha256"])
    assert len(weights) == 1
    (environment,) = (tmp_path / "0").rglob("environment.json")
    assert list(json.loads(environment.read_text())["libraries"]) == ["transformers"]
