"""A run config as one frozen value, and the app that carries it.

The app is a pyproject.toml and no code: its two components name modules of this package, so that a site runs what is
installed there and nothing that came over the network. Flower refuses keys that the app does not list, therefore
options of the method travel together in `set`.
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Any

from .. import methods
from ..data.source import Source
from ..methods import Option
from ..runs.settings import Experiment, SpecError, nearest, resolve, with_settings
from ..version import VERSION
from ..wire import Limits

APP = "metavd-app"
IDENTITIES = ("key", "name")
_LIMITS = Limits()


class FederationError(ValueError):
    """Why a federation cannot go on as asked, in one sentence that says what would be right."""


class FailedRunError(RuntimeError):
    """A federation that was started as it should be and did not come to its end; the text says why."""


OPTIONS = (
    Option("method", "reptile+metavd", "metavd methods lists all"),
    Option("set", "", "options of the method and settings of metavd run, such as 'beta=2 drop_from=10 model=mlp'"),
    Option("rounds", 20, "communication rounds", 1, 10**7),
    Option("seed", 0, "of everything random", 0, 2**32 - 1),
    Option("out", "runs/federation", "folder on the server for checkpoints and results; a run goes on from it"),
    Option("clients", 0, "clients that the run begins with; 0: those that are there", 0, 10**7),
    Option("cohort", 0.0, "clients asked in a round, a number or a share below 1; 0: all", 0, 10**7),
    Option("quorum", 0.5, "answers that a round needs, a number or a share below 1 of those asked", 0, 10**7),
    Option("join-timeout", 300.0, "seconds to wait for clients until there is a quorum", 1, 10**7),
    Option("round-timeout", 600.0, "seconds to wait for the answers of a round", 1, 10**7),
    Option("repeats", 2, "times that a round without a quorum is tried again before the run stops", 0, 1000),
    Option("poll", 0.2, "seconds between two looks for answers", 0.01, 60),
    Option("eval-every", 0, "rounds between evaluations; 0: only at the end", 0, 10**7),
    Option("identity", "key", "how a client is known again: by its registered key, or by the name it gives itself",
           choices=IDENTITIES),
    Option("half", False, "send weights as float16"),
    Option("classes", 0, "classes of the sites' data; 0: as many as the sites have", 0, 10**6),
    Option("data", "", "a dataset that nodes hold shares of, by their partition-id; empty: every site has its own"),
    Option("server-data", "", "the server's own unlabelled rows, for fedbe, such as npz:rows.npz"),
    Option("max-bytes", _LIMITS.max_bytes, "longest answer", 1),
    Option("max-norm", _LIMITS.max_norm, "largest change of a client's weights, relative to 1 + their norm", 0),
    Option("max-change", _LIMITS.max_change, "largest change of weights, relative to the median of rounds before", 0),
    Option("max-samples", _LIMITS.max_samples, "most rows that a client may claim", 1),
    Option("max-offences", _LIMITS.max_offences, "refused answers after which a client is asked no more", 1),
)  # fmt: skip
"""The run config, key by key."""


@dataclass(frozen=True)
class Plan:
    """A run config, checked. See `OPTIONS` for what each field means."""

    method: str
    set: str
    rounds: int
    seed: int
    out: str
    clients: int
    cohort: float
    quorum: float
    join_timeout: float
    round_timeout: float
    repeats: int
    poll: float
    eval_every: int
    identity: str
    half: bool
    classes: int
    data: str
    server_data: str
    max_bytes: int
    max_norm: float
    max_change: float
    max_samples: float
    max_offences: int

    @property
    def limits(self) -> Limits:
        """What the server puts up with."""
        return Limits(**{f.name: getattr(self, f.name) for f in fields(Limits)})

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


def plan(config: Mapping[str, Any]) -> Plan:
    """Check a run config; what it leaves out takes its default."""
    known = {option.name: option for option in OPTIONS}
    for key in config:
        if key not in known:
            raise FederationError(f"there is no run config key {key!r}; {nearest(key, list(known))}")
    values = {name: option.check(config.get(name, option.default)) for name, option in known.items()}
    checked = Plan(**{name.replace("-", "_"): value for name, value in values.items()})  # type: ignore[arg-type]
    settings(checked)
    return checked


def settings(plan: Plan) -> dict[str, Any]:
    """Return the settings of the run by the names that `metavd run` has for them."""
    try:
        words = shlex.split(plan.set)
    except ValueError as error:
        raise FederationError(f"set is {plan.set!r}, which cannot be read ({error}); write 'beta=2 lr=0.05'") from None
    pairs = dict(word.partition("=")[::2] for word in words)
    for key, value in pairs.items():
        if not value:
            raise FederationError(f"set has {key!r}, but needs key=value, for example 'beta=2 lr=0.05'")
        if key in _ELSEWHERE:
            raise FederationError(f"set has {key}={value}, but {_ELSEWHERE[key]}")
    given = {"method": plan.method, "rounds": plan.rounds, "seed": plan.seed, **pairs}
    experiment = with_settings(Experiment(), given)
    options = methods.resolve(experiment.method, experiment.options)
    if options.get("extra_points"):
        raise FederationError(
            f"extra_points is {options['extra_points']}, but it gives a client rows of other clients, which stay where "
            "they are in a federation; use 0"
        )
    if experiment.method.startswith("fedbe") and not plan.server_data:
        raise FederationError(
            "fedbe distils on unlabelled rows of the server, and no client's rows leave it here; name rows of the "
            "server's own with server-data"
        )
    return given


_OWN_KEY = "it has a run config key of its own"
_REAL = "it makes simulated clients fail; real ones do so by themselves"
_ELSEWHERE = {
    **dict.fromkeys(("method", "rounds", "seed", "clients", "cohort", "data", "eval_every"), _OWN_KEY),
    "available": _REAL, "lost": _REAL,
    "patience": "no validation rows are watched here; leave it out",
    "device": "every site chooses its own in its node config",
    "backend": "a site trains one client; leave it out",
    "chunk": "a site trains one client; leave it out",
    "domains": "several datasets at once are for the simulator; leave it out",
    "checkpoint_every": "every round is saved; leave it out",
}  # fmt: skip


def experiment_of(plan: Plan, takes: Source, clients: int, defaults: Mapping[str, Any], content: str) -> Experiment:
    """Return the complete description of the run, once it is known who takes part and what the rows are like."""
    given = with_settings(Experiment(), settings(plan))
    every = plan.eval_every or plan.rounds
    named = replace(
        given, data=takes.name, clients=clients, cohort=plan.asked(clients), unseen=max(given.unseen, 0),
        eval_every=every, checkpoint_every=1, device="cpu", backend="loop", content=content,
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
        'serverapp = "metavd.flower.server:app"',
        'clientapp = "metavd.flower.client:app"',
        "",
        "[tool.flwr.app.config]",
    ]
    for option in OPTIONS:
        lines += [f"# {option.help}", f"{option.name} = {json.dumps(values.get(option.name, option.default))}"]
    return "\n".join(lines) + "\n"
