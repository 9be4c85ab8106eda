"""Which backend a CPU takes: a rule about sizes."""

from __future__ import annotations

import pytest
import torch

import metavd
from metavd.core.model import from_module
from metavd.engine.schedule import choice as module
from metavd.engine.schedule.choice import choice, flops
from metavd.models.cnn import cnn
from metavd.models.mlp import mlp
from metavd.models.small_cnn import small_cnn
from metavd.runs.settings import Experiment
from metavd.runs.setup import prepare


def test_flops_are_two_a_weight_and_place():
    """Closed form: a linear layer multiplies and adds once per weight, a convolution once per weight and pixel."""
    assert flops(from_module(mlp((1, 8, 8), 10, 64)), (1, 8, 8)) == 2 * (64 * 64 + 64 * 32 + 32 * 10)
    convolutions = 9 * 3 * 8 * 32 * 32 + 9 * 8 * 8 * 16 * 16 + 9 * 8 * 8 * 8 * 8
    head = 8 * 4 * 4 * 32 + 32 * 16 + 16 * 10
    assert flops(from_module(cnn((3, 32, 32), 10, 8)), (3, 32, 32)) == 2 * (convolutions + head)


@pytest.mark.parametrize(
    ("network", "shape", "batch", "cohort", "wanted"),
    [
        (mlp((1, 8, 8), 10, 64), (1, 8, 8), 10, 100, "vmap"),
        (mlp((1, 8, 8), 10, 64), (1, 8, 8), 10, 1, "threads"),
        (mlp((1, 8, 8), 10, 64), (1, 8, 8), 0, 100, "threads"),
        (small_cnn((1, 8, 8), 10, 16), (1, 8, 8), 10, 10, "vmap"),
        (cnn((3, 32, 32), 10, 64), (3, 32, 32), 64, 10, "threads"),
        (cnn((3, 32, 32), 10, 64), (3, 32, 32), 1, 10, "threads"),
    ],
)
def test_arithmetic_goes_to_threads_and_bookkeeping_to_vmap(network, shape, batch, cohort, wanted):
    assert choice(from_module(network), shape, batch, cohort) == wanted


def test_more_work_never_turns_threads_into_vmap(monkeypatch):
    """Law: the choice is monotonous in the rows of a batch, and turns at the limit."""
    model = from_module(mlp((1, 4, 4), 2, 8))
    one = 3 * flops(model, (1, 4, 4))
    monkeypatch.setattr(module, "_LIGHT", 10 * one)
    assert [choice(model, (1, 4, 4), rows, 4) for rows in (1, 10, 11, 1000)] == ["vmap", "vmap", "threads", "threads"]


SETTINGS = {"method": "fedavg", "clients": 6, "unseen": 0, "cohort": 5, "rounds": 2, "device": "cpu", "width": 8}


def test_a_run_says_which_backend_it_took():
    """Law: auto becomes a name in the resolved description and in the result, and the same name every time."""
    setup = prepare(Experiment(**SETTINGS, model="mlp"))
    assert setup.experiment.backend == "vmap"
    assert setup.schedule.name == "vmap"
    assert metavd.run(**SETTINGS, model="mlp")["backend"] == "vmap"
    assert prepare(Experiment(**SETTINGS, model="mlp", backend="loop")).experiment.backend == "loop"
    assert prepare(Experiment(**SETTINGS | {"cohort": 2}, model="mlp")).experiment.backend == "threads"


def test_a_model_of_the_users_own_is_not_shared_by_threads():
    """There is only one of it: the loop takes the place of threads."""
    model = from_module(mlp((1, 8, 8), 10, 8))
    assert prepare(Experiment(**SETTINGS | {"cohort": 1}), None, model).experiment.backend == "loop"


@pytest.mark.parametrize("method", ["fedavg", "reptile+metavd", "maml+metavd", "pfedgp"])
def test_the_number_of_cores_cannot_be_seen_in_the_bits(method):
    """Law: with one thread per client, one, two and three workers give the same run to the bit."""
    before = torch.get_num_threads()
    hashes = set()
    options = {"chains": 2, "sweeps": 1, "limit": 40} if method == "pfedgp" else {}
    try:
        for cores in (1, 2, 3):
            torch.set_num_threads(cores)
            result = metavd.run(**SETTINGS | {"method": method, "cohort": 3} | options, backend="threads")
            hashes.add(result["model_sha256"])
            assert torch.get_num_threads() == cores
    finally:
        torch.set_num_threads(before)
    assert len(hashes) == 1
