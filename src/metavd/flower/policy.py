"""A site's own policy: what it does for a server, whatever the server asks.

    policy = "/etc/metavd/policy.toml"      in the node config, or `metavd federate node --policy FILE`

    least_steps = 3                         every key, with its default, is a field of `Policy`
    methods = ["fedavg", "reptile+metavd"]
    [options]
    lr = [0.001, 1.0]                       least and largest value of an option of the method

A server chooses the weights and the way they are trained, and can choose both so that the answer tells of single rows:
one step on all rows at once, from a crafted first layer, gives back many of them. The policy is checked at the site
before anything is trained or tested. What it refuses stands in full in the site's own log; the server hears that it
was refused, and no more. SECURITY.md says what is still possible.
"""

from __future__ import annotations

import json
import time
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from .. import methods
from ..container import Format, dump, load
from ..core.types import Batch
from ..errors import UserError
from ..runs.settings import Experiment
from ..schema import nearest, option, options
from ..tree import Params
from ..wire.guard import norm
from .config import FederationError
from .private import Shelf

_RECEIVED = Format("received", 1)
_DAY = 86_400.0
_MANY = 10**9
_INPUTS = 8
_SAME = 0.999
"""Cosine from which on two units are copies."""


class RefusedError(FederationError):
    """The site's policy does not allow what the server asks; the text is for the site's own log."""


@dataclass(frozen=True)
class Policy:
    """What a site allows. The defaults refuse what serves to read rows and hardly to learn from them."""

    least_steps: int = option(3, "steps of training in a turn", low=1, high=_MANY)
    least_batch: int = option(1, "rows that the largest batch of a turn must have", low=1, high=_MANY)
    largest_batch: int = option(_MANY, "rows that a batch may have", low=1, high=_MANY)
    least_rows: int = option(10, "rows below which the site does not train", low=1, high=_MANY)
    figures_from: int = option(5, "test rows below which no figures are sent", low=1, high=_MANY)
    largest_change: float = option(
        0.0, "change of the weights that come, since the last ones, relative to 1 + their norm; 0: any", low=0
    )
    alike: float = option(
        0.1, "share of a layer's units, or later inputs, that may be copies of each other; 1: any", low=0, high=1
    )
    rounds_a_day: int = option(0, "turns in 24 hours; 0: any", low=0, high=_MANY)
    methods: tuple[str, ...] = ()
    """Methods that the site takes part in; none named: all."""
    options: Mapping[str, tuple[float, float]] = field(default_factory=lambda: {"lr": (1e-3, 10.0)})
    """Least and largest value of options of the method, by name."""


def read(node: Mapping[str, Any]) -> Policy | None:
    """Return the policy of a node: that of its file, the default for a site's own data, none for a share."""
    if "policy" not in node:
        return Policy() if "data" in node else None
    path = Path(str(node["policy"])).expanduser()
    try:
        given = tomllib.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise FederationError(f"the policy {path} cannot be read ({error})") from None
    known = options(Policy)
    values: dict[str, Any] = {}
    for key, value in given.items():
        if key == "methods":
            if not isinstance(value, list) or not value:
                raise FederationError(f'the policy {path} has methods = {value!r}; write methods = ["fedavg"]')
            values[key] = tuple(methods.check(str(each)) for each in value)
        elif key == "options":
            values[key] = {**Policy().options, **_bounds(path, value)}
        elif key in known:
            try:
                values[key] = known[key].check(value)
            except UserError as error:
                raise FederationError(f"the policy {path}: {error}") from None
        else:
            raise FederationError(
                f"the policy {path} has the key {key!r}; {nearest(key, [*known, 'methods', 'options'])}"
            )
    return Policy(**values)


def _bounds(path: Path, given: object) -> dict[str, tuple[float, float]]:
    found = {}
    for name, pair in given.items() if isinstance(given, dict) else ((str(given), None),):
        if not isinstance(pair, list) or len(pair) != 2 or not all(type(each) in {int, float} for each in pair):
            raise FederationError(f"the policy {path} has the option {name} = {pair!r}; write lr = [0.001, 1.0]")
        found[name] = (float(pair[0]), float(pair[1]))
    return found


def check_run(policy: Policy, e: Experiment) -> None:
    """Refuse a method, or an option of it, that the policy does not allow."""
    if policy.methods and e.method not in policy.methods:
        raise RefusedError(f"the method is {e.method}, but the policy allows {', '.join(policy.methods)}")
    for name, (low, high) in policy.options.items():
        value = e.options.get(name)
        if isinstance(value, int | float) and not low <= value <= high:
            raise RefusedError(f"{name} is {value:g}, but the policy allows {low:g} to {high:g}")


def check_turn(policy: Policy, batches: Sequence[Batch], group: int, rows: int) -> None:
    """Refuse a turn of training that has too few steps, too few rows, or batches of another size."""
    steps, largest = len(batches) // group, max((len(each.y) for each in batches), default=0)
    for what, value, low, high in (
        ("the site has {} rows", rows, policy.least_rows, _MANY),
        ("the turn has {} steps", steps, policy.least_steps, _MANY),
        ("the largest batch has {} rows", largest, policy.least_batch, policy.largest_batch),
    ):
        if not low <= value <= high:
            raise RefusedError(f"{what.format(value)}, but the policy wants {low} to {high}")


def check_received(policy: Policy, own: Shelf, received: Params) -> None:
    """Refuse weights that look crafted, or are too far from those that came last in this run; and remember them."""
    for name, what, weight in _arrows(received):
        if (share := copies(weight)) > policy.alike:
            raise RefusedError(f"{share:.0%} of the {what} of {name} are copies; the policy allows {policy.alike:.0%}")
    if not policy.largest_change:
        return
    path = own.folder / "received.safetensors"
    if path.exists():
        last, _ = load(_RECEIVED, path.read_bytes())
        there = [name for name in received if name in last and last[name].shape == received[name].shape]
        moved = norm([received[name].cpu().double() - last[name].double() for name in there])
        bound = policy.largest_change * (1.0 + norm([last[name].double() for name in there]))
        if len(there) < len(received) or not moved <= bound:
            raise RefusedError(f"the weights moved by {moved:.3g} since the last ones; the policy allows {bound:.3g}")
    own.put(path, dump(_RECEIVED, {name: value.cpu().contiguous() for name, value in received.items()}))


def _arrows(received: Params) -> Iterator[tuple[str, str, torch.Tensor]]:
    """Yield what units listen to, and, of dense layers behind the first one, what is made of the inputs.

    Inputs that all later units treat alike let two units be compared, whatever they listen to. Those of the first dense
    layer are rows or pictures, of which parts may be alike by nature. Spreads and masks are alike by design.
    """
    dense = 0
    for name, value in received.items():
        if not name.endswith(".weight"):
            continue
        yield name, "units", value
        if value.dim() == 2:
            dense += 1
            if dense > 1:
                yield name, "inputs", value.T


def copies(weight: torch.Tensor) -> float:
    """Return the share of a layer's units (of the first 2048) that point where another one does.

    >>> copies(torch.ones(4, 8)), copies(torch.eye(8)), copies(torch.ones(8))
    (1.0, 0.0, 0.0)
    """
    if weight.dim() < 2 or weight[0].numel() < _INPUTS or not weight.is_floating_point():
        return 0.0  # of so few inputs directions are alike by chance
    units = weight[:2048].detach().cpu().float().flatten(1)
    length = units.norm(dim=1)
    units = units[length > 0] / length[length > 0, None]
    if len(units) < 2:
        return 0.0
    near = (units @ units.T).fill_diagonal_(0.0).amax(1)
    return float((near > _SAME).double().mean())


def check_day(policy: Policy, own: Shelf) -> None:
    """Refuse a turn too many in 24 hours, over all runs."""
    if not policy.rounds_a_day:
        return
    path, now = own.folder.parent.parent / "turns.json", time.time()
    turns = [each for each in json.loads(path.read_text()) if each > now - _DAY] if path.exists() else []
    if len(turns) >= policy.rounds_a_day:
        raise RefusedError(f"there were {len(turns)} turns in 24 hours; the policy allows {policy.rounds_a_day}")
    own.put(path, json.dumps([*turns, now]).encode())
