"""`+dp` in whole runs: the base without clip and noise, schedules, stopping and going on, budgets."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

import metavd
from metavd import methods
from metavd.core import accountant, server
from metavd.core.privacy import CLIP
from metavd.engine.rounds import Silent
from metavd.errors import SpecError
from metavd.runs.run import rounds_of
from metavd.runs.settings import Experiment, with_settings
from metavd.runs.setup import prepare, start

pytest.importorskip("dp_accounting")

SMALL = {
    "data": "digits", "model": "mlp", "width": 8, "clients": 12, "cohort": 4, "unseen": 2, "rounds": 3,
    "backend": "loop", "test_share": 0.8,
}  # fmt: skip
BASES = ("fedavg", "fedprox", "reptile", "maml", "perfedavg", "pfedgp", "fedper", "fedrep", "fedbabu", "ditto",
         "pfedme", "fedala", "feddbe", "lrbpfl")  # fmt: skip
PARTS = ("fedavg+ft", "reptile+dropout", "reptile+vd", "reptile+metavd", "maml+metavd+drop", "fedavg+ensemblevd",
         "fedavg+snip", "fedper+metavd", "ditto+vd")  # fmt: skip


class Heard(Silent):
    def __init__(self):
        self.notes = []

    def note(self, text):
        self.notes.append(text)


def small(method: str, **settings) -> dict:
    short = {"chains": 2, "sweeps": 1, "limit": 40} if method.startswith("pfedgp") else {"local_epochs": 1}
    return {**SMALL, "method": method, **short, **settings}


def run(method: str, **settings):
    return metavd.run(**small(method, **settings))


def state_after(method: str, **settings):
    setup = prepare(with_settings(Experiment(), small(method, **settings)))
    return setup, list(rounds_of(setup, start(setup)))[-1][0]


# --- what it goes with -----------------------------------------------------------------------------------------------


def test_it_goes_with_every_base_whose_server_needs_the_sum_alone():
    assert tuple(name for name, entry in methods.entries("base").items() if "summed" in entry.gives) == BASES


@pytest.mark.parametrize("method", [*BASES, *PARTS])
def test_every_such_method_runs_and_says_what_it_spent(method):
    """Also those with a posterior, with masks, with private state; nothing of one client alone is on the server."""
    more = {"drop_from": 1, "threshold": 0.3} if "drop" in method.split("+") else {}
    setup, state = state_after(f"{method}+dp", rounds=2, noise=0.5, **more)
    assert all(len(value) == 1 for name, value in state.params.items() if name.startswith("server.client."))
    assert all(bool(torch.isfinite(value).all()) for value in state.params.values())
    assert setup.algorithm.privacy.multiplier == 0.5


@pytest.mark.parametrize("method", ["fedavg", "fedprox", "reptile", "maml", "perfedavg", "fedper", "ditto"])
def test_no_clip_and_no_noise_is_the_base_with_equal_weights_to_the_bit(monkeypatch, method):
    found = run(f"{method}+dp", noise=0, answer_clip=0, sampling="fixed")
    pull = server.pull
    monkeypatch.setattr(server, "pull", lambda *parts, **how: pull(*parts, **how | {"by_size": False}))
    assert found["model_sha256"] == run(method)["model_sha256"]


def test_an_option_that_two_parts_have_is_the_later_ones():
    """Delta is perfedavg's step of a finite difference too, which stays as it was."""
    found = dict(methods.catalogue._filled("perfedavg+dp", {"delta": 1e-3}))
    by_name = {entry.name: options for entry, options in found.items()}
    assert by_name["dp"].delta == 1e-3
    assert by_name["perfedavg"].delta == 1e-4
    assert dict(methods.catalogue._filled("perfedavg", {"delta": 1e-3}))[methods.REGISTRY["perfedavg"]].delta == 1e-3


def test_cohorts_of_one_size_from_a_varying_number_are_refused():
    with pytest.raises(SpecError, match="use sampling=poisson"):
        run("fedavg+dp", sampling="fixed", available="0.5")
    assert run("fedavg+dp", available="0.5")["privacy"]["epsilon"] > 0


def test_weights_that_regrow_are_refused():
    with pytest.raises(SpecError, match="needs dropped=absent"):
        run("fedavg+metavd+drop+dp", dropped="released")


# --- how it is carried out -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("method", ["fedavg+dp", "reptile+metavd+dp"])
@pytest.mark.parametrize("more", [{}, {"clipping": "adaptive"}, {"noise_from": "sites", "cohort": 12}])
def test_schedules_agree(method, more):
    """Loop and threads to the bit; vmap to rounding."""
    states = [state_after(method, noise=0.5, backend=each, **more)[1] for each in ("loop", "threads", "vmap")]
    for name, value in states[0].params.items():
        torch.testing.assert_close(states[1].params[name], value, rtol=0, atol=0)
        torch.testing.assert_close(states[2].params[name], value, rtol=1e-3, atol=1e-4)


def test_a_round_with_nobody_leaves_what_clients_keep():
    _, state = state_after("fedper+dp", rounds=12, cohort=1)
    assert 0 < len(state.kept.visited()) < 12


def test_poisson_cohorts_vary_and_a_round_may_have_nobody():
    setup = prepare(with_settings(Experiment(), small("fedavg+dp", rounds=60, cohort=1, width=2)))
    sizes = [len(record.cohort) for _, record in rounds_of(setup, start(setup))]
    assert 0.5 < sum(sizes) / len(sizes) < 1.7
    assert 0 in sizes
    assert max(sizes) > 1
    setup = prepare(with_settings(Experiment(), small("fedavg+dp", sampling="fixed")))
    assert [len(record.cohort) for _, record in rounds_of(setup, start(setup))] == [4, 4, 4]


class Stop(Silent):
    def __init__(self, after):
        self.after = after

    def round(self, record):
        if record.round == self.after:
            raise KeyboardInterrupt


def test_a_run_that_is_stopped_and_resumed_has_the_bits_of_one_that_was_not(tmp_path: Path):
    """Noise, cohorts, the adaptive clip and what was spent."""
    how = {"noise": 0.8, "clipping": "adaptive", "rounds": 5, "checkpoint_every": 1}
    whole = run("reptile+metavd+dp", **how)
    with pytest.raises(BaseException, match="stopped after round"):
        metavd.run(**small("reptile+metavd+dp", **how), out=tmp_path / "run", listener=Stop(3))
    parts = metavd.run(**small("reptile+metavd+dp", **how), out=tmp_path / "run", resume=True)
    assert parts["model_sha256"] == whole["model_sha256"]
    assert parts["privacy"] == whole["privacy"]
    lines = [json.loads(line) for line in (tmp_path / "run" / "rounds.jsonl").read_text().splitlines()]
    assert [line["epsilon"] for line in lines] == sorted(line["epsilon"] for line in lines)
    assert lines[-1]["epsilon"] == whole["privacy"]["epsilon"]


def test_the_adaptive_clip_is_part_of_the_state():
    _, state = state_after("fedavg+dp", noise=0.5, clipping="adaptive")
    assert 0 < float(state.params[CLIP]) != 1.0


# --- budgets ---------------------------------------------------------------------------------------------------------


def test_a_budget_finds_the_noise_and_all_rounds_fit():
    result = run("fedavg+dp", epsilon=8, rounds=4)
    assert result["trained_rounds"] == 4
    assert 7.9 < result["privacy"]["epsilon"] <= 8
    assert result["privacy"]["budget"] == 8


def test_a_budget_ends_a_run_before_it_is_exceeded(tmp_path: Path):
    """Told before, told at the end, never more than the budget in any line."""
    heard = Heard()
    given = small("fedavg+dp", noise=1.0, epsilon=6, rounds=40)
    result = metavd.run(**given, out=tmp_path / "run", listener=heard)
    lines = [json.loads(line) for line in (tmp_path / "run" / "rounds.jsonl").read_text().splitlines()]
    assert 1 < result["trained_rounds"] == len(lines) < 40
    assert max(line["epsilon"] for line in lines) == result["privacy"]["epsilon"] <= 6
    assert any("of which 6 may be spent" in text for text in heard.notes)
    assert sum("the privacy budget is spent" in text for text in heard.notes) == 1


def test_more_rounds_do_not_come_with_a_larger_budget(tmp_path: Path):
    """The noise of a longer run would be larger; that does not give back what the first rounds took."""
    metavd.run(**small("fedavg+dp", epsilon=8, rounds=3), out=tmp_path / "run")
    heard = Heard()
    longer = metavd.run(**small("fedavg+dp", epsilon=8, rounds=6), out=tmp_path / "run", resume=True, listener=heard)
    assert longer["trained_rounds"] == 3
    assert longer["privacy"]["epsilon"] <= 8
    assert longer["privacy"]["rounds"] == 3
    assert any("the privacy budget is spent: 3 rounds took" in text for text in heard.notes)


def test_without_the_extra_a_run_with_noise_goes_on_and_says_so(monkeypatch):
    monkeypatch.setattr(accountant, "known", lambda: False)
    monkeypatch.setattr("metavd.engine.ledger.known", lambda: False)
    heard = Heard()
    with pytest.raises(SpecError, match="epsilon is 8, but it takes dp-accounting"):
        run("fedavg+dp", epsilon=8)
    result = metavd.run(**small("fedavg+dp", noise=1.0), listener=heard)
    assert result["privacy"]["epsilon"] is None
    assert any("epsilon is not known without dp-accounting: pip install" in text for text in heard.notes)


def test_without_noise_there_is_no_epsilon_and_no_infinity_in_a_file(tmp_path: Path):
    metavd.run(**small("fedavg+dp", noise=0), out=tmp_path / "run")
    for name in ("result.json", "rounds.jsonl"):
        assert "Infinity" not in (tmp_path / "run" / name).read_text()
    assert json.loads((tmp_path / "run" / "result.json").read_text())["privacy"]["epsilon"] is None
