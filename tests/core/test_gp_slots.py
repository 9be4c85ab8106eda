"""The five slots of pFedGP: features and points through `gp`, clients without rows, clients never seen."""

from __future__ import annotations

import pytest
import torch
from torch.func import grad, vmap
from torch.testing import assert_close

from metavd import methods
from metavd.core import emit, gp, gp_slots, rng
from metavd.core.gp_nodes import Inference
from metavd.core.gp_slots import POINTS, Tree
from metavd.core.model import headless
from metavd.core.types import NEW, Update

FEW = Inference(chains=4, sweeps=2)
TREE = Tree(num_classes=3, inference=FEW)
ROUND = torch.zeros(()).double()
OPTIONS = {"chains": 4, "sweeps": 2, "inducing": 2}


@pytest.fixture
def slots(net):
    """The features' model, what is emitted, and a server's parameters."""
    model = headless(net)
    emits = gp_slots.with_points(emit.shared(model), model, 3, 2)
    return model, emits, emits.init(rng.key(0))


def test_points_live_in_feature_space(net, slots):
    """M points a class, as wide as the output layer's inputs, drawn from N(0, 0.01^2) and sent to everyone."""
    model, emits, params = slots
    assert params[POINTS].shape == (3, 2, 3)
    assert set(params) == {*net.init(rng.key(0)), POINTS} - {"fc2.weight", "fc2.bias"}
    many = gp_slots.with_points(emit.shared(model), model, 3, 2000).init(rng.key(0))[POINTS]
    assert many.std().item() == pytest.approx(0.01, rel=0.03)
    assert torch.equal(emits.apply(params, torch.tensor(1), ROUND)[POINTS], params[POINTS])


def test_objective_is_the_predictive_likelihood_of_features(slots, make_batch):
    """gp.loss on the network's features, with the points conditioning; gradients reach weights and points."""
    model, _, params = slots
    batch = make_batch(12)
    loss = gp_slots.predictive_likelihood(model, TREE)
    wanted = gp.loss(model.features(params, batch.x), batch.y, None, batch.key, 3, points=params[POINTS], limit=400,
                     inference=FEW)  # fmt: skip
    assert_close(loss(params, batch, params), wanted)
    assert wanted > 0
    slopes = grad(loss)(params, batch, params)
    assert all(slope.abs().max() > 0 for name, slope in slopes.items() if not name.endswith("bias"))
    assert_close(loss(params, make_batch(12, pad=3), params), wanted, rtol=0, atol=1e-10)


def test_personalisation_conditions_on_the_clients_rows(slots, make_batch):
    """The weights stay as received; the answer is gp.predictive of gp.condition on the client's features."""
    model, _, params = slots
    batch, query = make_batch(9), make_batch(5, seed=1).x
    own, loss = gp_slots.conditioned(model, TREE)(params, [batch])
    assert loss == 0
    assert all(own[name] is params[name] for name in params)
    posterior = gp.condition(
        model.features(params, batch.x),
        batch.y,
        None,
        batch.key,
        3,
        points=params[POINTS],
        limit=400,
        inference=FEW,
    )
    assert_close({name: own[name] for name in posterior}, posterior)
    probs = gp_slots.tree_prediction(model, TREE)(own, query, rng.key(9)).probs
    assert_close(probs, gp.predictive(posterior, model.features(params, query), inference=FEW))
    assert_close(probs.sum(-1), torch.ones(5).double())


def test_padding_and_vmap(slots, make_batch):
    """Padded rows change no answer, and stacked clients answer as each alone."""
    model, _, params = slots
    local, predict = gp_slots.conditioned(model, TREE), gp_slots.tree_prediction(model, TREE)
    query = make_batch(5, seed=9).x

    def answer(batch):
        return predict(local(params, [batch])[0], query, rng.key(0)).probs

    assert_close(answer(make_batch(7, pad=4)), answer(make_batch(7)), rtol=0, atol=1e-10)
    batches = [make_batch(6, seed=i, pad=i) for i in (2, 2)]
    batches[1] = make_batch(5, seed=3, pad=3)
    stacked = type(batches[0])(*(torch.stack(parts) for parts in zip(*(each[:-1] for each in batches), strict=True)))
    together = vmap(answer, randomness="error")(stacked)
    assert_close(together, torch.stack([answer(batch) for batch in batches]), rtol=0, atol=1e-10)


def test_a_client_without_rows_answers_uniformly(slots, make_batch):
    """No batch, or padding alone: every class is equally likely, whatever the points."""
    model, _, params = slots
    query = make_batch(4).x
    nothing = make_batch(3, pad=0)._replace(mask=torch.zeros(3).double())
    for batches in ([], [nothing]):
        own, _ = gp_slots.conditioned(model, TREE)(params, batches)
        probs = gp_slots.tree_prediction(model, TREE)(own, query, rng.key(0)).probs
        assert_close(probs, torch.full((4, 3), 1 / 3).double())


@pytest.mark.parametrize(("novel", "share"), [("laplace", 1 / (9 + 3)), ("zero", 0.0)])
def test_classes_never_seen(slots, make_batch, novel, share):
    """A class without rows gets Laplace's 1/(n + K), or nothing, as in pFedGP."""
    model, _, params = slots
    batch = make_batch(9, classes=2)
    tree = Tree(num_classes=3, inference=FEW, novel=novel)
    own, _ = gp_slots.conditioned(model, tree)(params, [batch])
    probs = gp_slots.tree_prediction(model, tree)(own, make_batch(4, seed=2).x, rng.key(0)).probs
    assert_close(probs[:, 2], torch.full((4,), share).double())


def test_unseen_clients_borrow_points(slots, make_batch):
    """A client never seen conditions on the points of its classes too; a known one does not below the limit."""
    model, emits, params = slots
    params = params | {POINTS: torch.randn(3, 2, 3, generator=torch.Generator().manual_seed(1), dtype=torch.float64)}
    batch = make_batch(6)
    local = gp_slots.conditioned(model, TREE)
    admitted = gp_slots.borrowing(emits)(params, ROUND, [batch])
    own = local(admitted, [batch])[0]
    known = local(emits.apply(params, torch.tensor(0), ROUND), [batch])[0]
    features = model.features(params, batch.x)
    for posterior, borrow in ((own, 1.0), (known, 0.0)):
        wanted = gp.condition(
            features, batch.y, None, batch.key, 3, points=params[POINTS], borrow=borrow, limit=400, inference=FEW
        )
        assert_close(posterior["gp.omega"], wanted["gp.omega"])
    assert (own["gp.omega"][..., 6:] > 0).any()
    assert (known["gp.omega"][..., 6:] == 0).all()
    for name, value in emits.apply(params, torch.tensor(NEW), ROUND).items():
        assert torch.equal(admitted[name], value)


# --- the method ----------------------------------------------------------------------------------------------------


def test_a_round_moves_features_and_points(net, setting, make_batch):
    """The five slots run: local steps lower the loss, the server takes the plain mean, and clients answer."""
    algorithm = methods.algorithm("pfedgp", net, setting, OPTIONS)
    state = algorithm.server.init(rng.key(0))
    assert "fc2.weight" not in state.params
    batch = make_batch(12, classes=3)
    received = algorithm.emit.apply(state.params, torch.tensor(0), state.round)
    adapted, first = algorithm.local(received, [batch])
    _, losses = algorithm.local(received, [batch] * 10)
    assert losses < first
    moved = {name: torch.stack([value, received[name]]) for name, value in adapted.items()}
    sent = {name: torch.stack([value, value]) for name, value in received.items()}
    weight = torch.tensor([9.0, 1.0]).double()
    new = algorithm.server.update(state, Update(torch.tensor([0, 1]), moved, weight, sent))
    for name, value in new.params.items():
        assert_close(value, moved[name].mean(0), rtol=0, atol=1e-12)
    assert (new.params[POINTS] - state.params[POINTS]).abs().max() > 0
    own, _ = algorithm.personalize(algorithm.serve(new.params, torch.tensor(0), new.round), [batch])
    probs = algorithm.predict(own, batch.x, rng.key(0)).probs
    assert_close(probs.sum(-1), torch.ones(12).double())


def test_options_of_the_tree(net, setting):
    """inducing: points a class (0: 30 / classes, at least 1); extra_points and local_steps reach the batches."""
    found = {}
    for classes, inducing in ((3, 0), (3, 5), (100, 0)):
        federation = methods.Setting(4, classes, 100)
        algorithm = methods.algorithm("pfedgp", net, federation, OPTIONS | {"inducing": inducing})
        found[classes, inducing] = algorithm.server.init(rng.key(0)).params[POINTS].shape[1]
    assert found == {(3, 0): 10, (3, 5): 5, (100, 0): 1}
    algorithm = methods.algorithm("pfedgp", net, setting, OPTIONS | {"local_steps": 3, "extra_points": 40})
    assert (algorithm.train_batches.steps, algorithm.train_batches.full, algorithm.train_batches.extra) == (3, True, 0)
    assert (algorithm.personal_batches.full, algorithm.personal_batches.extra) == (True, 40)
