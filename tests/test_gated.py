"""The gated MLP keeps little, its gradients are the plain one's, and its kernel gives what the torch version gives."""

import pytest
import torch
import torch.nn.functional as F

from dflash.gated import GatedMLP, gated_backward
from dflash.kernels.gated import backward_kernel


def test_gradients_equal_those_of_the_plain_expression() -> None:
    torch.manual_seed(0)
    x = torch.randn(7, 5, dtype=torch.float64, requires_grad=True)
    gate, up = (torch.randn(11, 5, dtype=torch.float64, requires_grad=True) for _ in range(2))
    down = torch.randn(5, 11, dtype=torch.float64, requires_grad=True)
    plain = (F.silu(x @ gate.T) * (x @ up.T)) @ down.T
    out = GatedMLP.apply(x, torch.cat((gate, up)).detach(), gate, up, down, False)
    assert isinstance(out, torch.Tensor)
    torch.testing.assert_close(out, plain)
    d_out, leaves = torch.randn_like(out), (x, gate, up, down)
    for ours, theirs in zip(
        torch.autograd.grad(out, leaves, d_out), torch.autograd.grad(plain, leaves, d_out), strict=True
    ):
        torch.testing.assert_close(ours, theirs)


@pytest.mark.skipif(torch.cuda.is_available(), reason="tests/test_gpu.py runs the compiled kernel")
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-6), (torch.float16, 2e-3)])
@pytest.mark.parametrize("inner", [64, 200])  # a multiple of the columns of a program, and not
def test_the_kernel_equals_the_torch_version(inner: int, dtype: torch.dtype, tolerance: float) -> None:
    torch.manual_seed(inner)
    gate_up, d_product = (torch.randn(9, 2 * inner) * 3).to(dtype), torch.randn(9, inner).to(dtype)
    product, gradient = torch.full_like(d_product, float("nan")), torch.full_like(gate_up, float("nan"))
    backward_kernel[(9, -(-inner // 64))](gate_up, d_product, product, gradient, inner, COLUMNS=64)
    for ours, wanted in zip((product, gradient), gated_backward(gate_up, d_product), strict=True):
        torch.testing.assert_close(ours, wanted, atol=tolerance, rtol=tolerance)


def test_the_operator_is_registered_as_torch_wants_it() -> None:
    torch.library.opcheck(gated_backward, (torch.randn(4, 12), torch.randn(4, 6)))
