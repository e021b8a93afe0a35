"""Beam search in place of the best path: without words, with words from a file, and without flashlight's decoder installed."""

import pytest
import torch
from samewise_recipes_heard import LETTERS, Told, saying, understood

from samewise.recipes.parts import ctc
from samewise.recipes.speech_recognition import SpeechRecognition
from samewise.runner.errors import ConfigError


def test_beam_search_finds_a_likelier_text_than_the_best_path():
    pytest.importorskip("flashlight.lib.text")
    recipe = SpeechRecognition(letters="ab", decoder="beam", beam={"size": 20})
    # Blank is each frame's best, yet "a" gathers three paths: a*, *a, aa (the example of Hannun 2017, distill.pub/2017/ctc).
    scores = torch.tensor([[[0.6, 0.6], [0.4, 0.4], [1e-6, 1e-6]]]).log()
    assert understood(recipe, Told(scores), [2]) == ["a"]
    assert understood(SpeechRecognition(letters="ab"), Told(scores), [2]) == [""]


def test_beam_search_with_a_lexicon_gives_words_from_it(tmp_path):
    pytest.importorskip("flashlight.lib.text")
    (tmp_path / "words.txt").write_text("sea s e a |\nsee s e e |\nball b a l l |\n")
    recipe = SpeechRecognition(letters=LETTERS, decoder="beam", beam={"lexicon": str(tmp_path / "words.txt")})
    assert understood(recipe, Told(saying(["se*o  bal*l"], 20)), [20])[0] in ("sea ball", "see ball")


def test_a_missing_lexicon_or_decoder_for_beam_search_is_named(tmp_path, monkeypatch):
    with pytest.raises(ConfigError, match=r"recipe.decoder|recipe.beam.lexicon"):
        SpeechRecognition(letters=LETTERS, decoder="beam", beam={"lexicon": str(tmp_path / "nowhere.txt")})
    ctc.beam_decoder.cache_clear()
    find = ctc.importlib.util.find_spec
    monkeypatch.setattr(ctc.importlib.util, "find_spec", lambda name: None if name == "flashlight" else find(name))
    with pytest.raises(ConfigError, match=r"pip install '\.\[beam\]'"):
        SpeechRecognition(letters=LETTERS, decoder="beam")
