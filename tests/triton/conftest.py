"""Kernels on the GPU where there is one, else in Triton's interpreter, with the same tests."""

import importlib
import os
import pkgutil
import sys

import pytest
import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # which is enough if nothing has imported Triton yet


@pytest.fixture(scope="session")
def device() -> str:
    """Where the kernels run; on a CPU they are interpreted, whatever was imported before."""
    if torch.cuda.is_available():
        return "cuda"
    import triton
    from triton.runtime.interpreter import InterpretedFunction

    import latte.ops.triton

    for module in pkgutil.walk_packages(latte.ops.triton.__path__, "latte.ops.triton."):
        importlib.import_module(module.name)
    for name, module in list(sys.modules.items()):
        if name.startswith(("triton.language", "latte.ops.triton")):
            for attribute, value in list(vars(module).items()):
                if isinstance(value, triton.JITFunction):
                    setattr(module, attribute, InterpretedFunction(value.fn))
                elif attribute == "INTERPRETED":
                    setattr(module, attribute, triton.language.constexpr(True))
    return "cpu"
