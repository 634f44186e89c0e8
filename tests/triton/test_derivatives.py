"""Gradients by kernels are none that PyTorch could differentiate; it would take them for constants."""

import pytest

from tests.ops.test_everywhere import EVERY_OP, check_second_derivatives

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # NumPy's, of the interpreter: 1 / 0, overflow


@EVERY_OP
def test_second_derivatives_are_refused(name: str, device: str) -> None:
    check_second_derivatives(name, "triton", device)
