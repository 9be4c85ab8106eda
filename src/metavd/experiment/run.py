"""Carry out one experiment: build, train, evaluate, store; resume where it stopped."""

from __future__ import annotations

import copy
import hashlib
import math
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from torch import nn

from .. import methods, wire
from ..core import rng
from ..core.model import cnn, from_module, mlp, small_cnn, xavier
from ..core.types import Algorithm, Model, NonFiniteError, ServerState
from ..data.cohort import Pool, pool
from ..data.partition import federate
from ..data.source import Source, load
from ..engine.backend import Backend, loop, threads_for, vectorized
from ..engine.checkpoint import load_checkpoint, save_checkpoint, state_hash
from ..engine.simulate import Record, simulate
from ..evaluate.metrics import ClientResult, accuracy, nll, of_classes, summarize
from ..evaluate.personal import answers, diagnose
from ..tree import Params
from .provenance import provenance
from .spec import Experiment, SpecError, from_toml, resolve, spec_hash, to_toml, with_settings
from .store import Store, StoreError

_BUILDERS = {"cnn": cnn, "small-cnn": small_cnn, "mlp": mlp}


class Listener(Protocol):
    """Whoever wants to know how a run goes on."""

    def start(self, experiment: Experiment, done: int) -> None:
        """A run begins, with `done` rounds behind it."""

    def round(self, record: Record) -> None:
        """A round is over."""

    def evaluation(self, round: int, summary: Mapping[str, Any]) -> None:
        """An evaluation is done."""

    def note(self, text: str) -> None:
        """Something happened that a person should know."""


class Silent:
    """A listener that does not listen."""

    def start(self, experiment: Experiment, done: int) -> None: ...  # noqa: D102
    def round(self, record: Record) -> None: ...  # noqa: D102
    def evaluation(self, round: int, summary: Mapping[str, Any]) -> None: ...  # noqa: D102
    def note(self, text: str) -> None: ...  # noqa: D102


class InterruptedRun(Exception):  # noqa: N818
    """The run was stopped by hand; its checkpoint is safe."""


@dataclass(frozen=True)
class Setup:
    """An experiment, ready to run."""

    experiment: Experiment
    pool: Pool
    algorithm: Algorithm
    backend: Backend
    weights: int
    """Of the network that a client runs."""


def module_for(name: str, shape: Sequence[int], num_classes: int, width: int) -> nn.Module:
    """Build one of the networks that come with the package; auto chooses by the size of the input."""
    if name == "auto":
        small = len(shape) != 3 or min(shape[1:]) < 8
        name = "mlp" if small else ("cnn" if min(shape[1:]) >= 24 else "small-cnn")
    if name != "mlp" and (len(shape) != 3 or min(shape[1:]) < 8):
        raise SpecError(
            f"model is {name!r}, but it needs images of at least 8x8 pixels and a row here is {tuple(shape)}; use mlp"
        )
    with torch.random.fork_rng(devices=[]):  # torch initialises what it builds; nobody's generator shall notice
        return _BUILDERS[name](shape, num_classes, **({"width": width} if width else {}))


def _model(e: Experiment, source: Source, module: nn.Module | Model | None) -> Model:
    dtype = getattr(torch, e.dtype)
    if isinstance(module, Model):

        def init(key: torch.Tensor) -> Params:
            return {name: value.to(e.device, dtype) for name, value in module.init(key).items()}

        return module._replace(init=init)
    if module is None:
        built = module_for(e.model, source.x.shape[1:], source.num_classes, e.width)
        return from_module(built.to(e.device, dtype), init=xavier)
    return from_module(copy.deepcopy(module).to(e.device, dtype))


def _content(source: Source | None, module: nn.Module | Model | None) -> str:
    """Return a fingerprint of a user's own data and network, so that two are never mixed up in one folder."""
    digest = hashlib.sha256()
    if source is not None:
        for array in (source.x, source.y, source.test, source.client):
            if array is not None:
                digest.update(f"{array.dtype}{array.shape}".encode())
                digest.update(np.ascontiguousarray(array).tobytes())
    if module is not None:
        digest.update(b"" if isinstance(module, Model) else str(module).encode())
        network = module.init(rng.key(0)) if isinstance(module, Model) else dict(module.named_parameters())
        for name, value in network.items():
            digest.update(f"{name}{tuple(value.shape)}".encode() + value.detach().double().cpu().numpy().tobytes())
    return "" if source is None and module is None else digest.hexdigest()[:12]


def prepare(experiment: Experiment, source: Source | None = None, module: nn.Module | Model | None = None) -> Setup:
    """Resolve an experiment and build all its parts; wrong input is found here, before anything is written."""
    e = resolve(replace(experiment, content=_content(source, module)), source)
    source = source if source is not None else load(e.data)
    federation = federate(
        source, e.partition, clients=e.clients, unseen=e.unseen, test_rows=e.test_rows, valid=e.valid,
        test_share=e.test_share, server_share=float(e.options.get("server_share", 0.0)), seed=e.seed,
    )  # fmt: skip
    rows = pool(federation, e.device, getattr(torch, e.dtype))
    server_rows = torch.from_numpy(federation.server).to(e.device)
    setting = methods.Setting(
        num_clients=e.clients,
        num_classes=source.num_classes,
        rounds=e.rounds,
        server_rows=(lambda key: rows.inputs(server_rows, key)) if len(federation.server) else None,
    )
    model = _model(e, source, module)
    weights = sum(math.prod(shape) for shape in model.layers.values())
    algorithm = methods.algorithm(e.method, model, setting, e.options)
    return Setup(e, rows, algorithm, loop if e.backend == "loop" else vectorized(e.chunk), weights)


def start(setup: Setup) -> ServerState:
    """Return the state before the first round."""
    with torch.no_grad():
        return setup.algorithm.server.init(rng.key(setup.experiment.seed, setup.experiment.device))


@dataclass(frozen=True)
class Evaluation:
    """All clients' answers at one state, and what they sum up to."""

    clients: list[ClientResult]
    summary: dict[str, Any]


def evaluate(setup: Setup, state: ServerState, split: str = "test") -> Evaluation:
    """Personalise and test every client at a state of the server."""
    federation = setup.pool.federation
    known = range(federation.num_clients)
    unseen = range(federation.num_clients, federation.num_clients + federation.num_unseen)
    shared = {name: value for name, value in state.params.items() if not name.startswith("server.")}
    results, sparsities = [], []
    for clients in (known, unseen):
        for result, masks in answers(setup.algorithm, setup.pool, state, clients, setup.backend, split=split):
            results.append(result)
            if clients is known:
                sparsities.append(wire.sparsity(shared | masks))
    released = setup.experiment.options["variant"] == "released"
    parts = (results[: len(known)], results[len(known) :])
    test, new = (summarize(part, released=released) for part in parts)
    both = test["accuracy"] is not None and new["accuracy"] is not None
    summary = {
        "test": test,
        "unseen": new,
        "gap": new["accuracy"] - test["accuracy"] if both else None,
        "sparsity": {key: sum(each[key] for each in sparsities) / len(sparsities) for key in ("layer", "model")},
        "diagnostics": diagnose(setup.algorithm, state, federation.num_clients),
    }
    if setup.experiment.valid and split == "test":
        held = answers(setup.algorithm, setup.pool, state, known, setup.backend, split="valid")
        summary["valid"] = summarize([result for result, _ in held], released=released)
    if federation.source.domains:
        summary["domains"] = {
            domain.name: {
                name: summarize(of_classes(part, domain.first_class, domain.num_classes))["accuracy"]
                for name, part in zip(("test", "unseen"), parts, strict=True)
            }
            for domain in federation.source.domains
        }
    return Evaluation(results, summary)


_TRAFFIC = ("down", "up", "dense_down", "dense_up")


def run(
    experiment: Experiment | None = None,
    *,
    out: str | Path | None = None,
    resume: bool = False,
    source: Source | None = None,
    module: nn.Module | Model | None = None,
    listener: Listener | None = None,
    **settings: Any,
) -> dict[str, Any]:
    """Run an experiment and return its result, the content of `result.json`.

    Args:
        experiment: what to run; fields and options may also be given by name, `run(method="fedavg", rounds=20)`.
        out: folder for the run's files; none are written without it.
        resume: go on from the last checkpoint in `out`; a finished run is only read.
        source: your own data, see `metavd.arrays`.
        module: your own network, an `nn.Module` or what `from_module` made of one.
        listener: is told of every round and evaluation.
        settings: fields of `Experiment` and options of the method.
    """
    experiment = with_settings(experiment or Experiment(), settings)
    if source is not None:
        experiment = with_settings(experiment, {"data": source.name})
    setup = prepare(experiment, source, module)
    listener = listener or Silent()
    with threads_for(setup.weights, setup.experiment.device):
        return _run(setup, Path(out) if out is not None else None, listener, resume=resume)


def _run(setup: Setup, out: Path | None, listener: Listener, *, resume: bool) -> dict[str, Any]:
    if out is None:
        return _train(setup, None, start(setup), {}, listener)
    store = Store(out)
    check_folder(store, setup, resume=resume)
    if store.is_run() and store.is_finished():
        listener.note(f"{store.folder} holds this run, finished; its result is read, not computed again")
        return store.read_result()
    with store.lock():
        store.open(to_toml(setup.experiment))
        found = load_checkpoint(store.checkpoint, setup.experiment.device, listener.note) if resume else None
        state, extra = found or (start(setup), {})
        store.cut_rounds(int(state.round))
        return _train(setup, store, state, extra, listener)


def check_folder(store: Store, setup: Setup, *, resume: bool) -> None:
    """Refuse to mix two different runs in one folder, or to overwrite one by accident."""
    if not store.is_run():
        return
    there = resolve(with_settings(Experiment(), from_toml(store.config)), setup.pool.federation.source)
    if spec_hash(there) != spec_hash(setup.experiment):
        other = f"{there.method} on {there.data}, seed {there.seed}; other settings, data or network"
        raise StoreError(f"the folder {store.folder} holds another run ({other}); name another --out")
    if not resume and not store.is_finished():
        raise StoreError(
            f"the folder {store.folder} holds an unfinished run; go on with --resume, or name another --out"
        )


@contextmanager
def _saving(store: Store | None, first: ServerState) -> Iterator[dict[str, Any]]:
    """Keep the last good state safe whatever ends the training."""
    last: dict[str, Any] = {}

    def save() -> None:
        if store is not None and last:
            save_checkpoint(store.checkpoint, last["state"], last["extra"])

    try:
        yield last
    except KeyboardInterrupt:
        save()
        done = int(last.get("state", first).round)
        where = f"; the checkpoint is in {store.folder}, go on with --resume" if store else ""
        raise InterruptedRun(f"stopped after round {done}{where}") from None
    except NonFiniteError as error:
        save()
        kept = f"; the checkpoint of round {int(last['state'].round)} is kept" if store and last else ""
        raise NonFiniteError(f"{error}{kept}") from None


def _train(
    setup: Setup, store: Store | None, state: ServerState, extra: Mapping[str, Any], listener: Listener
) -> dict[str, Any]:
    e = setup.experiment
    bytes_total = {key: int(extra.get(key, 0)) for key in _TRAFFIC}
    before, began = float(extra.get("seconds", 0.0)), time.monotonic()
    listener.start(e, int(state.round))
    rounds = simulate(setup.algorithm, setup.pool, state, rounds=e.rounds, cohort=e.cohort, backend=setup.backend)
    with _saving(store, state) as last:
        for new, record in rounds:
            state = new
            bytes_total = {key: bytes_total[key] + getattr(record, key) for key in _TRAFFIC}
            listener.round(record)
            line: dict[str, Any] = record._asdict()
            if record.round % e.eval_every == 0 and record.round < e.rounds:
                line |= evaluate(setup, state).summary
                listener.evaluation(record.round, line)
            if store is not None:
                store.add_round(line)
            last |= {"state": state, "extra": {**bytes_total, "seconds": before + time.monotonic() - began}}
            if store is not None and (record.round % e.checkpoint_every == 0 or record.round == e.rounds):
                save_checkpoint(store.checkpoint, state, last["extra"])
        final = evaluate(setup, state)
    listener.evaluation(e.rounds, final.summary)
    result = {
        "method": e.method, "data": e.data, "seed": e.seed, "rounds": e.rounds, "device": e.device,
        "seconds": round(before + time.monotonic() - began, 3),
        **final.summary,
        "bytes": bytes_total,
        "spec": spec_hash(e), "model_sha256": state_hash(state), "backend": e.backend, **provenance(e.device),
    }  # fmt: skip
    if store is not None:
        store.finish(result, [_client_line(each, setup) for each in final.clients])
    return result


def _client_line(result: ClientResult, setup: Setup) -> dict[str, Any]:
    tested = len(result.y) > 0
    return {
        "client": result.client,
        "unseen": int(result.client >= setup.pool.federation.num_clients),
        "train_size": result.train_size,
        "test_size": len(result.y),
        "accuracy": accuracy(result.probs, result.y) if tested else "",
        "nll": nll(result.probs, result.y) if tested else "",
    }
