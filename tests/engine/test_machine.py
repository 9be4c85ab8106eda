"""The CPU's settings: they last as long as a run, and change no result."""

import subprocess
import sys

import torch

import metavd
from metavd.engine import machine


def test_threads_come_back_and_small_models_get_one():
    """Law: a small model runs on one thread, a large one on all, and afterwards everything is as before."""
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        with machine.tuned(1000, "cpu"):
            assert torch.get_num_threads() == 1
        assert torch.get_num_threads() == 2
        with machine.tuned(10**7, "cpu"):
            assert torch.get_num_threads() == 2
        with machine.tuned(1000, "cuda"):
            assert torch.get_num_threads() == 2
        with machine.tuned(10**7, "cpu", "threads"):
            assert torch.get_num_threads() == 1, "each client has a core, and what lies between them one too"
    finally:
        torch.set_num_threads(before)


def test_memory_is_kept_while_a_run_lasts_and_given_back():
    """Law: the thresholds go up on entry, come down on exit, also after an error, and free memory goes back."""
    calls = []

    class Libc:
        def mallopt(self, name, value):
            calls.append((name, value))

        def malloc_trim(self, pad):
            calls.append(("trim", pad))

    original, machine._glibc = machine._glibc, Libc
    try:
        try:
            with machine.tuned(1, "cpu"):
                inside = list(calls)
                raise KeyError
        except KeyError:
            pass
    finally:
        machine._glibc = original
    assert inside == list(machine._KEEPING)
    assert calls[len(inside) :] == [*machine._USUAL, ("trim", 0)]


def test_a_machine_without_glibc_runs_all_the_same(monkeypatch):
    monkeypatch.setattr(machine, "_glibc", lambda: None)
    assert metavd.run(method="fedavg", rounds=1, clients=3, unseen=0, cohort=1, width=8)["trained_rounds"] == 1


UNLOADED = """
import sys, torch, metavd
from metavd.engine import machine
metavd.run(method="maml+metavd", backend="vmap", rounds=2, clients=3, unseen=1, cohort=2, width=8)
assert "torch._dynamo" not in sys.modules and "sympy" not in sys.modules
assert "_dynamo" not in vars(torch), "nothing of ours stays behind"
with machine.tuned(1, "cpu"):
    assert "torch._dynamo" not in sys.modules
    real = torch._dynamo.config  # who asks for more is given the real one
    assert "torch._dynamo" in sys.modules and torch._dynamo is sys.modules["torch._dynamo"]
    torch.func.grad(lambda x: x * x)(torch.ones(()))
assert torch._dynamo.config is real
"""


def test_the_compiler_is_not_loaded_by_a_run_and_there_for_whoever_wants_it():
    """Law: a run loads neither torch's compiler nor its computer algebra, and does not stand in anyone's way."""
    subprocess.run([sys.executable, "-c", UNLOADED], check=True, timeout=120)
