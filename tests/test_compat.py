"""Canaries: each notices when the inside of a library that `compat` leans on is gone or does something else."""

from __future__ import annotations

import ast
import ctypes
import os
import re
import socket
import ssl
import struct
import subprocess
import sys
import time
from collections import namedtuple
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from multiprocessing import get_context
from pathlib import Path

import pytest
import torch

import metavd.version
from metavd import compat

Pair = namedtuple("Pair", ["first", "second"])


def test_transforms_are_seen_from_inside():
    """vmap, grad and both nested are seen, and nothing is left of them afterwards."""
    seen = []

    def square(x):
        seen.append((compat.transform_active(), compat.is_transformed(x)))
        return (x * x).sum()

    rows = torch.ones(2, 3)
    square(rows)
    torch.func.vmap(square)(rows)
    torch.func.grad(square)(rows)
    torch.func.vmap(torch.func.grad(square))(rows)
    torch.autograd.grad(square(rows.requires_grad_()), rows)
    assert seen == [(False, False), (True, True), (True, True), (True, True), (False, False)]


def test_a_tensor_that_is_not_transformed_is_none_within_a_transform():
    """Vmap over one argument leaves the others as they are."""
    other, seen = torch.ones(3), []
    torch.func.vmap(lambda x: seen.append(compat.is_transformed(other)) or x)(torch.ones(2))
    assert seen == [False]


def test_trees_are_taken_apart_and_put_together():
    """Order of the leaves, named tuples, and a form that is a key: CUDA graphs are found by it."""
    tree = (Pair(1, [2, {"b": 3, "a": 4}]), None)
    leaves, form = compat.flatten(tree)
    assert [leaf for leaf in leaves if leaf is not None] == [1, 2, 3, 4]
    assert compat.unflatten(leaves, form) == tree
    assert isinstance(compat.unflatten(leaves, form)[0], Pair)
    same, other = compat.flatten((Pair(5, [6, {"b": 7, "a": 8}]), None))[1], compat.flatten((Pair(1, 2), None))[1]
    assert {form: "found"}.get(same) == "found"
    assert other not in {form: "found"}


def test_lists_of_tensors_are_copied_and_summed():
    """As one by one, to the bit, across dtypes and strides."""
    sources = [torch.randn(3, 4).t(), torch.randn(5).double(), torch.zeros(0), torch.tensor(-2.5)]
    targets = [torch.empty(4, 3), torch.empty(5), torch.empty(0), torch.empty(())]
    compat.copy_each(targets, sources)
    assert all(torch.equal(target, source.to(target.dtype)) for target, source in zip(targets, sources, strict=True))
    values = [torch.tensor([[1.0, -2.0], [3.0, -4.0]]), torch.tensor([float("nan")]), torch.tensor(-0.5)]
    sums = compat.absolute_sums(values)
    assert [float(sums[0]), float(sums[2])] == [10.0, 0.5]
    assert sums[1].isnan()


@pytest.mark.parametrize("mode", ["zeros", "reflect", "circular"])
def test_a_convolution_takes_another_weight(mode):
    """As the layer with that weight, whatever its padding."""
    layer, other = (torch.nn.Conv2d(2, 4, 3, 2, (1, 2), groups=2, padding_mode=mode) for _ in range(2))
    x = torch.randn(3, 2, 8, 7)
    assert torch.equal(compat.convolve(layer, x, other.weight, other.bias), other(x))


def test_layers_of_a_kind_have_a_base():
    """All that torch has of them by name."""
    public = {name: kind for name, kind in vars(torch.nn).items() if isinstance(kind, type)}
    norms = [kind for name, kind in public.items() if name.endswith(("BatchNorm", "BatchNorm1d", "BatchNorm2d"))]
    drops = [kind for name, kind in public.items() if name.endswith(("Dropout", "Dropout1d", "Dropout2d"))]
    assert len(norms) >= 5
    assert len(drops) >= 5
    assert all(compat.is_batch_norm(kind() if "Lazy" in kind.__name__ else kind(4)) for kind in norms)
    assert all(compat.dropout_rate(kind(0.25)) == 0.25 for kind in drops)
    assert not compat.is_batch_norm(torch.nn.GroupNorm(2, 4))
    assert compat.dropout_rate(torch.nn.Linear(2, 2)) == 0


# --- torch's compiler ------------------------------------------------------------------------------------------------

UNLOADED = """
import sys, torch
from metavd import compat
sys.modules["torch._dynamo"] = None
try:
    torch.func.grad(lambda x: x * x)(torch.ones(()))
except ImportError:
    del sys.modules["torch._dynamo"]
else:
    sys.exit("torch.func.grad no longer loads the compiler: compat.compiler_unloaded can go")
with compat.compiler_unloaded():
    slope = torch.func.vmap(torch.func.grad(lambda x: (x * x).sum()))(torch.ones(2, 3))
    assert torch.equal(slope, torch.full((2, 3), 2.0))
    assert "torch._dynamo" not in sys.modules and "sympy" not in sys.modules, "torch asks for something else now"
assert "_dynamo" not in vars(torch), "nothing of ours stays behind"
with compat.compiler_unloaded():
    real = torch._dynamo.config  # who asks for more is given the real one
    assert "torch._dynamo" in sys.modules and torch._dynamo is sys.modules["torch._dynamo"]
    torch.func.grad(lambda x: x * x)(torch.ones(()))
assert torch._dynamo.config is real
"""


def test_the_compiler_is_not_loaded_for_a_gradient_and_there_for_whoever_wants_it():
    """In one process: torch alone would load it, within the context it does not, and the real one is given out."""
    subprocess.run([sys.executable, "-c", UNLOADED], check=True, timeout=600)


# --- Triton ----------------------------------------------------------------------------------------------------------

COMPILED = """
import io, sys
from contextlib import redirect_stdout
import torch, triton
import triton.language as tl
from metavd import compat

@triton.jit
def doubled(x, out, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    tl.store(out + at, 2 * tl.load(x + at))

def compiled(said, block=64):
    with redirect_stdout(said):
        return compat.compile_kernel(doubled, (1,), (torch.ones(64), torch.ones(64)), {"BLOCK": block})

assert not compat.is_interpreted()
with compat.absent_gpu(90):
    said = io.StringIO()
    made = compiled(said)
    found = compat.anatomy(made, said.getvalue())
    assert compiled(io.StringIO()) is made, "what is compiled is not compiled again"
    assert compiled(io.StringIO(), 32) is not made
assert found.name == "doubled" and list(found.signature) == ["x", "out", "BLOCK"], found
assert found.signature["x"] == "*fp32" and found.warps == 4 and found.shared == 0, found
assert 0 < found.registers < 255 and found.spilled == 0, found
assert not triton.knobs.nvidia.dump_ptxas_log, "the settings are as before"
"""


def test_triton_compiles_for_a_gpu_that_is_not_there(tmp_path):
    """And tells of what it made; in a process of its own, where it interprets nothing."""
    pytest.importorskip("triton")
    script = tmp_path / "script.py"  # Triton reads a kernel's source
    script.write_text(COMPILED)
    plain = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    subprocess.run([sys.executable, script], check=True, timeout=600, env=plain)


def test_triton_says_whether_it_interprets(monkeypatch):
    pytest.importorskip("triton")
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    assert compat.is_interpreted()


def test_what_launches_a_kernel_is_made_when_it_is_asked_for():
    """On a GPU alone it can be; here that it is still a property, and of which name."""
    compiler = pytest.importorskip("triton.compiler")
    assert isinstance(compiler.CompiledKernel.run, property)
    asked = []
    compat.load_kernel(type("Kernel", (), {"run": property(asked.append)})())
    assert len(asked) == 1


# --- dp-accounting --------------------------------------------------------------------------------------------------


def test_an_accountant_holds_the_divergences_that_it_composes():
    """A Gaussian mechanism with multiplier 2: order a has a / 8."""
    dp_accounting = pytest.importorskip("dp_accounting")
    near = dp_accounting.NeighboringRelation.ADD_OR_REMOVE_ONE
    assert compat.renyi(dp_accounting.GaussianDpEvent(2.0), near, [2, 3, 8]).tolist() == [0.25, 0.375, 1.0]


# --- Linux -----------------------------------------------------------------------------------------------------------

DYING = """
import ctypes, signal
from metavd import compat
compat.kill_with_parent()
told = ctypes.c_int()
assert ctypes.CDLL(None).prctl(2, ctypes.byref(told)) == 0
assert told.value == signal.SIGKILL
"""


@pytest.mark.skipif(sys.platform != "linux", reason="other systems cannot")
def test_linux_is_told_to_kill_with_the_parent():
    """PR_GET_PDEATHSIG tells what was asked for; test_warm.py lets a parent die."""
    subprocess.run([sys.executable, "-c", DYING], check=True, timeout=600)


# --- glibc -----------------------------------------------------------------------------------------------------------


class Libc:
    def __init__(self):
        self.calls = []

    def mallopt(self, name, value):
        self.calls.append((name, value))

    def malloc_trim(self, pad):
        self.calls.append(("trim", pad))


def test_memory_is_kept_meanwhile_and_given_back(monkeypatch):
    """Law: the thresholds go up on entry, come down on exit, also after an error, and free memory goes back."""
    libc = Libc()
    monkeypatch.setattr(compat, "_glibc", lambda: libc)
    inside: list[object] = []

    def fail() -> None:
        with compat.memory_kept():
            inside.extend(libc.calls)
            raise KeyError

    with pytest.raises(KeyError):
        fail()
    assert inside == list(compat._KEEPING)
    assert libc.calls[len(inside) :] == [*compat._USUAL, ("trim", 0)]


@pytest.mark.skipif(sys.platform != "linux", reason="glibc is Linux's")
def test_glibc_knows_the_settings():
    """Mallopt answers 1 for what it knows and takes; older versions refuse the last and largest threshold."""
    libc = compat._glibc()
    assert isinstance(libc, ctypes.CDLL)
    assert [libc.mallopt(name, value) for name, value in compat._USUAL] == [1, 1, 1]
    assert [libc.mallopt(name, value) for name, value in compat._KEEPING][:3] == [1, 1, 1]
    assert [libc.mallopt(name, value) for name, value in compat._USUAL] == [1, 1, 1]


def test_a_machine_without_glibc_changes_nothing(monkeypatch):
    monkeypatch.setattr(compat, "_glibc", lambda: None)
    with compat.memory_kept():
        pass


# --- Python ----------------------------------------------------------------------------------------------------------


def handshake(meanwhile):
    """Return what ends a handshake with somebody who never answers it."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        client = socket.create_connection(server.getsockname())
        other, _ = server.accept()
        meanwhile(client, other)
        with client, other, pytest.raises(OSError, match=r".") as failed:
            ssl.create_default_context().wrap_socket(client, server_hostname="nobody")
    return failed.value


def reset(_, other):
    other.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    other.close()


@pytest.mark.parametrize(
    ("meanwhile", "cut"),
    [
        (lambda _, other: other.shutdown(socket.SHUT_WR), True),
        (reset, True),
        (lambda client, _: client.settimeout(0.05), True),
        (lambda _, other: other.send(b"HTTP/1.1 400 Bad Request"), False),
    ],
    ids=["closed", "reset", "timeout", "no TLS"],
)
def test_a_line_that_is_cut_in_a_handshake_is_told_from_a_wrong_peer(meanwhile, cut):
    """The words of this Python and its OpenSSL."""
    assert compat.line_is_cut(handshake(meanwhile)) is cut


@pytest.mark.processes
def test_workers_end_at_once():
    """A worker that would sleep for a minute is gone within seconds."""
    with ProcessPoolExecutor(1, get_context("spawn")) as pool:
        busy = pool.submit(time.sleep, 60)
        while not busy.running():
            time.sleep(0.01)
        workers = list((pool._processes or {}).values())
        assert workers
        began = time.monotonic()
        compat.end_workers(pool)
        with pytest.raises(BrokenProcessPool):
            busy.result(timeout=30)
        # The pool's own thread waits for them too: who comes second does not know yet that they are gone.
        while any(worker.is_alive() for worker in workers) and time.monotonic() - began < 30:
            time.sleep(0.01)
        assert not any(worker.is_alive() for worker in workers)


# --- the law ---------------------------------------------------------------------------------------------------------

PACKAGE = Path(metavd.version.__file__).parent
OPEN = {"_replace", "_asdict", "_fields", "_exit"}
"""Documented names that begin with an underscore: of named tuples, and of `os`."""
DOCUMENTED = {
    "flwr": {"flwr.app", "flwr.serverapp", "flwr.serverapp.strategy", "flwr.clientapp", "flwr.simulation"},
    "triton": {"triton", "triton.language", "triton.testing"},
    "ctypes": set(),
    "uvicorn": set(),
    "starlette": set(),
}
"""Modules of libraries that mostly consist of an inside; of the others, what is private begins with an underscore."""


def private(name: str) -> bool:
    return re.fullmatch(r"_[A-Za-z]\w*", name) is not None


def made_here(tree: ast.AST) -> Iterator[str]:
    """Names that a module defines or assigns, attributes of its own objects among them."""
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield node.name
        elif isinstance(node, ast.Name | ast.Attribute) and isinstance(node.ctx, ast.Store):
            yield node.id if isinstance(node, ast.Name) else node.attr


TREES = {path: ast.parse(path.read_text()) for path in sorted(PACKAGE.rglob("*.py")) if path.name != "compat.py"}
OWN = {name for tree in TREES.values() for name in made_here(tree)} | OPEN


@pytest.mark.parametrize("path", TREES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_only_compat_leans_on_the_inside_of_a_library(path):
    """Law: no other module names a private part that is not the package's own, or imports what is not documented."""
    for node in ast.walk(TREES[path]):
        modules: list[str] = []
        if isinstance(node, ast.ImportFrom) and not node.level:
            module = node.module or ""
            modules = [module, *(f"{module}.{alias.name}" for alias in node.names if module == "triton")]
            names = [*module.split("."), *(alias.name for alias in node.names)]
        elif isinstance(node, ast.Import):
            modules = [alias.name for alias in node.names]
            names = [part for module in modules for part in module.split(".")]
        elif isinstance(node, ast.Attribute):
            names = [] if node.attr in OWN else [node.attr]
        else:
            continue
        assert not [name for name in names if private(name) and name != "__future__"], ast.unparse(node)
        for module in modules:
            assert module in DOCUMENTED.get(module.split(".")[0], {module}), ast.unparse(node)
