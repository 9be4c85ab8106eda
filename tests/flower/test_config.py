"""A run config is checked at once, and says in one sentence what would be right."""

from __future__ import annotations

import tomllib
from dataclasses import fields
from pathlib import Path

import pytest

from metavd.errors import UserError
from metavd.flower.config import KEYS, RunConfig, app_toml, run_config


def test_the_app_lists_every_key_and_holds_no_code():
    app = tomllib.loads(app_toml(rounds=7))["tool"]["flwr"]["app"]
    assert set(app["config"]) == set(KEYS)
    assert app["config"]["rounds"] == 7
    assert app["components"] == {"serverapp": "metavd.flower.server:app", "clientapp": "metavd.flower.client:app"}
    assert [key.replace("-", "_") for key in KEYS] == [field.name for field in fields(RunConfig)]


def test_the_documentation_has_every_key_as_it_is():
    """The table of docs/federation.md is that of the code."""
    page = (Path(__file__).parents[2] / "docs" / "federation.md").read_text()
    for name, key in KEYS.items():
        line = next(line for line in page.splitlines() if line.startswith(f"| `{name}` |"))
        assert line.endswith(f"| {key.help} |")


def test_defaults_are_a_sound_plan():
    default = run_config({})
    assert (default.needed(3), default.asked(3)) == (2, 3)
    assert run_config({"quorum": 2, "cohort": 0.5}).needed(9) == 2
    assert run_config({"cohort": 0.5}).asked(3) == 2


@pytest.mark.parametrize(
    ("config", "sentence"),
    [
        ({"metod": "fedavg"}, "there is no run config key 'metod'; did you mean method?"),
        ({"method": "fedavgg"}, "unknown method 'fedavgg'; did you mean fedavg"),
        ({"rounds": 0}, "rounds is 0, but must lie between 1 and"),
        ({"round-timeout": "soon"}, "round-timeout is 'soon', but must be a number"),
        ({"identity": "ip"}, "identity is 'ip', but must be one of key, name"),
        ({"set": "beta"}, "set has 'beta', but needs key=value"),
        ({"set": "betta=2"}, "there is no setting 'betta' for reptile\\+metavd; did you mean"),
        ({"set": "rounds=3"}, "set has rounds=3, but it has a run config key of its own"),
        ({"set": "lost=0.5"}, "set has lost=0.5, but it makes simulated clients fail"),
        ({"set": "unseen=sketch,photo"}, "set has unseen=sketch,photo, but clients are nodes here; start theirs with"),
        ({"set": "'x"}, 'set is "\'x", which cannot be read'),
    ],
)
def test_what_is_wrong_is_said(config, sentence):
    with pytest.raises(UserError, match=sentence):
        run_config(config)
