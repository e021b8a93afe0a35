"""CTC on a CUDA device: in Triton's interpreter its loss and gradient equal torch's in float64, and it compiles for current devices without atomics."""

import re
import subprocess
import sys

import pytest
import torch
import torch.nn.functional as F

pytest.importorskip("triton", reason="triton is not installed")

INTERPRETED = """\
import torch, torch.nn.functional as F
from samewise.recipes.parts.ctc_kernel import launch

torch.manual_seed(0)
worst = [0.0, 0.0]
for batch, frames, labels, classes in ((5, 30, 6, 9), (3, 12, 1, 2), (2, 40, 17, 29), (2, 9, 0, 3)):
    scores = torch.randn(batch, frames, classes, dtype=torch.float64, requires_grad=True)
    target = torch.randint(1, classes, (batch, labels))
    target[0] = target[0, :1]  # repeated labels, which need a blank between them
    lengths = torch.randint(2 * labels + 1, frames + 1, (batch,)) if 2 * labels < frames else torch.full((batch,), frames)
    sizes = torch.randint(0, labels + 1, (batch,))
    sizes[0], sizes[-1] = labels, 0
    log_probs = scores.log_softmax(2)
    expected = F.ctc_loss(log_probs.transpose(0, 1), target, lengths, sizes, reduction="none", zero_infinity=True)
    expected.sum().backward()
    found, gradient = launch(log_probs.detach().float(), lengths, target, sizes, True)
    assert torch.equal(found, launch(log_probs.detach().float(), lengths, target, sizes, False)[0])
    mine = scores.detach().clone().requires_grad_()
    mine.log_softmax(2).backward(gradient.double())
    worst = [max(worst[0], ((found.double() - expected) / expected).abs().max().item()), max(worst[1], (mine.grad - scores.grad).abs().max().item())]

short = torch.randn(2, 4, 3).log_softmax(2)
found, gradient = launch(short, torch.tensor([2, 4]), torch.tensor([[1, 1], [1, 2]]), torch.tensor([2, 2]), True)
assert found[0] == torch.inf and found[1].isfinite() and not gradient[0].any()
silent = launch(short, torch.tensor([0, 0]), torch.tensor([[1, 1], [1, 2]]), torch.tensor([0, 2]), True)
expected = F.ctc_loss(short.transpose(0, 1), torch.tensor([[1, 1], [1, 2]]), torch.tensor([0, 0]), torch.tensor([0, 2]), reduction="none")
assert torch.equal(silent[0], expected) and expected.tolist() == [0.0, torch.inf] and not silent[1].any()
short[1, 1, 1] = torch.nan
assert launch(short, torch.tensor([4, 4]), torch.tensor([[1, 2], [1, 2]]), torch.tensor([2, 2]), True)[0].isnan().tolist() == [False, True]
print(*worst)
"""


@pytest.mark.slow
def test_the_kernels_loss_and_gradient_equal_torchs_in_float64(clean_environment: dict[str, str], repository) -> None:
    environment = {**clean_environment, "TRITON_INTERPRET": "1", "PYTHONPATH": str(repository / ".package")}
    done = subprocess.run([sys.executable, "-c", INTERPRETED], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    loss, gradient = map(float, done.stdout.split())
    assert loss < 1e-6
    assert gradient < 1e-4  # float32's logarithms of a few hundred nats: torch's own gradient in float32 is just as far off


@pytest.mark.slow
@pytest.mark.parametrize("capability", [80, 90, 100])
def test_the_kernel_compiles_without_atomics(capability: int) -> None:
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from samewise.recipes.parts import ctc_kernel

    floats, integers = ("log_probs", "alphas", "betas", "losses", "gradients"), ("labels", "skips", "frames", "states")
    for kernel, constants in ((ctc_kernel.passes, {"SIZE": 512, "NEVER": -1e30}), (ctc_kernel.by_class, {"SIZE": 512})):
        kinds = {**dict.fromkeys(floats, "*fp32"), **dict.fromkeys(integers, "*i32"), "most_frames": "i32", "classes": "i32"}
        signature = {name: "constexpr" if name in constants else kinds[name] for name in kernel.arg_names}
        made = triton.compile(ASTSource(fn=kernel, signature=signature, constexprs=constants), target=GPUTarget("cuda", capability, 32))
        assert made.asm["cubin"]
        assert not re.search(r"\b(atom|red)\.", made.asm["ptx"])


def test_the_substitute_on_the_cpu_gives_torchs_gradient() -> None:
    from samewise.recipes.parts import ctc_kernel

    torch.manual_seed(0)
    scores = [torch.randn(3, 20, 5).requires_grad_() for _ in range(2)]
    target, lengths, sizes = torch.randint(1, 5, (3, 4)), torch.tensor([20, 15, 9]), torch.tensor([4, 2, 0])
    scores[1].data.copy_(scores[0].data)
    weights = torch.rand(3)
    losses = (
        ctc_kernel.negative_log_likelihood(scores[0].log_softmax(2), lengths, target, sizes),
        F.ctc_loss(scores[1].log_softmax(2).transpose(0, 1), target, lengths, sizes, reduction="none"),
    )
    for loss in losses:
        (loss * weights).sum().backward()
    assert torch.equal(*losses)
    torch.testing.assert_close(scores[0].grad, scores[1].grad)
