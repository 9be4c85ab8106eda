"""All that leans on the inside of a library: one function per lean, and a test per function that notices a change.

A library may change what it does not document. Each function says in which version the inside was seen, and what is
lost without it; tests/test_compat.py fails when it is no longer there or does something else. What leans on Flower is
in `flower/`, whose version is fixed.
"""

from __future__ import annotations

import ctypes
import re
import signal
import sys
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager, nullcontext
from importlib import import_module
from tempfile import TemporaryDirectory
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils import _pytree

# torch: transforms, trees and lists of tensors


def transform_active() -> bool:
    """Return whether a `torch.func` transform (vmap, grad) is active around the caller.

    torch 2.13. Without it autograd would have to be replaced by `torch.func.grad` everywhere, which takes twice as long
    for small networks.
    """
    return torch._C._functorch.peek_interpreter_stack() is not None


def is_transformed(value: Tensor) -> bool:
    """Return whether a tensor is wrapped by a `torch.func` transform, so that no kernel may be given its memory.

    torch 2.13. Kernels are launched by hand, past the dispatcher that would unwrap it.
    """
    return bool(torch._C._functorch.is_functorch_wrapped_tensor(value))


def flatten(tree: Any) -> tuple[list[Any], Any]:
    """Return the leaves of nested tuples, lists and dictionaries, and their form, which can be compared and hashed.

    torch 2.13. It is the same walk that vmap takes, named tuples included; torch gives it no public name.
    """
    return _pytree.tree_flatten(tree)


def unflatten(leaves: Sequence[Any], form: Any) -> Any:
    """Undo `flatten`."""
    return _pytree.tree_unflatten(leaves, form)


def copy_each(targets: Sequence[Tensor], sources: Sequence[Tensor]) -> None:
    """Copy every source to its target, on a GPU in a few launches for all of them.

    torch 2.13. A loop over `Tensor.copy_` is the same in one launch per tensor.
    """
    torch._foreach_copy_(list(targets), list(sources))


def absolute_sums(values: Sequence[Tensor]) -> list[Tensor]:
    """Return the sum of absolute values of every tensor, on a GPU in a few launches for all of them.

    torch 2.13. A loop over `Tensor.norm(1)` is the same in one launch per tensor.
    """
    return list(torch._foreach_norm(list(values), 1))


def convolve(layer: nn.Conv2d, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Apply a convolutional layer with another weight and bias than its own.

    torch 2.13. It is what the layer's own forward calls; without it every padding mode would be written anew here.
    """
    return layer._conv_forward(x, weight, bias)


def is_batch_norm(layer: nn.Module) -> bool:
    """Return whether a layer normalises by the rows of a batch.

    torch 2.13, `_BatchNorm`, which is the base of the lazy ones and of people's own too; the public classes are not.
    """
    return isinstance(layer, nn.modules.batchnorm._BatchNorm)


def dropout_rate(layer: nn.Module) -> float:
    """Return the rate of a dropout layer, and 0 of any other. torch 2.13, `_DropoutNd`, the base of all of them."""
    return float(layer.p) if isinstance(layer, nn.modules.dropout._DropoutNd) else 0.0


# torch: its compiler


class _Unloaded:
    """A module of torch's compiler that is loaded when someone asks it for more than is known of it here."""

    def __init__(self, name: str, **known: Any) -> None:
        self._name = name
        self.__dict__.update(known)

    def __getattr__(self, name: str) -> Any:
        return getattr(import_module(self._name), name)


@contextmanager
def compiler_unloaded() -> Iterator[None]:
    """Keep `torch.func.grad` from loading torch's compiler, 2 s of imports, to switch the compiler's autograd off.

    torch 2.13. While the compiler is not loaded nobody can have switched that on. Whoever asks for anything else of
    the compiler meanwhile is given the real one; so a later torch that asks for more is slower, and not wrong.
    """
    name = "torch._dynamo"
    if name in sys.modules:
        yield
        return
    switch = _Unloaded(f"{name}.compiled_autograd", _disable=nullcontext)
    ours = _Unloaded(name, compiled_autograd=switch)
    torch._dynamo = ours  # type: ignore[assignment]
    try:
        yield
    finally:
        if vars(torch).get("_dynamo") is ours:
            del torch._dynamo


# Triton


def compile_kernel(jit: Any, grid: tuple[int, ...], arguments: Sequence[Any], constants: Mapping[str, Any]) -> Any:
    """Compile what `jit[grid](*arguments, **constants)` would launch; return Triton's kernel.

    Triton 3.9, `JITFunction.warmup`. Without it every kernel is compiled when it is first launched, one after another.
    """
    return jit.warmup(*arguments, grid=grid, **constants)


def load_kernel(made: Any) -> None:
    """Compile what launches a compiled kernel, too. Triton 3.9: its attribute `run` does it when it is first read."""
    getattr(made, "run", None)


class Anatomy(NamedTuple):
    """What Triton knows of a compiled kernel."""

    name: str
    signature: Mapping[str, Any]
    """Types of the arguments, by name."""
    warps: int
    shared: int
    """Bytes of shared memory of a block."""
    registers: int
    """Of a thread."""
    spilled: int
    """Bytes of a thread that did not fit."""


def anatomy(made: Any, said: str) -> Anatomy:
    """Return what a compiled kernel is like; `said` is what was printed while it was compiled in `absent_gpu`.

    Triton 3.9, `CompiledKernel.src` and `.metadata`, and the words of the ptxas that comes with it.
    """
    registers, spilled = (
        sum(map(int, re.findall(pattern, said))) for pattern in (r"Used (\d+) registers", r"(\d+) bytes spill")
    )
    return Anatomy(
        made.src.fn.__name__, made.src.signature, made.metadata.num_warps, made.metadata.shared, registers, spilled
    )


def is_interpreted() -> bool:
    """Return whether Triton interprets kernels and compiles none. Triton 3.9, `knobs.runtime.interpret`."""
    from triton import knobs  # noqa: PLC0415  it need not be installed

    return bool(knobs.runtime.interpret)


@contextmanager
def absent_gpu(capability: int) -> Iterator[None]:
    """Let Triton compile for a GPU that is not there, anew, and print what the assembler thought of it.

    Triton 3.9: its compiler asks the active driver for the three functions below, and the driver stays; `knobs.cache`
    and `knobs.nvidia` with their `scope`. Without it kernels can be looked at on such a GPU alone.
    """
    from triton import knobs  # noqa: PLC0415
    from triton.backends.compiler import GPUTarget  # noqa: PLC0415
    from triton.runtime import driver  # noqa: PLC0415

    target = GPUTarget("cuda", capability, 32)
    driver.set_active(
        SimpleNamespace(get_current_target=lambda: target, get_current_device=lambda: 0, get_current_stream=lambda _: 0)
    )
    with TemporaryDirectory() as folder, knobs.cache.scope(), knobs.nvidia.scope():
        knobs.cache.dir, knobs.nvidia.dump_ptxas_log = folder, True
        yield


# dp-accounting


def renyi(event: Any, neighbours: Any, orders: Sequence[float]) -> np.ndarray:
    """Return the Renyi divergences of an event of dp-accounting, order by order.

    dp-accounting 0.6. Its accountant composes them and does not give them out; to compose anew for every round, 0.1 s
    each, would be most of a small round's time.
    """
    from dp_accounting import rdp  # noqa: PLC0415

    accountant = rdp.RdpAccountant(orders, neighbours)
    accountant.compose(event)
    return np.asarray(accountant._rdp)


# Linux

_PARENT_DEATH_SIGNAL = 1
"""PR_SET_PDEATHSIG of sys/prctl.h."""


def kill_with_parent() -> None:
    """Let the system kill this process when the thread that has started it ends; only Linux can.

    prctl(2), since Linux 2.1; Python has no function for it.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PARENT_DEATH_SIGNAL, signal.SIGKILL)


# glibc

_TRIM_THRESHOLD, _TOP_PAD, _MMAP_THRESHOLD = -1, -2, -3
"""Names of settings in malloc.h."""
_USUAL = ((_TRIM_THRESHOLD, 128 << 10), (_TOP_PAD, 128 << 10), (_MMAP_THRESHOLD, 128 << 10))
# Older versions refuse a threshold above 32 MiB and keep the one before.
_KEEPING = (
    (_TRIM_THRESHOLD, (1 << 31) - 1),
    (_TOP_PAD, 64 << 20),
    (_MMAP_THRESHOLD, 32 << 20),
    (_MMAP_THRESHOLD, 1 << 30),
)


@contextmanager
def memory_kept() -> Iterator[None]:
    """Keep freed blocks in the process meanwhile; then set the usual thresholds and give back what is free.

    glibc 2.36. It returns every freed block above a threshold to the system and faults it in anew at the next step; a
    batch's activations are such blocks, and the faults take as long as the arithmetic. Elsewhere nothing is changed.
    """
    libc = _glibc()
    if libc is None:
        yield
        return
    try:
        for name, value in _KEEPING:
            libc.mallopt(name, value)
        yield
    finally:
        for name, value in _USUAL:
            libc.mallopt(name, value)
        libc.malloc_trim(0)


def _glibc() -> ctypes.CDLL | None:
    try:
        libc = ctypes.CDLL(None)
        wanted = ("gnu_get_libc_version", "mallopt", "malloc_trim")
        return libc if all(hasattr(libc, name) for name in wanted) else None
    except (OSError, TypeError):  # no dynamic loader, or Windows
        return None


# Python


def line_is_cut(error: Exception) -> bool:
    """Return whether an error says that the line is gone, and nothing about who is at its end.

    Python 3.11 and OpenSSL 3.0, whose words stand in the errors of whoever is built on `ssl`, httpx for one.

    >>> line_is_cut(OSError("[SSL: UNEXPECTED_EOF_WHILE_READING] EOF occurred in violation of protocol (_ssl.c:1006)"))
    True
    >>> line_is_cut(OSError("[SSL: CERTIFICATE_VERIFY_FAILED] certificate verify failed"))
    False
    """
    said = str(error).lower()
    return any(text in said for text in ("eof occurred", "connection reset", "handshake operation timed out"))


def end_workers(pool: ProcessPoolExecutor) -> None:
    """End a pool's processes at once, whatever they are doing, and start nothing that waits.

    Python 3.11 to 3.13; from 3.14 on there is a public way. Without it a Ctrl-C waits for the end of every run.
    """
    if hasattr(pool, "terminate_workers"):
        pool.terminate_workers()
        return
    for process in list((pool._processes or {}).values()):
        process.terminate()
    pool.shutdown(wait=False, cancel_futures=True)
