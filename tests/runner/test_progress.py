"""What is printed while a run trains, without a terminal."""

import re

import torch

TINY = ["experiment=resnet18_digits", "debug=tiny", "model.width=4", "tracking=none", "evaluate.pictures=false", "callbacks=[progress]"]


def test_a_run_reports_what_it_trains_its_progress_and_its_expected_end(samewise, tmp_path) -> None:
    done = samewise("train", *TINY, "optimizer.lr=0.03", "seed=1", "+callbacks.progress.line_s=0", f"run_root={tmp_path}")
    assert done.returncode == 0, done.stderr
    name, folder, size, *lines = done.stderr.splitlines()
    assert name == "resnet18_digits  debug=tiny width=4 callbacks=[progress] lr=0.03 seed=1"
    assert folder.startswith(f"  {tmp_path}/resnet18_digits/")
    assert folder.endswith(" on cpu")
    (state,) = tmp_path.glob("*/*/checkpoints/step-00000020/state.pt")
    weights = torch.load(state, weights_only=True)["model"]
    learned = sum(tensor.numel() for name, tensor in weights.items() if name.rpartition(".")[2] in ("weight", "bias"))
    assert size == f"  {learned:,} parameters, 64 samples, 20 steps of 16 samples, 4 per epoch"
    told = [re.match(r"epoch \d+/\d+  step (\d+) of 20  loss \d+\.\d{4}  accuracy [01]\.\d{4}  \S+ steps/s, ends at about \d\d:\d\d", line) for line in lines]
    assert [int(match[1]) for match in told if match] == list(range(1, 21))
