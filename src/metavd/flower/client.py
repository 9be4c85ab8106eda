"""The ClientApp: says hello, trains, evaluates. The same functions as in the simulator, called bare.

What goes wrong at a site is told in full in the site's own log, and to the server without any detail: an error text
may hold a path or a value of a row.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import replace
from functools import lru_cache, wraps
from typing import NamedTuple

import numpy as np
import torch
from flwr.app import Context, Message, RecordDict
from flwr.clientapp import ClientApp

from ..core.privacy import secret
from ..engine import turn
from ..engine.machine import tuned
from ..engine.task import Task, client_task
from ..evaluate.metrics import ClientResult
from ..runs.settings import Experiment
from ..wire import decode, encode
from . import figures
from . import policy as policies
from .config import FederationError, node_config
from .message import Order, read_order, read_spec, write_reply
from .private import kept_by, shelf
from .site import Site, fingerprint, look, settle, write_look

app = ClientApp()
_LOG = logging.getLogger("flwr")
_SEEN = "what went wrong is in the site's own log"


class Built(NamedTuple):
    """A run's description made into functions."""

    experiment: Experiment
    classes: list[str]
    task: Task


@lru_cache(maxsize=4)
def build(spec: str, device: str, seeded: bool = False) -> Built:
    """Return the task that a server's description names, on a site's device; `seeded`: its noise can be repeated."""
    experiment, takes, classes = read_spec(spec)
    e = replace(experiment, device=device)
    return Built(e, classes, client_task(e, takes, normal=None if seeded else secret))


Handler = Callable[[Message, Context], RecordDict]


def _private(handler: Handler) -> Callable[[Message, Context], Message]:
    @wraps(handler)
    def answer(message: Message, context: Context) -> Message:
        try:
            return Message(handler(message, context), reply_to=message)
        except policies.RefusedError as error:
            _LOG.warning("%s is refused by this site's policy: %s", handler.__name__, error)
            raise FederationError("the policy of the site does not allow what was asked") from None
        except Exception as error:
            _LOG.exception("%s failed", handler.__name__)
            raise FederationError(f"{handler.__name__} failed with {type(error).__name__}; {_SEEN}") from None

    return answer


@app.query()
@_private
def hello(message: Message, context: Context) -> RecordDict:
    """Say who is there and what the rows are like."""
    read_order(message.content)
    policies.read(context.node_config)  # one that cannot be read is no policy, and nothing is promised without one
    told = node_config(context.node_config)
    share = told.partition_id
    name = told.name or (f"partition {share}" if share >= 0 else f"node {context.node_id}")
    return write_reply(0, {}, name=name, trains=told.train, partition=share, look=write_look(look(told)))


@app.train()
@_private
def train(message: Message, context: Context) -> RecordDict:
    """Train for one round on the site's own rows."""
    order, built, site, policy = _start(message, context)
    algorithm, device = built.task.algorithm, built.experiment.device
    files = shelf(context.node_config, order, device, _LOG.warning)
    began = time.monotonic()
    with torch.no_grad(), tuned(built.task.num_weights, device):
        now = _moment(order, site)
        own = turn.train_batches(algorithm, site.pool, site.index, now, order.client)
        received = {name: value.to(device) for name, value in decode(order.params).items()}
        if policy is not None:
            policies.check_turn(policy, own, algorithm.train_batches.group, len(site.pool.federation.train[site.index]))
            policies.check_received(policy, files, received)
            policies.check_day(policy, files)
        kept, new = kept_by(algorithm.keep, files, order)
        adapted, kept, loss = turn.train_turn(algorithm, received, kept, own)
        turn.check_finite({**adapted, **kept, "loss": loss}, order.done + 1, "training")
        adapted = turn.veiled(algorithm, received, adapted, now, order.client)
    if kept:
        files.write(order.done + 1, order.turn, kept)
    rows = len(site.pool.federation.train[site.index])
    metrics = {"rows": rows, "loss": float(loss), "seconds": time.monotonic() - began}
    metrics |= {"anew": 1} if new else {}
    if "data" in context.node_config and files.changed(fingerprint(site)):
        metrics["changed"] = 1
    return write_reply(order.done + 1, metrics, encode(adapted, half=order.half, mask_known=True))


@app.evaluate()
@_private
def evaluate(message: Message, context: Context) -> RecordDict:
    """Make the client's own model and test it on the site's own rows; only figures leave."""
    order, built, site, policy = _start(message, context)
    algorithm, federation = built.task.algorithm, site.pool.federation
    train_rows, test_rows = federation.train[site.index], federation.test[site.index]
    metrics = {"train_size": len(train_rows), "test_size": len(test_rows)}
    if len(test_rows) < (1 if policy is None else policy.figures_from):
        metrics = metrics if policy is None else {"train_size": 0, "test_size": 0}
        return write_reply(order.done, metrics)
    device = site.pool.x.device
    with torch.no_grad(), tuned(built.task.num_weights, built.experiment.device):
        now = _moment(order, site)
        files = shelf(context.node_config, order, str(device), _LOG.warning)
        kept, new = kept_by(algorithm.keep, files, order)
        own = turn.personal_batches(algorithm, site.pool, site.index, now, order.client, new=new)
        received = {name: value.to(device) for name, value in decode(order.params).items()}
        if order.whole:
            received = algorithm.admit(received, now.round, own)
        rows = site.pool.inputs(torch.from_numpy(test_rows).to(device))
        key = turn.answer_key(now, order.client).to(device)
        answer, _ = turn.test_turn(algorithm, received, kept, own, rows=rows, key=key, new=new)
    probs = turn.checked(answer, len(test_rows), f"round {order.done}: the client")
    y = federation.source.y
    known = np.bincount(y[train_rows], minlength=federation.source.num_classes) > 0
    information = answer.drawn["information"].cpu().numpy() if answer.drawn else None
    result = ClientResult(order.client, len(train_rows), probs, y[test_rows], known, information)
    return write_reply(order.done, metrics | figures.sent(result))


def _start(message: Message, context: Context) -> tuple[Order, Built, Site, policies.Policy | None]:
    order = read_order(message.content)
    node = context.node_config
    policy, told = policies.read(node), node_config(node)
    built = build(order.spec, told.device, told.seeded_noise)
    if policy is not None:
        policies.check_run(policy, built.experiment)
    return order, built, settle(told, built.experiment, built.task.takes, built.classes), policy


def _moment(order: Order, site: Site) -> turn.Moment:
    done = torch.tensor(float(order.done), dtype=site.pool.dtype, device=site.pool.x.device)
    return turn.Moment(torch.tensor(order.key), order.done, done)
