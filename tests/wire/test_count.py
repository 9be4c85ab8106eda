"""Closed forms of bytes on the wire and of sparsity."""

from __future__ import annotations

import pytest
import torch

from metavd import methods, wire
from metavd.core import rng
from metavd.core.model import from_module
from metavd.core.posterior import InputLogAlpha, LogVariance
from metavd.models.cnn import cnn


def params(mask, *, spread=True, dtype=torch.float32):
    """A masked layer 16 x 8 with bias and spread, and another layer of 24 weights."""
    weight = torch.ones(16, 8, dtype=dtype)
    tree = {"fc.weight": weight, "fc.bias": torch.ones(16, dtype=dtype), "out.weight": torch.ones(3, 8, dtype=dtype)}
    if spread:
        tree["fc.logvar"] = weight
    return tree if mask is None else tree | {"fc.mask": mask.to(dtype)}


def first(count, shape=(16, 8)):
    """A mask that keeps the first `count` entries."""
    size = torch.Size(shape).numel()
    return (torch.arange(size) < count).reshape(shape)


def test_dense():
    """Without masks all entries travel in full, both ways: 4 bytes a number, 8 in float64."""
    assert wire.traffic(params(None)) == wire.Traffic(*[4 * (128 + 128 + 16 + 24)] * 3)
    assert wire.traffic(params(None, spread=False)).up == 4 * (128 + 16 + 24)
    assert wire.traffic(params(None, dtype=torch.float64)).dense == 8 * (128 + 128 + 16 + 24)


@pytest.mark.parametrize(
    ("kept", "mask_bytes"),
    [(128, 0), (127, 4), (125, 12), (124, 16), (100, 16), (64, 16), (5, 16), (4, 16), (3, 12), (1, 4), (0, 0)],
)
def test_masks_travel_as_bits_or_as_positions(kept, mask_bytes):
    """Down: 1 bit an entry, or 4 bytes a position of the fewer kind. Up: kept weights and spreads only, no mask."""
    found = wire.traffic(params(first(kept)))
    rest = 4 * (16 + 24)
    assert found.up == 4 * 2 * kept + rest
    assert found.down == found.up + mask_bytes
    assert found.dense == 4 * 2 * 128 + rest


def test_many_clients_at_once_are_the_sum_of_each():
    """Law: the bytes of clients counted together are the sums of those counted one by one, masks or none."""
    for kept in ([128, 3, 100, 0], [None, None]):
        each = [params(None if count is None else first(count)) for count in kept]
        whole = wire.together({name: torch.stack([one[name] for one in each]) for name in each[0]})()
        assert whole == tuple(map(sum, zip(*map(wire.traffic, each), strict=True)))


def test_positions_stand_for_the_fewer_kind():
    """A mask that drops 3 of 1,024 entries costs 12 bytes, not 128."""
    tree = {"fc.weight": torch.ones(32, 32), "fc.mask": first(1021, (32, 32)).float()}
    assert wire.traffic(tree) == wire.Traffic(4 * 1021 + 12, 4 * 1021, 4 * 1024)


def test_masks_of_units():
    """A mask an input unit takes its column of weights along, and the unit's own rate."""
    mask = torch.tensor([1.0, 0, 0, 0, 1, 1, 0, 1])
    tree = {"fc.weight": torch.ones(16, 8), "fc.logalpha": torch.ones(8), "fc.mask": mask}
    assert wire.traffic(tree) == wire.Traffic(4 * (64 + 4) + 1, 4 * (64 + 4), 4 * (128 + 8))
    assert wire.sparsity(tree, InputLogAlpha(("fc",))) == {"layer": 0.5, "model": 0.5}


class Halves(LogVariance):
    """A posterior whose spreads have a name that none of ours have."""

    ending = "halves"


SPREADS = LogVariance(("fc",))


def test_sparsity():
    """Masked weights over the masked layer's weights, and over all of the model's; spreads do not count."""
    found = wire.sparsity(params(first(32)), SPREADS)
    assert found == pytest.approx({"layer": 0.75, "model": 96 / (128 + 16 + 24)})
    assert wire.sparsity(params(None), SPREADS) == {"layer": 0.0, "model": 0.0}
    assert wire.sparsity(params(first(128)), SPREADS) == {"layer": 0.0, "model": 0.0}
    two = params(first(32)) | {"out.mask": torch.zeros(3, 8)}
    assert wire.sparsity(two, SPREADS)["layer"] == pytest.approx((96 + 24) / (128 + 24))


def test_sparsity_does_not_count_the_spreads_of_any_posterior():
    """Law: what a posterior's entries are called, by us or by a package, changes nothing."""
    tree = params(first(32))
    theirs = {("fc.halves" if name == "fc.logvar" else name): value for name, value in tree.items()}
    assert wire.sparsity(theirs, Halves(("fc",))) == wire.sparsity(tree, SPREADS)


def test_the_released_rules_send_dense_tensors():
    """An entry "keep" saves nothing: weights are sent as zeros; the client needs it, so it travels down as bits."""
    tree, plain = params(None) | {"fc.keep": first(32).float()}, wire.traffic(params(None))
    assert wire.traffic(tree) == plain._replace(down=plain.down + 16)
    assert wire.sparsity(tree, SPREADS) == {"layer": 0.0, "model": 0.0}


# --- the paper's network -------------------------------------------------------------------------------------------


@pytest.fixture
def paper():
    """The paper's CNN and federation; a tiny hypernetwork, which never travels."""
    model = from_module(cnn((3, 32, 32), 100))
    setting = methods.Setting(num_clients=3, num_classes=100, rounds=1000)

    def received(name, **options):
        algorithm = methods.algorithm(name, model, setting, options)
        state = algorithm.server.init(rng.key(0))
        return algorithm.emit.apply(state.params, torch.tensor(0), state.round)

    return received


def test_metavd_costs_a_spread_a_weight(paper):
    """FedAvg sends 383,844 numbers; MetaVD 32,768 more, 8.5 %, and nothing of its hypernetwork."""
    plain, meta = wire.traffic(paper("fedavg")), wire.traffic(paper("fedavg+metavd", hyper_width=2))
    assert plain == wire.Traffic(*[4 * 383_844] * 3)
    assert meta == wire.Traffic(*[4 * (383_844 + 32_768)] * 3)
    assert 4 * 32_768 / plain.up == pytest.approx(0.085, abs=0.001)


def test_snip_at_seventy_percent(paper):
    """9,830 of 32,768 weights travel, with 4,096 bytes of mask downwards; that is 6 % of the whole model."""
    tree = paper("fedavg+snip")
    tree["fc1.mask"] = first(9_830, (128, 256)).float()
    found = wire.traffic(tree)
    assert found.up == 4 * (383_844 - 32_768 + 9_830)
    assert found.down == found.up + 4_096
    assert wire.sparsity(tree) == pytest.approx({"layer": 1 - 9_830 / 32_768, "model": 22_938 / 383_844})


def test_dropped_weights_take_their_spreads_along(paper):
    """reptile+metavd+drop: a dropped weight saves 8 bytes up; 80 % of the layer is 6.8 % of the model."""
    tree = paper("reptile+metavd+drop", hyper_width=2, drop_from=0)
    kept = round(0.2 * 32_768)
    tree["fc1.mask"] = first(kept, (128, 256)).float()
    found = wire.traffic(tree)
    assert found.up == 4 * (383_844 - 32_768) + 8 * kept
    assert found.down == found.up + 4_096
    assert found.dense == 4 * (383_844 + 32_768)
    assert wire.sparsity(tree, LogVariance(("fc1",)))["model"] == pytest.approx(0.068, abs=0.001)
