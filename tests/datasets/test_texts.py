"""Texts become tokens: of the standard library, of files and of tables, by bytes or by a tokenizer file."""

import hashlib

import pytest
import torch

from samewise.datasets.generated_text import GeneratedText
from samewise.datasets.labelled_texts import TextFolder, TextTable
from samewise.datasets.parts.tokens import Tokenizer
from samewise.datasets.text_files import TextFiles
from samewise.datasets.unicode_names import named_characters
from samewise.runner.errors import ConfigError, DataError


@pytest.fixture
def tokenizer(tmp_path):
    """A tokenizer of words, with BERT's special tokens."""
    tokenizers = pytest.importorskip("tokenizers", reason="tokenizers is not installed")
    words = ["[PAD]", "[CLS]", "[SEP]", "[MASK]", "[UNK]", "to", "be", "or", "not"]
    made = tokenizers.Tokenizer(tokenizers.models.WordLevel({word: number for number, word in enumerate(words)}, unk_token="[UNK]"))
    made.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    made.post_processor = tokenizers.processors.TemplateProcessing(single="[CLS] $A [SEP]", special_tokens=[("[CLS]", 1), ("[SEP]", 2)])
    made.add_special_tokens(["[MASK]"])
    made.enable_padding(length=32)
    made.save(str(tmp_path / "tokenizer.json"))
    return str(tmp_path / "tokenizer.json")


def test_the_names_of_characters_are_the_same_everywhere():
    names = sorted(name for split in ("train", "valid") for name, _ in named_characters(split))
    assert hashlib.sha256("\n".join(names).encode()).hexdigest() == "31ebcca3f406320ee425dbe85e80b16633ec0cef6baa22ec0ef054c89994e90a"
    assert len(names) == 12_771


def test_files_are_cut_into_blocks_whose_targets_are_the_next_tokens(tmp_path):
    for name, text in {"b.txt": "or not\r\nto be", "a.txt": "to be", "c.md": "never"}.items():
        (tmp_path / name).write_text(text, newline="")
    text = list(b"to be|or not\nto be")
    for split, part in (("train", text[:14]), ("valid", text[14:])):
        blocks = TextFiles(path=str(tmp_path), separator="|", split=split, held_out=0.2, length=3)
        assert torch.cat([block["tokens"] for block in blocks]).tolist() == part[: 3 * len(blocks)]
        assert torch.cat([block["target"] for block in blocks]).tolist() == part[1 : 3 * len(blocks) + 1]
        assert len(blocks) == (len(part) - 1) // 3
    drawn = TextFiles(path=str(tmp_path / "b.txt"), split="train", held_out=0, length=3, anywhere=True)
    assert {bytes(drawn[0]["tokens"].tolist()) for _ in range(99)} == {b"or not\nto be"[start : start + 3] for start in range(9)}


def test_the_masked_tokens_are_drawn_as_for_bert():
    blocks = GeneratedText(samples=400, length=64, objective="masked")
    plain = GeneratedText(samples=400, length=64)
    kept = {"mask": 0, "same": 0, "other": 0}
    for index in range(400):
        block, tokens = blocks[index], plain[index]["tokens"]
        assert torch.equal(block["target"], tokens[block["places"]])
        assert torch.equal(block["tokens"].index_copy(0, block["places"], block["target"]), tokens)
        assert len(block["places"].unique()) == 10
        for token, target in zip(block["tokens"][block["places"]].tolist(), block["target"].tolist(), strict=True):
            kept["mask" if token == 256 else "same" if token == target else "other"] += 1
    shares = [kept[kind] / 4000 for kind in ("mask", "same", "other")]
    assert shares == pytest.approx([0.8, 0.1, 0.1], abs=0.02)


def test_labelled_texts_come_from_tables_and_from_folders(tmp_path, tokenizer):
    (tmp_path / "train.tsv").write_text('sentence\tkind\nto be\t2\n"or not"\t10\n')
    (tmp_path / "dev.tsv").write_text("sentence\tkind\nnot to be or not\t10\n")
    table = {"train_file": str(tmp_path / "train.tsv"), "text": "sentence", "label": "kind", "num_classes": 2, "length": 5}
    (held,) = TextTable(file=str(tmp_path / "dev.tsv"), **table, tokenizer=tokenizer)
    assert (held["tokens"].tolist(), held["label"]) == ([1, 8, 5, 6, 2], 1)
    assert bytes(TextTable(file=str(tmp_path / "train.tsv"), **table)[1]["tokens"].tolist()) == b'"or n'
    for name in ("train/neg/a.txt", "train/pos/b.txt", "valid/pos/c.txt"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(name)
    folder = TextFolder(root=str(tmp_path), folder="valid", classes_from="train")
    assert (folder.classes, folder.texts, folder.labels) == (["neg", "pos"], ["valid/pos/c.txt"], [1])
    (tmp_path / "valid" / "pos" / "c.txt").write_text("")
    with pytest.raises(DataError, match="sample 0 is an empty text"):
        TextFolder(root=str(tmp_path), folder="valid", classes_from="train")


def test_a_tokenizer_file_gives_its_tokens_and_their_text(tokenizer):
    words = Tokenizer(tokenizer, vocabulary=9, length=5)
    assert words.encode("to be [MASK] not to be") == [5, 6, 3, 8, 5]
    assert words.encode("to be or not", special=True) == [1, 5, 6, 7, 2]
    assert words.decode([5, 6, 3]) == "to be [MASK]"
    letters = Tokenizer(length=4)
    assert letters.encode("é[MASK]a!") == [0xC3, 0xA9, 256, 97]
    assert letters.decode([0xC3, 0xA9, 256, 97]) == "é[MASK]a"


def test_wrong_settings_are_named(tmp_path, tokenizer):
    (tmp_path / "short.txt").write_text("short")
    for error, words, settings in (
        (ConfigError, "vocabulary: differs from that of .*tokenizer.json, which has 9", {"tokenizer": tokenizer, "vocabulary": 8}),
        (ConfigError, "tokenizer: cannot be read", {"tokenizer": str(tmp_path / "short.txt")}),
        (ConfigError, "masked: is not a valid share", {"masked": 0.0}),
        (ConfigError, "held_out: is not a valid share", {"held_out": 1.0}),
        (DataError, "short.txt: is too short", {"length": 5}),
        (DataError, "shirt.txt: cannot be read: No such file or directory; dataset.path is .*did you mean 'short.txt'", {"path": str(tmp_path / "shirt.txt")}),
    ):
        with pytest.raises(error, match=words):
            TextFiles(**{"path": str(tmp_path / "short.txt"), "split": "train", "held_out": 0.0, **settings})
