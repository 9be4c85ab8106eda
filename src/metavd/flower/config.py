"""A run config as one frozen value, and the app that carries it.

The app is a pyproject.toml and no code: its two components name modules of this package, so that a site runs what is
installed there and nothing that came over the network. Flower refuses keys that the app does not list, therefore
options of the method travel together in `set`.
"""

from __future__ import annotations

import json
import os
import shlex
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, Literal

from .. import methods
from ..data.source import Source
from ..errors import FailedError, SpecError, UserError
from ..runs.settings import SETTINGS, Experiment, resolve, with_settings
from ..schema import Option, like, meant, option, options
from ..version import VERSION
from ..wire import Limits

SERVER_APP = "metavd.flower.server:app"
APP = "metavd-app"
_MANY = 10**7


class FederationError(UserError):
    """Why a federation cannot go on as asked, in one sentence that says what would be right."""


class FailedRunError(FailedError):
    """A federation that was started as it should be and did not come to its end; the text says why."""


@dataclass(frozen=True)
class RunConfig:
    """A run config, checked. Its keys are the fields' names with dashes."""

    method: str = like(Experiment, "method")
    set: str = option("", "options of the method and settings of metavd run, such as 'beta=2 drop_from=10 model=mlp'")
    rounds: int = like(Experiment, "rounds", 20)
    seed: int = like(Experiment, "seed")
    out: str = option("runs/federation", "folder on the server for checkpoints and results; a run goes on from it")
    clients: int = option(0, "clients that the run begins with; 0: those that are there", low=0, high=_MANY)
    cohort: float = option(0.0, "clients asked in a round, a number or a share below 1; 0: all", low=0, high=_MANY)
    quorum: float = option(
        0.5, "answers that a round needs, a number or a share below 1 of those asked", low=0, high=_MANY
    )
    join_timeout: float = option(300.0, "seconds to wait for clients until there is a quorum", low=1, high=_MANY)
    round_timeout: float = option(600.0, "seconds to wait for the answers of a round", low=1, high=_MANY)
    repeats: int = option(
        2, "times that a round without a quorum is tried again before the run stops", low=0, high=1000
    )
    poll: float = option(0.2, "seconds between two looks for answers", low=0.01, high=60)
    eval_every: int = option(0, "rounds between evaluations; 0: only at the end", low=0, high=_MANY)
    identity: Literal["key", "name"] = option(
        "key", "how a client is known again: by its registered key, or by the name it gives itself"
    )
    half: bool = option(False, "send weights as float16")
    classes: int = option(0, "classes of the sites' data; 0: as many as the sites have", low=0, high=10**6)
    data: str = option("", "a dataset that nodes hold shares of, by their partition-id; empty: every site has its own")
    seeded_noise: bool = option(
        False, "noise of +dp, and whom a round asks, come from the seed as in the simulator: for tests, not private"
    )
    server_data: str = option("", "the server's own unlabelled rows, for fedbe, such as npz:rows.npz")
    max_bytes: int = like(Limits, "max_bytes")
    max_norm: float = like(Limits, "max_norm")
    max_change: float = like(Limits, "max_change")
    max_size: float = like(Limits, "max_size")
    max_against: float = like(Limits, "max_against")
    max_share: float = like(Experiment, "max_share", 2.0)
    max_samples: float = like(Limits, "max_samples")
    max_offences: int = like(Limits, "max_offences")
    max_silences: int = option(
        5, "silences in a row after which a client is asked no more, until the run is started again", low=1
    )
    slack: float = option(
        5.0, "times the slowest answer's own time that a round with a quorum waits; 0: always round-timeout", low=0
    )

    @property
    def limits(self) -> Limits:
        """What the server puts up with."""
        return Limits(**{name: getattr(self, name) for name in options(Limits)})

    def asked(self, there: int) -> int:
        """Return how many of the clients that are there a round asks."""
        return min(there, _count(self.cohort, there)) if self.cohort else there

    def needed(self, asked: int) -> int:
        """Return how many answers a round needs, at least one."""
        return max(1, _count(self.quorum, asked))


def _count(value: float, whole: int) -> int:
    """Read a number as it is and a share below 1 of a whole, rounded up.

    >>> _count(0.5, 3), _count(2.0, 3)
    (2, 2)
    """
    return -int(-value * whole // 1) if value < 1 else int(value)


@dataclass(frozen=True)
class NodeConfig:
    """What a site is told by whoever runs it. Its keys are the fields' names with dashes."""

    data: str = option("", "the site's rows, such as npz:rows.npz or folder:photos")
    client: str = option("", "of data with several people, whose rows this site has")
    root: str = like(Experiment, "root")
    partition_id: int = option(-1, "a share of the run's dataset in place of data", low=-1, high=_MANY)
    num_partitions: int = option(0, "of Flower's simulation; the run says how many shares there are", low=0)
    name: str = option("", "how the server's log calls this site")
    policy: str = option("", "file that says what the site allows")
    state: str = option("", "folder for what a client keeps between rounds")
    train: bool = option(True, "false: be personalised and tested, but never trained with")
    device: str = option("cpu", "cpu or cuda")
    seeded_noise: bool = option(False, "noise of +dp comes from the seed as in the simulator: for tests, not private")


def _keys(schema: Any) -> dict[str, Option]:
    """Return the options of a schema by their names with dashes."""
    dashed = {name.replace("_", "-"): key for name, key in options(schema).items()}
    return {name: replace(key, name=name) for name, key in dashed.items()}


def _checked(what: str, keys: Mapping[str, Option], config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values of a config by the names of the schema's fields."""
    for key in config:
        if key not in keys:
            raise FederationError(f"there is no {what} config key {key!r}; {meant(key, keys)}")
    return {key.replace("-", "_"): keys[key].check(value) for key, value in config.items()}


KEYS: Mapping[str, Option] = _keys(RunConfig)
"""The run config, key by key."""
_NODE_KEYS = _keys(NodeConfig)


def run_config(config: Mapping[str, Any]) -> RunConfig:
    """Check a run config; what it leaves out takes its default."""
    checked = RunConfig(**_checked("run", KEYS, config))
    settings(checked)
    return checked


def node_config(config: Mapping[str, Any]) -> NodeConfig:
    """Check a node config; what it leaves out takes its default."""
    return NodeConfig(**_checked("node", _NODE_KEYS, config))


def settings(config: RunConfig) -> dict[str, Any]:
    """Return the settings of the run by the names that `metavd run` has for them."""
    try:
        words = shlex.split(config.set)
    except ValueError as error:
        raise FederationError(
            f"set is {config.set!r}, which cannot be read ({error}); write 'beta=2 lr=0.05'"
        ) from None
    pairs = dict(word.partition("=")[::2] for word in words)
    for key, value in pairs.items():
        if not value:
            raise FederationError(f"set has {key!r}, but needs key=value, for example 'beta=2 lr=0.05'")
        if key in _OWN_KEYS:
            raise FederationError(f"set has {key}={value}, but it has a run config key of its own")
        if key in SETTINGS and SETTINGS[key].foreign:
            raise FederationError(f"set has {key}={value}, but {SETTINGS[key].foreign}")
    given = {"method": config.method, "rounds": config.rounds, "seed": config.seed, **pairs}
    experiment = with_settings(Experiment(), given)
    if isinstance(experiment.unseen, str):
        raise FederationError(
            f"set has unseen={experiment.unseen}, but clients are nodes here; start theirs with --no-train"
        )
    values = methods.resolve(experiment.method, experiment.options)
    for name, known in methods.options_of(experiment.method).items():
        if known.foreign and values[name]:
            raise FederationError(f"{name} is {values[name]}, but {known.foreign}")
    if methods.traits(experiment.method, experiment.options).server_rows_share is not None and not config.server_data:
        raise FederationError(
            f"{experiment.method} distils on unlabelled rows of the server, and no client's rows leave it here; name "
            "rows of the server's own with server-data"
        )
    return given


_OWN_KEYS = {each.name for each in fields(RunConfig)} & set(SETTINGS)


def experiment_of(
    config: RunConfig, takes: Source, clients: int, defaults: Mapping[str, Any], content: str
) -> Experiment:
    """Return the complete description of the run, once it is known who takes part and what the rows are like."""
    given = with_settings(Experiment(), settings(config))
    every = config.eval_every or config.rounds
    named = replace(
        given, data=takes.name, clients=clients, cohort=config.asked(clients), unseen=max(given.unseen, 0),
        eval_every=every, checkpoint_every=1, device="cpu", backend="loop", content=content, max_share=config.max_share,
    )  # fmt: skip
    try:
        return resolve(named, defaults)
    except SpecError as error:
        raise FederationError(str(error)) from None


def app_toml(**values: Any) -> str:
    """Return the pyproject.toml of the Flower app, with other defaults where they are given by key."""
    lines = [
        "# The Flower app of metavd. It holds no code: sites run the metavd that is installed there.",
        "# metavd federate run . method=fedavg rounds=10",
        "[project]",
        f'name = "{APP}"',
        f'version = "{VERSION}"',
        'description = "Personalised, Bayesian federated learning"',
        'license = "Apache-2.0"',
        f'dependencies = ["metavd[flower]=={VERSION}"]',
        "",
        "[tool.flwr.app]",
        'publisher = "metavd"',
        "",
        "[tool.flwr.app.components]",
        f'serverapp = "{SERVER_APP}"',
        'clientapp = "metavd.flower.client:app"',
        "",
        "[tool.flwr.app.config]",
    ]
    for name, key in KEYS.items():
        lines += [f"# {key.help}", f"{name} = {json.dumps(values.get(name, key.default))}"]
    return "\n".join(lines) + "\n"


def write_app(folder: Path) -> Path:
    """Write the app into a folder of its own below this one, and return that."""
    place = folder / APP
    place.mkdir(parents=True, exist_ok=True)
    (place / "pyproject.toml").write_text(app_toml())
    return place


def flower_home() -> Path:
    """Return the folder that Flower keeps its own files in."""
    return Path(os.environ.get("FLWR_HOME", "~/.flwr")).expanduser()
