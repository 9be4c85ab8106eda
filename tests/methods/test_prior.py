"""The label prior: logits + log shares of a client's labels in its loss, and in its answers or not."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from rival_laws import (
    CLIENTS,
    UNSEEN,
    answered,
    assert_same,
    assert_schedules_agree,
    batches_in,
    kept_by,
    setup_of,
    trained,
)
from torch.nn.functional import cross_entropy

from metavd import core, methods
from metavd.core.types import LABELS
from metavd.engine.turn import moment, personal_batches
from metavd.errors import SpecError
from metavd.runs.settings import Experiment, resolve
from metavd.runs.setup import Setup, start

SKEWED: dict[str, Any] = {"partition": "dirichlet:0.5"}
BASES = (
    "fedavg", "fedprox", "reptile", "maml", "perfedavg", "local", "ditto", "fedper", "fedrep", "fedbabu", "fedala",
    "scaffold", "pfedme", "feddbe", "fedbe", "reptile+metavd", "reptile+dropout", "reptile+snip",
)  # fmt: skip


def shares(setup: Setup, client: int, smoothing: float = 0.5) -> np.ndarray:
    """Return a client's label shares, counted here."""
    rows = setup.pool.federation.train[client]
    counts = np.bincount(setup.pool.federation.source.y[rows], minlength=4) + smoothing
    return counts / counts.sum()


@pytest.mark.parametrize(("name", "answer"), [("reptile", "without"), *((name, "with") for name in BASES)])
def test_equal_shares_are_the_base_to_the_bit(name: str, answer: str) -> None:
    """So many rows are added to each class that floats cannot tell the shares apart: nothing at all changes."""
    base = setup_of(name, fields=SKEWED)
    setup = setup_of(f"{name}+prior", fields=SKEWED, prior_smoothing=1e30, prior_answer=answer)
    wanted, found = trained(base, 2), trained(setup, 2)
    assert_same(found.params, wanted.params, within=0)
    assert_same(kept_by(setup, found), kept_by(base, wanted), within=0)
    for mine, theirs in zip(answered(setup, found), answered(base, wanted), strict=True):
        np.testing.assert_array_equal(mine, theirs)


def test_equal_numbers_shift_nothing_and_others_by_the_log_of_their_shares() -> None:
    counts = torch.tensor([7.0, 7.0, 7.0, 7.0], dtype=torch.float64)
    assert torch.equal(core.prior.log_shares(counts, 0.3), torch.zeros(4, dtype=torch.float64))
    counts = torch.tensor([5.0, 0.0, 12.0], dtype=torch.float64)
    pi = (counts + 0.5) / (17.0 + 3 * 0.5)
    found = core.prior.log_shares(counts, 0.5)
    torch.testing.assert_close(found.softmax(0), pi)
    assert float(found.max()) == 0.0


@pytest.mark.parametrize("name", ["fedavg", "reptile", "maml", "local", "ditto", "fedper", "fedbabu", "scaffold"])
def test_answers_with_the_prior_are_those_without_times_the_clients_shares(name: str) -> None:
    """Of known and of unseen clients, each by its own rows; training does not depend on how one answers."""
    without, having = (setup_of(f"{name}+prior", fields=SKEWED, prior_answer=each) for each in ("without", "with"))
    state = trained(having, 2)
    assert_same(state.params, trained(without, 2).params, within=0)
    pairs = list(zip(answered(having, state), answered(without, state), strict=True))
    assert len(pairs) == CLIENTS + UNSEEN
    for client, (mine, plain) in enumerate(pairs):
        wanted = plain * shares(having, client)
        np.testing.assert_allclose(mine, wanted / wanted.sum(-1, keepdims=True), rtol=1e-9)
    assert any(np.abs(mine - plain).max() > 0.05 for mine, plain in pairs), "shares differ"


def test_a_turn_is_descent_on_the_shifted_logits() -> None:
    """FedAvg's turn of one client, written out with autograd."""
    setup = setup_of("fedavg+prior", fields=SKEWED, clip=1e9)
    state = start(setup)
    params = received = dict(state.params)
    pi = torch.from_numpy(shares(setup, 0)).log()
    assert float(pi.max() - pi.min()) > 0.5
    batches = batches_in(setup, state, 0)
    for batch in batches:
        leaves = {name: value.clone().requires_grad_() for name, value in params.items()}
        logits = setup.task.model.apply(leaves, batch.x, None)[0] + pi
        slopes = torch.autograd.grad(cross_entropy(logits, batch.y), list(leaves.values()))
        params = {name: (leaves[name] - 0.1 * slope).detach() for name, slope in zip(leaves, slopes, strict=True)}
    assert_same(setup.algorithm.local(received, batches)[0], params, within=1e-10)


@pytest.mark.parametrize("name", ["reptile+prior", "maml+metavd+prior", "fedper+prior", "fedavg+metavd+drop+prior"])
def test_schedules_agree(name: str) -> None:
    assert_schedules_agree(setup_of(name, fields=SKEWED, prior_answer="with"))


def test_a_newcomer_whose_embedding_is_fitted_fits_it_on_the_shifted_loss() -> None:
    plain = setup_of("fedavg+metavd", fields=SKEWED, newcomer="fit")
    state, entry = trained(plain, 1), "fc1.logvar"

    def received(smoothing: float) -> torch.Tensor:
        setup = setup_of("fedavg+metavd+prior", fields=SKEWED, newcomer="fit", prior_smoothing=smoothing)
        batches = personal_batches(setup.algorithm, setup.pool, CLIENTS, moment(state), CLIENTS, new=True)
        return setup.algorithm.admit(state.params, state.round, batches)[entry]

    batches = personal_batches(plain.algorithm, plain.pool, CLIENTS, moment(state), CLIENTS, new=True)
    base = plain.algorithm.admit(state.params, state.round, batches)[entry]
    assert torch.equal(received(1e30), base)
    assert not torch.equal(received(0.5), base)


def test_batches_tell_a_clients_own_numbers_and_only_where_they_are_asked() -> None:
    setup, base = setup_of("reptile+prior", fields=SKEWED), setup_of("reptile", fields=SKEWED)
    for client in range(CLIENTS):
        rows = setup.pool.federation.train[client]
        wanted = np.bincount(setup.pool.federation.source.y[rows], minlength=4)
        for batch in batches_in(setup, start(setup), client):
            np.testing.assert_array_equal(batch.about[LABELS].numpy(), wanted)
        assert all(not batch.about for batch in batches_in(base, start(base), client))


@pytest.mark.parametrize(
    ("test_rows", "partition", "answer"),
    [("independent", "iid", "without"), ("uniform", "iid", "without"), ("consistent", "iid", "with"),
     ("independent", "natural", "with")],
)  # fmt: skip
def test_auto_answers_as_the_test_rows_are_dealt(test_rows: str, partition: str, answer: str) -> None:
    given = Experiment(method="fedavg+prior", test_rows=test_rows, partition=partition)
    assert resolve(given, {}).options["prior_answer"] == answer


def test_a_base_without_logits_is_refused_in_a_sentence() -> None:
    with pytest.raises(SpecError, match=r"\+prior adds log shares of labels to the logits of a cross-entropy"):
        methods.check("pfedgp+prior")
    assert methods.check("reptile+prior+metavd") == "reptile+metavd+prior"


def test_aggregation_rules_go_with_it() -> None:
    """A rule takes another way through the building of a method, on which batches must tell the numbers too."""
    state = trained(setup_of("fedavg+prior", fields=SKEWED | {"aggregate": "median"}), 1)
    assert all(bool(value.isfinite().all()) for value in state.params.values())
