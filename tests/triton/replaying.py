"""Recording and replaying without a GPU: what a compiled kernel would be is the interpreted one, run on addresses."""

import ctypes
import importlib
import pkgutil
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor
from triton.runtime.interpreter import InterpretedFunction
from triton.runtime.jit import JITFunction

import latte.ops.triton
from latte.ops import checks, known
from latte.ops.triton import replay


class Binary:
    """A kernel as its first launch leaves it: told dtypes, it takes addresses in place of tensors."""

    function = packed_metadata = None
    done: list[str]  # of the test at hand: plans keep binaries for longer

    def __init__(self, kernel: InterpretedFunction, arguments: tuple) -> None:
        self.kernel = kernel
        self.dtypes = [x.dtype if isinstance(x, Tensor) else None for x in arguments]

    def __getitem__(self, grid: tuple[int, ...]):
        return self.kernel[grid]

    def run(self, x, y, z, stream, function, packed_metadata, launch_metadata, enter, leave, *arguments) -> None:
        """As Triton's launchers are called."""
        self.done.append(self.kernel.fn.__name__)
        dtypes = [*self.dtypes, *[None] * (len(arguments) - len(self.dtypes))]
        self.kernel[(x, y, z)](*map(tensor_at, arguments, dtypes))


def tensor_at(address, dtype: torch.dtype | None):
    """The tensor that begins at an address; what is no address stays what it is."""
    if dtype is None or address is None:
        return address
    if address == 0:
        return torch.empty(0, dtype=dtype)
    memory = (ctypes.c_char * dtype.itemsize).from_address(address)
    return torch.frombuffer(memory, dtype=dtype)


class Kernel:
    """An interpreted kernel whose launches leave a binary, as those of compiled ones do."""

    def __init__(self, kernel: InterpretedFunction) -> None:
        self.kernel, self.params = kernel, JITFunction(kernel.fn).params

    def __getitem__(self, grid: tuple[int, ...]):
        def launch(*arguments, **constants) -> Binary:
            self.kernel[grid](*arguments, **constants)
            return Binary(self.kernel, arguments)

        return launch


def emulate(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Let calls in the interpreter be recorded and replayed; names of the kernels that recordings launch, in order."""
    done: list[str] = []
    monkeypatch.setattr(Binary, "done", done, raising=False)
    monkeypatch.setattr(replay, "REPLAYED_ON", "cpu")
    monkeypatch.setattr(replay, "driver", SimpleNamespace(active=SimpleNamespace(get_current_stream=lambda _: 0)))
    monkeypatch.setattr(checks, "may_replay", lambda *_: True)
    monkeypatch.setattr(known, "KNOWN", {})
    for found in pkgutil.iter_modules(latte.ops.triton.__path__, "latte.ops.triton."):
        module = importlib.import_module(found.name)
        for name, value in list(vars(module).items()):
            if isinstance(value, InterpretedFunction):
                monkeypatch.setattr(module, name, Kernel(value))
            elif isinstance(value, replay.Cookbook):
                monkeypatch.setattr(module, name, replay.Cookbook())
    return done


@pytest.fixture
def replays(device: str, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of the kernels that were launched from recordings, in order."""
    if device == "cuda":
        pytest.skip("tests/gpu has compiled kernels' own")
    return emulate(monkeypatch)
