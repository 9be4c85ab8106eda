"""The CPU's settings: they last as long as a run, and change no result."""

import subprocess
import sys

import torch

import metavd
from metavd import compat
from metavd.bench.ours import setup_of
from metavd.bench.workload import TINY
from metavd.engine import machine
from metavd.runs.run import using


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


def test_many_small_clients_at_once_have_one_thread_too():
    """Law: the benchmark's tiny workload, 100 clients under vmap, waits for no second thread."""
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        setup = setup_of(TINY, "cpu")
        assert setup.experiment.backend == "vmap"
        with using(setup):
            assert torch.get_num_threads() == 1
    finally:
        torch.set_num_threads(before)


def test_a_machine_without_glibc_runs_all_the_same(monkeypatch):
    monkeypatch.setattr(compat, "_glibc", lambda: None)
    assert metavd.run(method="fedavg", rounds=1, clients=3, unseen=0, cohort=1, width=8)["trained_rounds"] == 1


RUN = """
import sys, metavd
result = metavd.run(method="maml+metavd", rounds=2, clients=3, unseen=1, cohort=3, width=8, device="cpu")
assert result["backend"] == "vmap", "which takes torch.func.grad"
assert not {"torch._dynamo", "sympy"} & set(sys.modules)
"""


def test_the_compiler_is_not_loaded_by_a_run():
    """Law: a run loads neither torch's compiler nor its computer algebra, from choosing a backend to the result."""
    subprocess.run([sys.executable, "-c", RUN], check=True, timeout=600)
