"""Simulated liars: who they are, what they send, that no schedule knows of it, and what a rule does against them."""

from __future__ import annotations

import tomllib

import numpy as np
import pytest
import torch
from torch.testing import assert_close

import metavd
from metavd.core import rng
from metavd.core.types import Update
from metavd.engine import attacks
from metavd.engine.turn import Moment
from metavd.errors import SpecError, UserError
from metavd.runs.settings import Experiment, resolve, spec_hash, with_settings
from metavd.runs.setup import prepare

TINY = {"method": "fedavg", "clients": 10, "unseen": 2, "cohort": 5, "rounds": 3, "width": 8, "eval_every": 100,
        "local_epochs": 1}  # fmt: skip


def model(**settings):
    return metavd.run(**(TINY | settings))["model_sha256"]


def test_no_attack_and_the_mean_are_the_defaults_and_keep_a_run_s_name():
    """Law: said or not said, a run has the same bits, and the name that it had before there were such settings."""
    plain = resolve(with_settings(Experiment(), TINY))
    said = resolve(with_settings(Experiment(), {**TINY, "attack": "none", "aggregate": "mean"}))
    assert spec_hash(plain) == spec_hash(said)
    assert resolve(Experiment(method="fedavg", rounds=5, content="x")).aggregate == "mean"
    assert model() == model(attack="none", aggregate="mean")
    others = [{"attack": "sign-flip:0.3"}, {"aggregate": "median"}, {"attack": "sign-flip:0.4"}]
    hashes = {spec_hash(resolve(with_settings(Experiment(), TINY | more))) for more in others}
    assert len(hashes | {spec_hash(plain)}) == 4


@pytest.mark.parametrize(("share", "count"), [(0.3, 6), (0.25, 5), (0.01, 0), (1.0, 20)])
def test_the_share_of_liars_is_exact_and_fixed_by_the_seed(share, count):
    who = attacks.liars(rng.key(3), 20, share)
    assert who.sum() == count
    assert np.array_equal(who, attacks.liars(rng.key(3), 20, share))
    if 0 < count < 20:
        assert any(not np.array_equal(who, attacks.liars(rng.key(seed), 20, share)) for seed in range(4, 8))


def falsified(text, cohort=(1, 4, 7), liars=(4, 5)):
    """What three clients tell the server, and what they would tell it."""
    who = np.isin(np.arange(10), liars)
    source = torch.Generator().manual_seed(0)
    sent = {"a.weight": torch.randn(2, 3, generator=source).double().expand(3, 2, 3), "a.mask": torch.ones(3, 2, 3)}
    answers = {"a.weight": torch.randn(3, 2, 3, generator=source).double(), "a.mask": torch.zeros(3, 2, 3)}
    update = Update(torch.tensor(cohort), answers, torch.ones(3), sent)
    return attacks.falsified(attacks.parse(text), who, update, list(cohort), Moment(rng.key(0), 2, torch.tensor(2.0)))


@pytest.mark.parametrize(("text", "factor"), [("sign-flip:0.2", -1.0), ("scale:0.2:7", 7.0), ("scale:0.2", 10.0)])
def test_a_liar_goes_the_wrong_way_from_what_it_was_sent(text, factor):
    """Liars alone send sent + factor (answer - sent); masks are not touched."""
    honest, told = falsified("label-flip:0.2"), falsified(text)
    assert torch.equal(told.params["a.weight"][[0, 2]], honest.params["a.weight"][[0, 2]])
    sent, answer = honest.sent["a.weight"][1], honest.params["a.weight"][1]
    assert_close(told.params["a.weight"][1], sent + factor * (answer - sent), rtol=1e-12, atol=1e-14)
    assert (told.params["a.mask"] == 0).all()
    nobody = falsified(text, liars=(5,))
    assert torch.equal(nobody.params["a.weight"], honest.params["a.weight"])


def test_noise_has_its_deviation_and_is_the_client_s_own():
    """It does not depend on who else answers, and grows with std."""
    honest = falsified("label-flip:0.2").params["a.weight"]
    one, two = (falsified(f"noise:0.2:{std}").params["a.weight"] - honest for std in (1, 3))
    assert_close(two[1], 3 * one[1], rtol=1e-6, atol=1e-9)
    assert (one[[0, 2]] == 0).all()
    assert (one[1] != 0).all()
    other = falsified("noise:0.2:1", cohort=(4, 6, 8)).params["a.weight"] - honest
    assert_close(other[0], one[1], rtol=1e-9, atol=1e-12)


def test_false_labels_are_seen_by_the_training_of_liars_alone():
    """K - 1 - y on the liars' training rows; what anybody is tested or personalised with stays as it is."""
    setup = prepare(with_settings(Experiment(), TINY))
    who = attacks.liars(rng.key(0), 10, 0.3)
    attack = attacks.parse("label-flip:0.3")
    pool = attacks.deceived(attack, setup.pool, who)
    rows = np.concatenate([setup.pool.federation.train[client] for client in np.flatnonzero(who)])
    assert torch.equal(pool.y[rows], 9 - setup.pool.y[rows])
    others = np.setdiff1d(np.arange(len(pool.y)), rows)
    assert torch.equal(pool.y[others], setup.pool.y[others])
    assert pool.y is not setup.pool.y
    assert attacks.deceived(attacks.parse("sign-flip:0.3"), setup.pool, who) is setup.pool


@pytest.mark.parametrize("attack", ["sign-flip:0.3", "noise:0.3:0.1", "label-flip:0.3"])
def test_every_schedule_has_the_same_liars(attack):
    """Parity: loop and threads to the bit, vmap to rounding; and the attack does something."""
    found = {}
    for backend in ("loop", "threads", "vmap"):
        found[backend] = metavd.run(**TINY, attack=attack, aggregate="median", backend=backend, dtype="float64")
    assert found["loop"]["model_sha256"] == found["threads"]["model_sha256"]
    assert found["vmap"]["test"]["nll"] == pytest.approx(found["loop"]["test"]["nll"], abs=1e-9)
    honest = metavd.run(**TINY, aggregate="median", backend="loop", dtype="float64")
    assert found["loop"]["model_sha256"] != honest["model_sha256"]


def test_the_median_keeps_more_than_the_mean():
    """A third of the clients go the wrong way: on equal shares of the digits the median loses less."""
    common = {"method": "fedavg", "partition": "iid", "cohort": 12, "rounds": 12, "eval_every": 100, "backend": "vmap"}
    mean, median = (
        metavd.run(**common, attack="sign-flip:0.3", aggregate=rule)["test"]["accuracy"] for rule in ("mean", "median")
    )
    assert median > mean + 0.08


def test_compare_takes_liars_and_a_rule(tmp_path):
    """Every method of a table has the same liars; another attack is another folder."""
    settings = {key: value for key, value in TINY.items() if key != "method"}
    metavd.compare(["fedavg", "reptile"], seeds=1, out=tmp_path, attack="noise:0.3:5", aggregate="median", **settings)
    lines = [tomllib.loads(path.read_text()) for path in tmp_path.rglob("config.toml")]
    assert [(each["attack"], each["aggregate"]) for each in lines] == [("noise:0.3:5", "median")] * 2
    with pytest.raises(UserError, match="holds another run"):
        metavd.compare(["fedavg"], seeds=1, out=tmp_path, attack="none", aggregate="median", **settings)


def test_wrong_texts_are_answered_with_one_sentence():
    for text, says in {
        "sign-flop:0.3": "did you mean sign-flip", "sign-flip": "takes a number after colons, such as sign-flip:0.3",
        "sign-flip:1.2": "above 0 and at most 1", "noise:0": "above 0", "scale:0.2:inf": "such as scale:0.3",
    }.items():  # fmt: skip
        with pytest.raises(SpecError, match=says):
            attacks.parse(text)
    with pytest.raises(SpecError, match="none of 10 clients"):
        metavd.run(**TINY, attack="noise:0.01")
    with pytest.raises(SpecError, match="needs a cohort of at least 9, but cohort is 5"):
        metavd.run(**TINY, aggregate="krum:3")


@pytest.mark.parametrize(
    ("method", "more", "says"),
    [("fedbe", {}, "every client's model"), ("fedavg+metavd+drop", {"dropped": "released"}, "use dropped=absent")],
)
def test_a_method_that_a_rule_has_no_meaning_for_says_so(method, more, says):
    with pytest.raises(SpecError, match=rf"aggregate is 'median', but .*{says}.*leave it at mean"):
        metavd.run(**TINY | {"method": method}, aggregate="median", **more)
