"""pFedFDA: the head is that of linear discriminant analysis, and statistics gathered in steps are those of all rows."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from sklearn.discriminant_analysis import LinearDiscriminantAnalysis
from small_world import (
    answered,
    assert_close,
    assert_schedules_agree,
    differences,
    kept,
    late,
    setup_of,
    trained,
)
from torch import Tensor, nn

from metavd.core import lda
from metavd.core.model import from_module, headless
from metavd.core.types import Batch, Model, Sampling
from metavd.engine.turn import moment, personal_batches, received_for_test, train_batches
from metavd.errors import SpecError
from metavd.methods import Setting, algorithm
from metavd.runs.setup import start
from metavd.tree import Params

FIT = lda.Fit(num_classes=3, layer="1", grid=6, ridge=0.0, shrinkage=0.0, least=1, floor=1e-13)


@pytest.fixture
def identity() -> Model:
    """A network whose features are its inputs: 4 -> 4 -> 3 with a unit matrix."""
    body = nn.Linear(4, 4)
    nn.init.eye_(body.weight)
    nn.init.zeros_(body.bias)
    return from_module(nn.Sequential(body, nn.Linear(4, 3)).double())


def rows(count: int, seed: int = 0, classes: int = 3) -> tuple[Tensor, Tensor]:
    source = np.random.RandomState(seed)
    y = np.sort(source.randint(0, classes, count))
    shape = source.randn(4, 4)
    return torch.from_numpy(2.0 * source.randn(classes, 4)[y] + source.randn(count, 4) @ shape), torch.from_numpy(y)


def passes(x: Tensor, y: Tensor, epochs: int, batch: int, *, pad: int = 0) -> list[Batch]:
    """Cut shuffled passes into batches, the last of a pass short; `pad` adds rows that must not count."""
    found = []
    size = torch.tensor(float(len(y))).double()
    for epoch in range(epochs):
        order = torch.randperm(len(y), generator=torch.Generator().manual_seed(epoch))
        for part in order.split(batch):
            mask = torch.cat([torch.ones(len(part)), torch.zeros(pad)]).double() if pad else None
            bx, by = torch.cat([x[part], torch.full((pad, 4), 9.0).double()]), torch.cat([y[part], y[:1].expand(pad)])
            found.append(Batch(bx, by, mask, torch.tensor(epoch), torch.zeros(()).double(), size))
    return found


def received(model: Model, *, means: Tensor | None = None, covariance: Tensor | None = None) -> Params:
    params = headless(model).init(torch.tensor(0))
    some = torch.randn(3, 4, generator=torch.Generator().manual_seed(5), dtype=torch.float64)
    return params | {
        lda.MEANS: some if means is None else means,
        lda.COVARIANCE: torch.eye(4).double() if covariance is None else covariance,
    }


def stage(model: Model, fit: lda.Fit, batch: int, **options: object):
    chosen = {"lr": 0.1, "clip": 5.0, "personal": True} | options
    return lda.stage(headless(model), Sampling(batch, lda.COUNTING + lda.SPLITS), fit, **chosen)  # type: ignore[arg-type]


def own_statistics(monkeypatch: pytest.MonkeyPatch) -> None:
    """Mix with weight 1: the client's own statistics alone."""
    monkeypatch.setattr(lda, "_grid", lambda fit, like: torch.ones(fit.grid, dtype=like.dtype))


@pytest.mark.parametrize("pad", [0, 3])
@pytest.mark.parametrize("shrinkage", [0.0, 0.3])
def test_the_head_is_scikit_learns(
    identity: Model, monkeypatch: pytest.MonkeyPatch, pad: int, shrinkage: float
) -> None:
    """Closed form: on Gaussian classes, with own statistics alone, logits are those of LinearDiscriminantAnalysis."""
    own_statistics(monkeypatch)
    x, y = rows(61)
    fit = replace(FIT, shrinkage=shrinkage)
    own, _ = stage(identity, fit, 8)(received(identity), passes(x, y, 3, 8, pad=pad))
    known = LinearDiscriminantAnalysis(solver="lsqr", shrinkage=shrinkage or None).fit(x.numpy(), y.numpy())
    new, _ = rows(40, seed=3)
    torch.testing.assert_close(
        identity.apply(own, new, None)[0].softmax(-1), torch.from_numpy(known.predict_proba(new.numpy())),
        rtol=1e-7, atol=1e-9,
    )  # fmt: skip


def test_mixing_weights_are_those_that_answer_the_other_half_best(identity: Model) -> None:
    """Closed form: the sum over two passes of the held-out halves' losses, computed from rows, has the same minimum."""
    x, y = rows(45)
    fit = replace(FIT, ridge=1e-3, shrinkage=1e-3, least=2)
    batches = passes(x, y, 3, 7)
    start = received(identity, covariance=2.0 * torch.eye(4).double())
    means, covariance = start[lda.MEANS], start[lda.COVARIANCE]
    prior = torch.bincount(y, minlength=3).double().div(45).log()

    def fitted(z: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        centre = torch.stack([z[labels == k].mean(0) if (labels == k).sum() >= 2 else means[k] for k in range(3)])
        gap = z - centre[labels]
        return centre, gap.T @ gap / len(z) + 1e-3 * torch.eye(4)

    def mixed(own: tuple[Tensor, Tensor], a: float, b: float) -> tuple[Tensor, Tensor]:
        return means + a * (own[0] - means), covariance + b * (own[1] - covariance)

    def logits(z: Tensor, m: Tensor, s: Tensor) -> Tensor:
        shrunk = 0.999 * s + 0.001 * s.trace() / 4 * torch.eye(4)
        weight = m @ torch.linalg.inv(shrunk)
        return z @ weight.T - 0.5 * (m * weight).sum(-1) + prior

    risk = torch.zeros(6, 6).double()
    for epoch in (1, 2):
        z = torch.cat([batch.x for batch in batches[7 * epoch : 7 * epoch + 7]])
        labels = torch.cat([batch.y for batch in batches[7 * epoch : 7 * epoch + 7]])
        half = fitted(z[:22], labels[:22])
        for i, b in enumerate(np.linspace(0, 1, 6)):
            for j, a in enumerate(np.linspace(0, 1, 6)):
                said = logits(z[22:], *mixed(half, a, b))
                risk[i, j] += nn.functional.cross_entropy(said, labels[22:], reduction="sum")
    steps, _ = replace(stage(identity, fit, 7), final=None)(start, batches)
    torch.testing.assert_close(steps["lda.risk"], risk, rtol=1e-6, atol=1e-6)
    best = int(risk.argmin())
    b, a = np.linspace(0, 1, 6)[[best // 6, best % 6]]
    assert a > 0, "something is learned"
    wanted = mixed(fitted(x, y), a, b)
    sent, _ = stage(identity, fit, 7, personal=False)(start, batches)
    torch.testing.assert_close(sent[lda.MEANS], wanted[0], rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(sent[lda.COVARIANCE], wanted[1], rtol=1e-9, atol=1e-9)
    own, _ = stage(identity, fit, 7)(start, batches)
    torch.testing.assert_close(identity.apply(own, x, None)[0], logits(x, *wanted), rtol=1e-6, atol=1e-6)


def test_a_class_without_rows(identity: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    """Closed form: its mean stays the received one, it can still be answered, and its prior is the floor's share."""
    own_statistics(monkeypatch)
    x, y = rows(30, classes=2)
    fit = replace(FIT, floor=0.01, ridge=0.1)
    start = received(identity)
    sent, _ = stage(identity, fit, 8, personal=False)(start, passes(x, y, 3, 8))
    assert torch.equal(sent[lda.MEANS][2], start[lda.MEANS][2])
    torch.testing.assert_close(sent[lda.MEANS][1], x[y == 1].mean(0), rtol=1e-10, atol=1e-10)
    own, _ = stage(identity, fit, 8)(start, passes(x, y, 3, 8))
    weight = torch.linalg.solve(sent[lda.COVARIANCE], sent[lda.MEANS][2])
    expected = -0.5 * sent[lda.MEANS][2] @ weight + np.log(0.01 / 1.03)
    torch.testing.assert_close(own["1.bias"][2], expected, rtol=1e-9, atol=1e-9)


def test_a_client_without_rows_returns_what_it_received(identity: Model) -> None:
    """Law: no rows, no statistics of one's own; the head is that of equal shares."""
    start = received(identity)
    sent, loss = stage(identity, FIT, 8, personal=False)(start, [])
    assert_close(start, sent, 0.0)
    assert float(loss) == 0.0
    own, _ = stage(identity, FIT, 8)(start, [])
    weight, bias = lda.head(start[lda.MEANS], start[lda.COVARIANCE], 0.0)
    torch.testing.assert_close(own["1.bias"], bias - np.log(3))
    torch.testing.assert_close(own["1.weight"], weight)


def test_one_row_is_enough(identity: Model) -> None:
    """Law: with nothing to fit in the first half all mixtures answer alike, and the received statistics stay."""
    x, y = rows(1)
    start = received(identity)
    sent, _ = stage(identity, replace(FIT, ridge=1e-3), 8, personal=False)(start, passes(x, y, 3, 8))
    assert_close(start, sent, 1e-12)


def test_features_are_trained_under_the_head_of_the_received_classes() -> None:
    """Closed form: a client's features after a round are those of SGD under a fixed head, from its own label shares."""
    setup = setup_of("pfedfda", {"local_epochs": 2})
    state, client = start(setup), 1
    batches = train_batches(setup.algorithm, setup.pool, client, moment(state), client)
    got = setup.algorithm.emit.apply(state.params, torch.tensor(client), state.round)
    sent, _ = setup.algorithm.local(got, batches)
    each = len(batches) // 5
    counts = torch.bincount(torch.cat([batch.y for batch in batches[:each]]), minlength=4).double()
    weight, bias = lda.head(got[lda.MEANS], got[lda.COVARIANCE], 1e-4)
    share = counts / counts.sum() + 1e-4
    features = {name: value.clone().requires_grad_() for name, value in got.items() if not name.startswith("lda.")}

    def run(x: Tensor) -> Tensor:
        for layer in ("fc0", "fc1"):
            x = nn.functional.leaky_relu(x @ features[f"{layer}.weight"].T + features[f"{layer}.bias"], 0.1)
        return x

    for batch in batches[each : 3 * each]:
        logits = run(batch.x) @ weight.T + bias + (share / share.sum()).log()
        slopes = torch.autograd.grad(nn.functional.cross_entropy(logits, batch.y), list(features.values()))
        norm = torch.cat([slope.flatten() for slope in slopes]).norm()
        rate = 0.02 * min(1.0, 5.0 / float(norm + 1e-6))
        features = {
            name: (value - rate * slope).detach().requires_grad_()
            for (name, value), slope in zip(features.items(), slopes, strict=True)
        }
    for name, value in features.items():
        torch.testing.assert_close(sent[name], value.detach(), rtol=1e-9, atol=1e-9)


def test_schedules_agree() -> None:
    """Parity: loop, threads, vmap and steps in buffers, several rounds, ragged clients, unseen ones."""
    setup = setup_of("pfedfda", {"local_epochs": 1})
    state = assert_schedules_agree(setup)
    assert not kept(state), "nothing is kept"
    assert "lda.means" not in state.slots
    assert max(differences(state.params, start(setup).params)) > 0.1


def test_the_server_takes_weighted_means_of_the_statistics() -> None:
    """Closed form: sum n_i M_i / sum n_i, beyond any clip and without momentum."""
    setup = setup_of("pfedfda", {"local_epochs": 1, "server_clip": 1e-6, "server_momentum": 0.9})
    state = start(setup)
    new = trained(setup, rounds=1, cohort=7)
    total, found = 0.0, torch.zeros_like(state.params[lda.MEANS])
    for client in range(7):
        batches = train_batches(setup.algorithm, setup.pool, client, moment(state), client)
        sent, _ = setup.algorithm.local(
            setup.algorithm.emit.apply(state.params, torch.tensor(client), state.round), batches
        )
        size = len(setup.pool.federation.train[client])
        total, found = total + size, found + size * sent[lda.MEANS]
    torch.testing.assert_close(new.params[lda.MEANS], found / total, rtol=1e-10, atol=1e-10)


def test_a_miscounted_phase_is_another_result() -> None:
    """The comparison above can fail: steps that take themselves for the next ones end elsewhere."""
    setup = setup_of("pfedfda", {"local_epochs": 1})
    wrong = trained(setup, rounds=1, algorithm=late(setup.algorithm))
    assert max(differences(trained(setup, rounds=1).params, wrong.params)) > 1e-6


def test_an_unseen_client_gets_a_head_of_its_own() -> None:
    """Law: its answers follow from its own rows and the server's parameters, and it answers well."""
    setup = setup_of("pfedfda", {"local_epochs": 2})
    state = trained(setup, rounds=3)
    client = 7
    batches = personal_batches(setup.algorithm, setup.pool, client, moment(state), client, new=False)
    got = received_for_test(
        setup.algorithm, state.params, state.round, torch.tensor(client), batches, unseen=True
    )  # fmt: skip
    own, _ = setup.algorithm.personalize(got, batches)
    assert "fc2.weight" in own
    assert lda.MEANS not in own
    federation = setup.pool.federation
    inputs = setup.pool.inputs(torch.from_numpy(federation.test[client]))
    said = answered(setup, state)
    np.testing.assert_allclose(said[client], setup.algorithm.predict(own, inputs, state.key).probs.numpy(), atol=1e-12)
    right = np.concatenate([probs.argmax(1) == federation.source.y[federation.test[i]] for i, probs in enumerate(said)])
    assert right.mean() > 0.6


def test_needs_a_linear_output_layer(setting: Setting) -> None:
    """A head without a bias has no place for the prior."""
    model = from_module(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 3, bias=False)).double())
    with pytest.raises(SpecError, match="linear layer with a bias"):
        algorithm("pfedfda", model, setting)


def test_takes_no_regulariser(net: Model, setting: Setting) -> None:
    """Its loss is its own."""
    with pytest.raises(SpecError, match="is not possible"):
        algorithm("pfedfda+dropout", net, setting)
