"""The data set of LSUN that docs/your_own_data.md shows, on LMDB files, beside torchvision's."""

import io
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image
from samewise_docs_pages import make_folder
from torchvision.datasets.lsun import LSUNClass
from torchvision.transforms.v2.functional import pil_to_tensor

lmdb = pytest.importorskip("lmdb", reason="not in the lock")


def test_the_pages_lsun_has_torchvisions_samples_and_composes(samewise: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_folder("docs/your_own_data.md", tmp_path)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    for name in ("bedroom", "kitchen"):
        for split, count in (("train", 12), ("val", 4)):
            (tmp_path / "data" / "lsun").mkdir(parents=True, exist_ok=True)
            with lmdb.open(f"data/lsun/{name}_{split}_lmdb") as file, file.begin(write=True) as entries:
                for number in range(count):
                    image, raw = Image.effect_noise((64, 48), 10.0 + number), io.BytesIO()
                    image.save(raw, "WEBP")
                    entries.put(f"{name}{number}".encode(), raw.getvalue())
    kitchens = LSUNClass("data/lsun/kitchen_train_lmdb")
    theirs = [pil_to_tensor(kitchens[index][0]) for index in range(12)]
    kitchens.env.close()
    from lab.lsun import LSUN

    ours = LSUN(root="data/lsun", classes=["bedroom", "kitchen"], split="train")
    assert [label for _, label in ours] == 12 * [0] + 12 * [1]
    assert all(torch.equal(pil_to_tensor(ours[12 + index][0]), theirs[index]) for index in range(12))
    settings = ["loader.num_workers=2", "batch_size=8", "replicas=1", "model=resnet18", "transforms.size=32", "transforms.eval_size=32", "device=cpu"]
    samewise("check", "experiment=resnet50_imagenet", "dataset=lsun", *settings, code=0)
