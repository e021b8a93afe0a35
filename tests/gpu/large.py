"""A model of 1e9 parameters, autocast to bf16, under fsdp on one device: memory, the time of a step, the trace's cost, and how long a checkpoint stops training."""

import json
import os
import time

import torch
from timing import Loop, Place, built, by_turns, measured, profiled, samewise

from samewise.runner.training.run import Run
from samewise.runner.training.session import session
from samewise.runner.training.state import save

VIT = {"patch_size": 14, "num_layers": 40, "num_heads": 16, "hidden_dim": 1408, "mlp_dim": 6144}
"""torchvision's VisionTransformer of the size of ViT-g/14 (arXiv 2106.04560)."""
TINY = {"patch_size": 16, "num_layers": 2, "num_heads": 2, "hidden_dim": 16, "mlp_dim": 32}
FSDP = ["strategy=fsdp", "strategy.shard=[EncoderBlock]"]
RECOMPUTED = "activation_checkpointing=[EncoderBlock]"


def run_of(place: Place, name: str, *own: str) -> Run:
    size, batch = (32, 2) if place.small else (224, 32)
    model = {"_target_": "torchvision.models.VisionTransformer", "image_size": size, "num_classes": 10, **(TINY if place.small else VIT)}
    configs = place.folder / "configs" / "model"
    configs.mkdir(parents=True, exist_ok=True)
    (configs / "large.yaml").write_text(json.dumps(model))
    data = ["dataset=generated_classification", f"dataset.image_size={size}", f"dataset.samples={batch * 8}", "transforms=images"]
    settings = ["model=large", f"batch_size={batch}", "optimizer=adamw", "optimizer.lr=0.0001", f"device={place.device}", "precision=bf16"]
    meet = [f"strategy.init_method=file://{place.folder}/{name}_meet"] if "strategy=fsdp" in own else []
    run = built([*settings, *data, "loader.num_workers=0", *own, *meet], place.folder / name, configs=configs.parent)
    place.sessions.enter_context(session(run))
    return run


def stall(place: Place, run: Run) -> None:
    """How long `save` keeps the loop, and how long the file takes in the background."""
    place.wait()
    began = time.perf_counter()
    save(run)
    stopped = time.perf_counter() - began
    run.checkpoints.wait()
    whole = time.perf_counter() - began
    size = sum(file.stat().st_size for file in run.folder.checkpoints.rglob("*") if file.is_file() and not file.is_symlink())
    print(f"    a checkpoint of {size / 2**30:.2f} GiB stops training for {stopped:.2f} s, and is written after {whole:.1f} s", flush=True)


def variant(place: Place, name: str, *own: str) -> Run:
    if not place.small:
        torch.cuda.empty_cache()
    run = run_of(place, name, *own)
    print(f"  {name}: {sum(one.numel() for one in run.parameters) / 1e9:.3f}e9 parameters, batch {run.batch_size}", flush=True)
    by_turns(place, {name: samewise(run)}, 2 if place.small else 3, "images/s", turns=3)
    if not place.small:
        print(f"    memory held between steps: {torch.cuda.memory_allocated() / 2**30:.1f} GiB", flush=True)
    return run


def recomputed(place: Place) -> None:
    run = variant(place, "fsdp_recomputed", *FSDP, RECOMPUTED)
    profiled(place, "fsdp, recomputed", Loop(samewise(run).steps, run.batch_size), count=1, top=6)
    stall(place, run)


def untraced(place: Place) -> None:
    variant(place, "fsdp_recomputed_untraced", *FSDP, RECOMPUTED, "trace.every_steps=0")


def kept(place: Place) -> None:
    variant(place, "fsdp_kept", *FSDP)


def single(place: Place) -> None:
    variant(place, "single_recomputed", RECOMPUTED)


if __name__ == "__main__":
    os.environ.update(RANK="0", WORLD_SIZE="1", LOCAL_RANK="0", LOCAL_WORLD_SIZE="1")
    measured((recomputed, untraced, kept, single), __doc__)
