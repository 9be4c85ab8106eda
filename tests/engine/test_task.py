"""The one place that builds an algorithm, and what it asks of whom."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

import metavd
from metavd.core import rng
from metavd.core.model import from_module
from metavd.data.source import Source, digits
from metavd.engine.task import client_task, network, task
from metavd.errors import SpecError
from metavd.models.mlp import mlp
from metavd.runs.settings import Experiment, resolve


def spec(method: str, **options: object) -> Experiment:
    fields = {"clients": 4, "unseen": 0, "cohort": 2, "rounds": 3, "model": "mlp", "width": 8, "device": "cpu"}
    return resolve(Experiment(method=method, options=options, **fields), {})  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def takes() -> Source:
    return digits()


def test_nobody_else_builds_an_algorithm() -> None:
    """Law: of all modules only `engine.task` calls `methods.algorithm`."""
    root = Path(metavd.__file__).parent
    calls = [
        str(path.relative_to(root))
        for path in root.rglob("*.py")
        if re.search(r"methods\.algorithm\(", path.read_text())
    ]
    assert calls == ["engine/task.py"]


def test_only_who_updates_the_server_needs_its_rows(takes: Source) -> None:
    """FedBE distils on rows of the server: its server cannot do without, its clients and models in use can."""
    with pytest.raises(SpecError, match="unlabelled rows on the server"):
        task(spec("fedbe"), takes)
    built = client_task(spec("fedbe"), takes)
    with torch.no_grad():
        state = built.algorithm.server.init(rng.key(0))
        own = built.algorithm.serve(state.params, torch.tensor(0), state.round)
        answer = built.algorithm.predict(own, torch.zeros(2, 1, 8, 8), rng.key(1))
    assert answer.probs.shape == (2, 10)


def test_weights_are_those_of_the_layers(takes: Source) -> None:
    """Closed form: 64 x 8 + 8 x 4 + 4 x 10, and biases do not count."""
    assert task(spec("fedavg"), takes).num_weights == 64 * 8 + 8 * 4 + 4 * 10


def test_a_network_that_is_built_already_is_used(takes: Source) -> None:
    """Law: what `network` made, and a `Model` of the user's own, is the task's; threads may share the former only."""
    e = spec("fedavg")
    made, own = network(e, takes), from_module(mlp((1, 8, 8), 10, 8))
    assert task(e, takes, made).model.run is made.run
    assert network(e, takes, own).run is own.run
