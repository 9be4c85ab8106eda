"""Parity: a federation gives the same bits as the simulator, for every method, whatever the order of arrival."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import metavd
from cheap import cheap
from metavd import methods
from metavd.flower.config import FederationError, run_config
from metavd.flower.rehearse import rehearse

from .support.grid import SMALL, FakeGrid, shares


def simulated(method: str, text: str, rounds: int = 2, **settings: object) -> dict[str, object]:
    """A run of the simulator, with the bound on shares that a federation has by default."""
    pairs = dict(word.split("=") for word in text.split())
    common = {"clients": 3, "cohort": 3, "rounds": rounds, "backend": "loop", "max_share": 2.0}
    return metavd.run(method=method, **(common | pairs | settings))


@pytest.mark.parametrize(
    ("method", "text"),
    [
        ("fedavg", "unseen=0"),
        ("reptile+prior", f"{SMALL} test_rows=consistent"),
        ("reptile+metavd", "unseen=0"),
        ("maml+metavd+drop", "unseen=0 drop_from=1 threshold=0.1"),
        ("maml+metavd", f"{SMALL} hyper_width=8 newcomer=outputs clamp=project spread_step=lr draws_average=loss"),
        ("reptile+ensemblevd", f"{SMALL} hyper_width=8 spread_by=hypernetwork"),
        (
            "pfedgp",
            "unseen=0 model=mlp width=8 chains=2 steps_on=batches passes=1 momentum=0.9 test_points=always",
        ),
    ],
)
def test_the_weights_are_the_simulators(federate, method, text):
    """Same seed, same data: equal to the last bit, with the default network, also where weights are dropped.

    Options that change what clients compute change it for a small network, too.
    """
    result = federate(FakeGrid(shares(3)), method=method, set=text)
    wanted = simulated(method, text)
    assert result["model_sha256"] == wanted["model_sha256"]
    assert result["test"]["accuracy"] == pytest.approx(wanted["test"]["accuracy"], abs=1e-12)
    assert result["test"]["ece_top1"] == pytest.approx(wanted["test"]["ece_top1"], abs=1e-12)
    if "drop" in method:
        assert result["sparsity"]["layer"] > 0.2
        assert result["bytes"]["up"] < 0.95 * result["bytes"]["dense_up"]


OTHERS = [name for name in methods.NAMES if not name.startswith("fedbe")]


@pytest.mark.parametrize("method", OTHERS)
def test_every_method_runs_as_in_the_simulator(federate, method):
    """All methods of `metavd methods` but fedbe, which needs rows of the server's own."""
    own = {"threshold": 0.3} if method.endswith("+drop") else {"limit": 40}
    options = cheap(method, drop_from=0, **own)
    text = " ".join([SMALL.replace(" local_epochs=1", ""), *(f"{key}={value}" for key, value in options.items())])
    result = federate(FakeGrid(shares(3)), method=method, set=text)
    assert result["model_sha256"] == simulated(method, text)["model_sha256"]


@pytest.mark.parametrize("rule", ["median", "krum:0", "clip+geometric-median"])
def test_a_rule_of_aggregation_is_the_simulators(federate, rule):
    """Bit for bit, also where votes go by precision and spreads are clients' own."""
    text = f"{SMALL} aggregate={rule}"
    result = federate(FakeGrid(shares(3)), method="reptile+metavd", set=text)
    assert result["model_sha256"] == simulated("reptile+metavd", text)["model_sha256"]
    with pytest.raises(FederationError, match=r"attack=sign-flip:0\.5, but it makes simulated clients lie"):
        run_config({"set": "attack=sign-flip:0.5"})


def test_fedbe_says_what_it_needs_and_runs_with_it(federate, tmp_path: Path):
    with pytest.raises(FederationError, match="name rows of the server's own with server-data"):
        run_config({"method": "fedbe"})
    plain = federate(FakeGrid(shares(3)), method="fedavg", out=str(tmp_path / "plain"))
    result = federate(FakeGrid(shares(3)), method="fedbe", set=f"{SMALL} distill_steps=4", **{"server-data": "digits"})
    assert result["trained_rounds"] == 2
    assert result["model_sha256"] != plain["model_sha256"]


def test_methods_that_need_others_rows_are_refused():
    with pytest.raises(FederationError, match="extra_points is 40, but it gives a client rows of other clients"):
        run_config({"method": "pfedgp", "set": "extra_points=40"})


def test_a_share_of_the_clients_is_asked_as_in_the_simulator(federate, tmp_path: Path):
    """cohort: the same clients are drawn in the same rounds."""
    result = federate(FakeGrid(shares(6)), method="reptile", clients=6, cohort=2, rounds=4)
    text = SMALL
    assert result["model_sha256"] == simulated("reptile", text, rounds=4, clients=6, cohort=2)["model_sha256"]
    lines = [json.loads(line) for line in (tmp_path / "run" / "rounds.jsonl").read_text().splitlines()]
    assert [len(line["cohort"]) for line in lines] == [2, 2, 2, 2]


def test_half_precision_halves_the_bytes(federate, tmp_path: Path):
    """Every value has two bytes less; of such small messages headers, which say what is halved, take some of that."""
    whole = federate(FakeGrid(shares(3)), method="reptile+metavd")
    half = federate(FakeGrid(shares(3)), method="reptile+metavd", half=True, out=str(tmp_path / "half"))
    for way in ("up", "down"):
        saved, dense = whole["bytes"][way] - half["bytes"][way], whole["bytes"][f"dense_{way}"]
        assert 0.3 < saved / dense <= 0.5
    assert abs(half["test"]["nll"] - whole["test"]["nll"]) < 0.1


def test_what_is_rounded_on_the_way_is_no_clients_doing(federate, tmp_path: Path):
    """Clients that learn nothing leave the model as it was: they began at what was sent, rounded to float16 or not."""
    still = {"method": "fedavg", "set": f"{SMALL} lr=0", "rounds": 2}
    began = federate(FakeGrid(shares(3)), **still)
    ended = federate(FakeGrid(shares(3)), **still, half=True, out=str(tmp_path / "half"))
    assert ended["model_sha256"] == began["model_sha256"]


def test_a_rehearsal_is_the_simulators_run(tmp_path: Path):
    """Sites by name, the run config as keywords: the bits of the simulator."""
    sites = {name: {"partition-id": index} for index, name in enumerate(("north", "east", "south"))}
    config = {"data": "digits", "method": "reptile+metavd", "set": SMALL, "rounds": 2, "eval_every": 1}
    result = rehearse(sites, out=str(tmp_path), **config)
    assert result["model_sha256"] == simulated("reptile+metavd", SMALL)["model_sha256"]
