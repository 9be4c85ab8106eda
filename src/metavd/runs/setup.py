"""From a description to what runs: the data, who holds which row, the network, the method, the schedule."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import nn

from .. import methods
from ..core import rng
from ..core.accountant import Mechanism
from ..core.owned import apart as rows_apart
from ..core.trace import check_instance
from ..core.types import Algorithm, Model, ServerState
from ..data import collection, partition
from ..data.cohort import Pool, pool
from ..data.collection import Collection
from ..data.formats.cache import Note, log
from ..data.partition import OWN, Federation, some
from ..data.source import Source
from ..engine.kept import laid, started
from ..engine.machine import tuned
from ..engine.ranks import Ranks, grain_of, once_per_host, ranked
from ..engine.schedule import Schedule
from ..engine.schedule.choice import resolved, schedule, unmappable
from ..engine.task import Task, network, task
from ..errors import SpecError
from ..models import weights
from . import cost
from .settings import Experiment, resolve


@dataclass(frozen=True)
class Setup:
    """An experiment, ready to run."""

    experiment: Experiment
    defaults: Mapping[str, Any]
    """Settings that suit the data."""
    pool: Pool
    task: Task
    schedule: Schedule
    """Who calls the clients' turns."""
    notes: Sequence[str] = ()
    """What was chosen for the data, for people."""
    ranks: Ranks | None = None
    """The processes that share the work, where torchrun started them."""

    @property
    def algorithm(self) -> Algorithm:
        """The method."""
        return self.task.algorithm

    @property
    def released(self) -> bool:
        """Whether figures are taken as the released code takes them."""
        return bool(self.experiment.options["variant"] == "released")


def _content(data: Collection, module: nn.Module | Model | None) -> str:
    """Return a fingerprint of the data and of a user's own network, so that two are never mixed up in one folder."""
    if module is None:
        return data.fingerprint
    if not isinstance(module, Model):
        check_instance(module)
    digest = hashlib.sha256()
    digest.update(b"" if isinstance(module, Model) else str(module).encode())
    network = module.init(rng.key(0)) if isinstance(module, Model) else dict(module.named_parameters())
    for name, value in network.items():
        digest.update(f"{name}{tuple(value.shape)}".encode() + value.detach().double().cpu().numpy().tobytes())
    return f"{data.fingerprint}/{digest.hexdigest()[:12]}"


def complete(experiment: Experiment, data: Collection, module: nn.Module | Model | None = None) -> Experiment:
    """Return the experiment with everything filled in that the data and the network decide."""
    e = replace(experiment, data=data.name, content=_content(data, module))
    if e.weights:
        e = replace(e, weights_content=weights.fingerprint(e.weights))
    return resolve(e, collection.settled(data, clients=e.clients, unseen=e.unseen, partition=e.partition))


def deal(e: Experiment, data: Collection) -> Federation:
    """Return who holds which row in a complete experiment."""
    return collection.deal(
        data, kind=e.domains, image_size=e.image_size, channels=e.channels, partition=e.partition,
        clients=e.clients, unseen=e.unseen, test_rows=e.test_rows, valid=e.valid,
        valid_rows=e.valid_rows or OWN, valid_clients=e.valid_clients, test_share=e.test_share,
        server_share=methods.traits(e.method, e.options).server_rows_share or 0.0, seed=e.seed,
    )  # fmt: skip


def channels_last(e: Experiment) -> bool:
    """Whether images lie in memory with the channels of a pixel side by side: a loop over convolutions is faster so."""
    return e.device == "cpu" and e.backend != "vmap"


Data = Source | Sequence[Source] | Collection
"""What a user may hand over instead of a dataset's name."""


def data_of(experiment: Experiment, source: Data | None = None, note: Note = log) -> Collection:
    """Return the data that is given, or read what the experiment names."""
    if source is not None:
        return collection.collect(source)
    return collection.load(experiment.data, experiment.root, note, image_size=experiment.image_size)


def prepare(
    experiment: Experiment,
    source: Data | None = None,
    module: nn.Module | Model | None = None,
    *,
    sealed: bool = False,
    ranks: Ranks | None = None,
) -> Setup:
    """Complete an experiment and build all its parts; wrong input is found here, before anything is written.

    With `sealed` nobody holds the number of a test row, and there is no unseen client: nothing can be chosen by them.
    `ranks` are the processes that share its work.
    """
    data = data_of(experiment, source)
    e = complete(experiment, data, module)
    federation = partition.sealed(deal(e, data)) if sealed else deal(e, data)
    if e.patience and not any(map(len, federation.valid)):
        raise SpecError(f"valid is {e.valid}, but leaves no client a validation row, which patience needs; raise it")
    model = network(e, federation.source, module)
    backend = resolved(
        e.backend, e.device, model, federation.source.x.shape[1:], batch=int(e.options.get("batch", 0)),
        cohort=int(e.cohort), one=isinstance(module, Model),
    )  # fmt: skip
    apart = "" if module is None else _apart(e, federation.source, model, backend)
    e = replace(e, backend="loop" if apart else backend)
    rows = pool(federation, e.device, getattr(torch, e.dtype), channels_last=channels_last(e))
    server_rows = torch.from_numpy(federation.server).to(e.device)
    held = (lambda key: rows.inputs(server_rows, key)) if len(federation.server) else None
    built = task(e, federation.source, model, server_rows=held)
    _check_privacy(e, built.algorithm.privacy)
    notes = collection.told(data, federation)
    named = 0 < len(federation.names) <= collection.SHOWN
    if e.partition == "natural" and not named:
        notes.insert(0, _owners_told(data, federation))
    if not sealed and not any(map(len, federation.test[: federation.num_clients])):
        notes.append("no client that takes part has a test row, so nothing is measured on them")
    if e.partition == "natural" and e.cohort == e.clients:
        notes.append(f"all {e.clients} clients take part in every round (cohort={e.cohort})")
    if e.weights:
        notes.append(weights.told(built.model, e.weights, e.weights_content))
    if module is not None:
        notes += [_layers_told(built), *_frozen_told(module), *([apart] if apart else [])]
    notes += cost.told(built.model, rows, built.algorithm.train_batches, int(e.cohort))
    notes += cost.parts_told(built.algorithm, built.num_weights, e)
    here = schedule(e.backend, e.device, 0 if ranks else e.chunk)
    if ranks is not None:
        grain = grain_for(e)
        e, here = replace(e, chunk=grain if e.backend == "vmap" else e.chunk), ranked(here, ranks, grain)
        how = f"vmap in groups of {grain} (chunk={grain})" if grain else e.backend
        notes.append(f"{ranks.size} rank{'s share' if ranks.size > 1 else ' has'} every cohort of {e.cohort}, {how}")
    return Setup(e, data.defaults, rows, built, here, notes, ranks)


def _owners_told(data: Collection, federation: Federation) -> str:
    """Say how many of the data's own clients take part, and of one dataset how many do not."""
    known, new = federation.num_clients, federation.num_unseen
    text = f"{known} of the data's own clients take{'s' * (known == 1)} part; "
    text += f"{new} more {'is' if new == 1 else 'are'} left out and only tested"
    if len(data.sources) > 1 or data.sources[0].client is None:
        return text
    dealt = (federation.train, federation.valid, federation.test, (federation.server,))
    if sum(len(rows) for part in dealt for rows in part) == len(federation.source.y):  # then so is every client
        return text
    rows = np.unique(data.sources[0].client, return_counts=True)[1]
    away, single = len(rows) - len(federation.train), int((rows == 1).sum())
    alone = f", {single} of all clients have one row only" if single else ""
    return text + (f"; {away} are not used (clients=NUMBER takes more{alone})" if away > 0 else "")


def _layers_told(built: Task) -> str:
    """Say which layers of a user's own network were chosen, and how to choose others."""
    model, noise = built.model, built.algorithm.posterior
    head = f"your network: its output layer is {', '.join(model.head)}"
    if noise is None:
        return head
    others = [name for name in model.layers if name not in noise.layers]
    among = f" (choose another of {some(others)} with layers=NAME)" if others else ", the only layer that can carry it"
    return f"{head}; the posterior is on {', '.join(noise.layers)}{among}"


def _frozen_told(module: nn.Module | Model) -> list[str]:
    """Say that what a user froze is trained all the same."""
    if isinstance(module, Model):
        return []
    frozen = sum(not value.requires_grad for value in module.parameters())
    what = f"{frozen} of its tensors have requires_grad=False, but all are trained"
    return [f"your network: {what}; a frozen part belongs into the data, as features"] if frozen else []


def _apart(e: Experiment, takes: Source, model: Model, backend: str) -> str:
    """Say that a user's network is run for one client after the other, where it cannot be for all at once."""
    if backend != "vmap":
        return ""
    dtype = torch.int64 if takes.tokens else getattr(torch, e.dtype)
    why = unmappable(model, torch.zeros(1, *takes.x.shape[1:], dtype=dtype, device=e.device))
    if not why:
        return ""
    said = f"your network cannot run for several clients at once ({why})"
    if e.backend == "vmap":
        raise SpecError(f"backend is vmap, but {said}; use loop")
    return f"{said}, so they train in turn (backend=loop)"


def _check_privacy(e: Experiment, privacy: Mechanism | None) -> None:
    """Refuse what epsilon could not be computed for."""
    if privacy is None:
        return
    privacy.check()
    if not privacy.poisson and privacy.rate < 1 and e.available != "1":
        raise SpecError(
            f"sampling is fixed and available is {e.available}, but of a varying number of clients a fixed one hides "
            "less than epsilon would say; use sampling=poisson"
        )


def start(setup: Setup) -> ServerState:
    """Return the state before the first round."""
    with torch.no_grad():
        state = setup.algorithm.server.init(rng.key(setup.experiment.seed, setup.experiment.device))
        return laid_out(setup, started(setup.algorithm, state, setup.pool.federation.num_clients))


def laid_out(setup: Setup, state: ServerState) -> ServerState:
    """Lay rows of many clients aside, where a round moves those of its cohort alone; all ranks do so at once."""
    e = setup.experiment
    if not methods.traits(e.method, e.options).moves_all_rows:
        state = rows_apart(state, laid)
    return state if setup.ranks is None else once_per_host(setup.ranks, state)


def grain_for(e: Experiment) -> int:
    """Return how many clients are computed together where ranks share them, at most a part of a cohort."""
    return grain_of(e.backend, e.chunk, min(int(e.cohort), e.part or int(e.cohort)))


def using(setup: Setup) -> AbstractContextManager[None]:
    """Return the use of the machine that suits a setup, for a `with` around its rounds."""
    e = setup.experiment
    # Of several ranks each has one thread, so that their number does not show in the bits.
    backend = "threads" if setup.ranks else e.backend
    return tuned(setup.task.num_weights, e.device, backend, e.precision)
