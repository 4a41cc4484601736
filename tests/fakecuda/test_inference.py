"""Results of operators on fake devices: known at the call where CUDA's kernels know them, and of their shapes."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from cudafuture.testing import fakecuda

pytestmark = pytest.mark.cuda


def index(x: torch.Tensor, at: torch.Tensor) -> torch.Tensor:
    return x[at]


def repeat(x: torch.Tensor, at: torch.Tensor) -> torch.Tensor:
    return x.repeat_interleave(at, output_size=3)


@pytest.mark.parametrize("operator", [index, repeat])
def test_known_sizes_need_no_wait(operator: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]) -> None:
    x = torch.arange(3.0, device="cuda")
    at = torch.tensor([0, 1, 2], device="cuda")
    expected = operator(x.cpu(), at.cpu())
    torch.cuda.synchronize()
    with fakecuda.hold():
        found = operator(x, at)  # it would wait for the hold
        assert found.shape == expected.shape
    torch.testing.assert_close(found.cpu(), expected)


def test_mask_of_host_needs_no_wait() -> None:
    x = torch.arange(3.0, device="cuda")
    torch.cuda.synchronize()
    with fakecuda.hold():
        found = x[torch.tensor([True, False, True])]
    assert found.tolist() == [0.0, 2.0]


def test_mask_of_device_is_waited_for() -> None:
    x = torch.arange(3.0, device="cuda")
    assert x[x > 0].tolist() == [1.0, 2.0]


@pytest.mark.parametrize("size", [(6,), (4,), (0,)])
@pytest.mark.filterwarnings("ignore:An output with one or more elements was resized")
def test_out_of_other_size_is_resized(size: tuple[int, ...]) -> None:
    x = torch.arange(6.0, device="cuda").view(2, 3)
    out = torch.empty(size, device="cuda")
    expected = torch.logcumsumexp(x.cpu(), 0)
    try:
        torch.logcumsumexp(x, 0, out=out)
    except RuntimeError:  # the operator may refuse it, but the devices stay usable
        assert (x + 1).tolist()
    else:
        torch.testing.assert_close(out.cpu(), expected)


def test_statistics_of_evaluation_have_shape_of_cuda() -> None:
    x, weight = torch.randn(2, 3, 4, device="cuda"), torch.ones(3, device="cuda")
    mean, variance = torch.zeros(3, device="cuda"), torch.ones(3, device="cuda")
    _, saved_mean, saved_variance = torch.native_batch_norm(x, weight, weight, mean, variance, False, 0.1, 1e-5)
    assert saved_mean.shape == saved_variance.shape == (3,)
