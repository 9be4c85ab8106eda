"""What a trained model is for: adapt it to a client, answer rows with it, keep it.

    own   = personalize(received, batches)     what evaluation computes for a client, here for one who asks
    probs = predict(own, x)                    what evaluation scores, here for rows without a score

A personalised model is a folder that needs neither the run nor its data any more:

    config.toml           the run's, everything resolved
    model.json            where it comes from, what it takes, how it answers
    weights.safetensors   a client's own parameters, and the others' checksums

Shape letters: B rows, K classes.
"""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import ArrayLike
from torch import nn

from .. import container, tree
from ..container import Format, write_atomic
from ..core.owned import shown_to
from ..core.types import Algorithm, Model, NonFiniteError, Predict, ServerState
from ..data import collection
from ..data.cohort import Pool
from ..data.cohort import pool as pool_of
from ..data.collection import SHOWN
from ..data.formats.cache import Note, log
from ..data.partition import Federation, some
from ..data.source import Source, SourceError, transform
from ..engine import turn
from ..engine.checkpoint import hashes, load_checkpoint, state_hash
from ..engine.kept import held as held_by
from ..engine.kept import newcomers
from ..engine.machine import tuned
from ..engine.task import Task, client_task
from ..errors import UserError
from ..evaluate.uncertainty import entropy
from ..runs.settings import Experiment, from_toml, spec_hash, to_toml, with_settings
from ..runs.setup import Data, Setup, channels_last, data_of, prepare, using
from ..runs.store import Store
from ..tree import Params
from ..version import VERSION
from .samples import Given, Samples, blank, class_names, described, domain_number, fit, restored, samples

MODEL = Format("model", 2)
WEIGHTS, CONFIG, ABOUT = "weights.safetensors", "config.toml", "model.json"
_OWN_MODULE = "was trained on a network of your own, which no folder holds; use Python and pass it as module="


class Prediction(NamedTuple):
    """What a personalised model says of B rows."""

    probs: np.ndarray
    """(B, K) class probabilities."""
    entropy: np.ndarray
    """(B,) of the probabilities, in nats: all that the model is unsure of."""
    mutual_information: np.ndarray | None
    """(B,) in nats: what it is unsure of because it does not know its weights; None without a posterior."""


class Held(NamedTuple):
    """Labelled rows of a client that its model was not adapted to, as they are stored."""

    name: str
    """Where they come from, for a sentence."""
    x: np.ndarray
    y: np.ndarray
    domain: np.ndarray | None
    """Which dataset each row belongs to, if there are several."""


@dataclass(frozen=True)
class Trained:
    """A run's folder, opened."""

    folder: Path | None
    """None of a run that wrote no files."""
    setup: Setup
    state: ServerState
    result: dict[str, Any] | None
    """The content of result.json; None while the run is not finished."""
    module: nn.Module | Model | None


@dataclass(frozen=True, eq=False)
class Personal:
    """A client's own model: `predict(x)` answers, `save(folder)` and `Personal.load(folder)` keep it."""

    params: Params
    takes: Source
    """What it takes: a source without rows."""
    experiment: Experiment
    about: Mapping[str, Any]
    """Where it comes from, in plain values; see docs/use.md."""
    module: nn.Module | Model | None = None
    held: Held | None = None
    """The client's validation rows in the run, for `serve.sets`; no folder holds them."""

    @cached_property
    def task(self) -> Task:
        """The run's network and method, where it computes."""
        return client_task(replace(self.experiment, device=str(self.device)), self.takes, self.module)

    @property
    def model(self) -> Model:
        """The network."""
        return self.task.model

    @property
    def device(self) -> torch.device:
        """Where it computes."""
        return next(iter(self.params.values())).device

    @property
    def classes(self) -> list[str]:
        """The K classes' names, with their domains' where there are several."""
        names = list(self.about["classes"])
        for domain in self.takes.domains:
            for number in range(domain.first_class, domain.first_class + domain.num_classes):
                names[number] = f"{domain.name}:{names[number]}"
        return names

    def algorithm(self, **options: Any) -> Algorithm:
        """Return the run's method, some of its options changed."""
        e = self.experiment
        return client_task(replace(e, options={**e.options, **options}), self.takes, self.model).algorithm

    def answer(self, samples: int | None = None) -> Predict:
        """Return how the model answers: as in the run's evaluation, and where it has a posterior with information.

        `samples` is the number of posterior draws. A run that answers at the posterior mean goes on to do so, and its
        draws tell the information alone.
        """
        options = self.experiment.options
        if "predict" not in options:
            if samples is not None:
                raise UserError(f"samples is {samples}, but {self.experiment.method} has no posterior to draw from")
            return self.algorithm().predict
        chosen = {} if samples is None else {"samples": samples}
        draws = self.algorithm(predict="draws", **chosen).predict
        if options["predict"] == "draws":
            return draws
        mean = self.algorithm().predict
        return lambda own, x, key: mean(own, x, key)._replace(drawn=draws(own, x, key).drawn)

    def normalise(self, x: torch.Tensor, domain: int | None = None) -> torch.Tensor:
        """Return stored rows as the network sees them: with the run's numbers, not those of the rows."""
        rows = None if domain is None else torch.full((x.shape[0],), domain, device=x.device)
        return transform(self.takes, getattr(torch, self.experiment.dtype), x.device)(x, rows)

    def predict(self, x: ArrayLike, *, samples: int | None = None, domain: str | None = None) -> Prediction:
        """Answer rows as they are stored: uint8 images 0 to 255 or floats, as the run's data were.

        Args:
            x: (B, c, h, w) or (B, h, w) images, brought to the model's size, or (B, d) features.
            samples: posterior draws; by default as many as the run's option says.
            domain: of a model of several datasets, which of them the rows are like.
        """
        number = domain_number(self.takes, domain or self.about["domain"])
        # A copy: arrays may have any stride along an axis of length 1, and torch chooses its algorithms by strides.
        raw = torch.from_numpy(np.array(fit(x, self.takes), order="C"))
        answer, key = self.answer(samples), torch.tensor(self.about["key"], dtype=torch.int64)
        # As in evaluation: another order of sums would be another rounding.
        last = raw.ndim == 4 and channels_last(self.experiment)
        layout = torch.channels_last if last else torch.contiguous_format
        with torch.no_grad(), tuned(self.task.num_weights, str(self.device)):
            parts = (
                self.normalise(part.to(self.device), number).contiguous(memory_format=layout)
                for part in torch.split(raw, turn.ROWS)
            )
            found = turn.respond(answer, self.params, parts, key.to(self.device))
        probs = found.probs.double().cpu().numpy()
        if not np.isfinite(probs).all():
            bad = int((~np.isfinite(probs)).any(1).argmax())
            raise NonFiniteError(f"row {bad} is answered with probabilities that are NaN; are its numbers too large?")
        drawn = found.drawn["information"].cpu().numpy() if found.drawn else None
        return Prediction(probs, entropy(probs), drawn)

    def save(self, folder: str | Path) -> Path:
        """Write the folder, whole or not at all; it must be new or empty."""
        folder = Path(folder)
        if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
            raise UserError(f"{folder} is there already and not empty; name a new folder")
        folder.parent.mkdir(parents=True, exist_ok=True)
        about = json.dumps({**self.about, "takes": described(self.takes)}, indent=2) + "\n"
        contents = {CONFIG: to_toml(self.experiment).encode(), ABOUT: about.encode()}
        contents[WEIGHTS] = container.dump(MODEL, self.params, _sums(contents))
        scratch = folder.with_name(f".{folder.name}.partial")
        shutil.rmtree(scratch, ignore_errors=True)
        try:
            scratch.mkdir()
            for name, data in contents.items():
                write_atomic(scratch / name, data)
            scratch.replace(folder)
        finally:
            shutil.rmtree(scratch, ignore_errors=True)
        return folder

    @staticmethod
    def load(
        folder: str | Path, *, module: nn.Module | Model | None = None, device: torch.device | str = "cpu"
    ) -> Personal:
        """Read a folder that `save` wrote, after its checksums; a network of your own is passed as `module`."""
        folder = Path(folder)
        try:
            loaded, sums = container.load(MODEL, (folder / WEIGHTS).read_bytes())
            texts = {name: (folder / name).read_bytes() for name in (CONFIG, ABOUT)}
            if sums != _sums(texts):
                raise ValueError("its checksums do not match")
            about = json.loads(texts[ABOUT])
            takes = restored(about.pop("takes"))
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise UserError(f"{folder} holds no sound personalised model ({error}); personalise it again") from None
        params = {name: value.to(device) for name, value in loaded.items()}
        experiment = replace(with_settings(Experiment(), from_toml(folder / CONFIG)), device=str(device))
        if module is None and "/" in experiment.content:
            raise UserError(f"{folder} {_OWN_MODULE}")
        found = Personal(params, takes, experiment, about, module)
        _check_module(found, str(folder))
        return found


def _sums(contents: Mapping[str, bytes]) -> dict[str, str]:
    return {name: hashlib.sha256(data).hexdigest() for name, data in contents.items()}


def _check_module(own: Personal, place: str) -> None:
    """Refuse a module that is not the one that was trained."""
    for layer, shape in own.model.layers.items():
        weight = own.params.get(f"{layer}.weight")
        if weight is not None and tuple(weight.shape) != shape:
            raise UserError(f"{place} has a layer {layer} of shape {tuple(weight.shape)}, but the module's is {shape}")
    missing = [
        layer for layer in own.model.layers if layer not in own.model.head and f"{layer}.weight" not in own.params
    ]
    if missing:
        raise UserError(f"{place} has no layer {missing[0]}, but the module has; pass the module that was trained")
    if own.about["noise"] != _noise(own.algorithm()):
        raise UserError(f"{place} has another posterior than the module gives it; pass the module as it was trained")


def _noise(algorithm: Algorithm) -> dict[str, Any] | None:
    return None if algorithm.posterior is None else json.loads(json.dumps(algorithm.posterior.describe()))


# From a run to a client's model


def open_run(
    folder: str | Path,
    *,
    trained_on: Data | None = None,
    module: nn.Module | Model | None = None,
    root: str | Path | None = None,
    device: str | None = None,
    note: Note = log,
) -> Trained:
    """Build a run's parts again and load the state that it tested, once it is known to be just that.

    Args:
        folder: of a run, finished or not.
        trained_on: the data that were handed to `run` as `source`; by default they are read as the run did.
        module: the network that was handed to `run`, if one was.
        root: where the files of datasets are; by default where the run found them.
        device: by default the run's, or the CPU where that is not there.
        note: told what a person should know.
    """
    store = Store(Path(folder))
    if not store.is_run():
        raise UserError(f"{folder} holds no run and no personalised model; name the --out folder of one")
    given = with_settings(Experiment(), from_toml(store.config))
    if module is None and "/" in given.content:
        raise UserError(f"the run in {folder} {_OWN_MODULE}")
    if trained_on is None:
        _check_readable(given, folder)
    # The state holds all weights by now; whoever uses it need not have the file that training began with.
    given = replace(given, weights="", device=device or (given.device if torch.cuda.is_available() else "cpu"))
    given = given if root is None else replace(given, root=str(root))
    setup = prepare(given, data_of(given, trained_on, note), module)
    if setup.experiment.content != given.content:
        now = f"content {setup.experiment.content} in place of {given.content}"
        raise UserError(f"the data or the network are not those that the run in {folder} was trained with ({now})")
    result = store.read_result() if store.result.exists() else None
    state = _tested(store, setup, result, note)
    return Trained(store.folder, setup, state, result, module)


def _check_readable(given: Experiment, folder: str | Path) -> None:
    try:
        collection.parse(given.data)
    except SourceError:
        raise UserError(
            f"the run in {folder} was trained on {given.data!r}, which is no dataset's name but data handed over in "
            "Python; use Python and pass them as trained_on="
        ) from None


def _tested(store: Store, setup: Setup, result: Mapping[str, Any] | None, note: Note) -> ServerState:
    """Return the state that the run tested, or would test if it ended now."""
    device = setup.experiment.device
    found = load_checkpoint(store.checkpoint, device, note)
    if found is not None and "best" in found[1]:
        found = load_checkpoint(store.best, device, note, round=found[1]["best"]["round"])
    if found is None:
        raise UserError(f"the run in {store.folder} has no sound checkpoint; train it with metavd run --resume")
    if result is None:
        note(f"the run in {store.folder} is not finished; its state of round {int(found[0].round)} is used")
    elif any(result[name] != value for name, value in hashes(found[0]).items()):
        raise UserError(
            f"the state of round {result['tested_round']} that the run in {store.folder} tested is missing or damaged; "
            "run it again into another folder"
        )
    return found[0]


def personalize(
    run: str | Path | Trained,
    source: Given | None = None,
    *,
    client: str | int | None = None,
    domain: str | None = None,
    trained_on: Data | None = None,
    module: nn.Module | Model | None = None,
    root: str | Path | None = None,
    device: str | None = None,
    note: Note = log,
) -> Personal:
    """Return the model of one client, adapted exactly as evaluation adapts it.

    Args:
        run: a run's folder, or what `open_run` made of it.
        source: labelled rows of a client that was never seen, see `samples.samples`. Without it, `client` is one of the
            run's own; without both, the model is what a new client receives, before any adaptation.
        client: which of the clients in `source`, or the number of one of the run's clients, unseen ones included.
        domain: of a run on several datasets, which of them `source` is like.
        trained_on: see `open_run`, as the arguments that follow.
        module: your own network.
        root: where the files of datasets are.
        device: where to compute.
        note: told what a person should know.
    """
    trained = _opened(run, trained_on=trained_on, module=module, root=root, device=device, note=note)
    found = personalize_each(trained, source, client=client, domain=domain, root=root, note=note)
    if len(found) > 1:
        raise UserError(f"the data hold {len(found)} clients ({_some(list(found))}), but one is wanted; name it")
    return next(iter(found.values()))


def personalize_each(
    run: str | Path | Trained,
    source: Given | None = None,
    *,
    client: str | int | None = None,
    domain: str | None = None,
    root: str | Path | None = None,
    note: Note = log,
    **how: Any,
) -> dict[str, Personal]:
    """Return, by name, the models of all clients in `source`, or of the one that is named; see `personalize`."""
    trained = _opened(run, root=root, note=note, **how)
    if source is None:
        number = None if client is None else _number(trained, client)
        called = "new" if number is None else trained.setup.pool.federation.name(number)
        return {called: _participating(trained, number, domain)}
    e, held = trained.setup.experiment, trained.setup.pool.federation.source
    takes, classes = blank(held), class_names(e.data, held)
    rows = samples(source, takes, classes, data=e.data, domain=domain, root=root or e.root, note=note)
    if rows.y is None:
        raise UserError(
            f"{rows.name} has no labels, but a model is adapted to labelled rows; metavd predict needs none"
        )
    return _new(trained, rows, None if client is None else str(client), classes)


def _opened(run: str | Path | Trained, **how: Any) -> Trained:
    return run if isinstance(run, Trained) else open_run(run, **how)


def _some(names: list[str]) -> str:
    return ", ".join(names[:8]) + (", ..." if len(names) > 8 else "")


def _number(trained: Trained, client: str | int) -> int:
    """Return the number of one of the run's clients."""
    federation = trained.setup.pool.federation
    known, everyone = federation.num_clients, federation.num_clients + federation.num_unseen
    if str(client) in federation.names[:everyone]:
        return federation.names.index(str(client))
    if federation.names:
        there = some(federation.names[:everyone], SHOWN)
        raise UserError(f"client is {client!r}, but the run has the clients {there}")
    if not str(client).isdigit() or int(client) >= everyone:
        unseen = f", and {known} to {everyone - 1} that never took part" if everyone > known else ""
        raise UserError(f"client is {client!r}, but the run has the clients 0 to {known - 1}{unseen}")
    return int(client)


def _participating(trained: Trained, number: int | None, domain: str | None) -> Personal:
    """Give one of the run's clients its model, or a new one what it would receive."""
    pool = trained.setup.pool
    if domain is not None:
        domain_number(pool.federation.source, domain)
    if number is None:
        return _model(trained, None, pool.federation.num_clients, kind="new", client=None, domain=domain)
    kind = "unseen" if number >= pool.federation.num_clients else "participating"
    return _model(trained, pool, number, kind=kind, client=pool.federation.name(number), domain=domain)


def _new(trained: Trained, rows: Samples, client: str | None, classes: list[str]) -> dict[str, Personal]:
    """Give clients that the run has never seen their models.

    The first of them has the number, and so the random numbers, of the run's first unseen client, and so on: whoever
    brings an unseen client's rows gets exactly the model that the run evaluated.
    """
    names = rows.clients() or ["new"]
    if client is not None and client not in names:
        raise UserError(f"client is {client!r}, but the data hold {_some(names) if rows.client else 'no clients'}")
    setup, held = trained.setup, trained.setup.pool.federation
    usable = np.ones(len(rows.x), bool) if rows.test is None else ~rows.test
    owner = np.array(rows.client or ["new"] * len(rows.x), object)
    # pFedGP may be told to lend new clients labelled rows of the others, which must then be there.
    kept = len(held.source.y) if setup.algorithm.personal_batches.extra else 0
    none = np.empty(0, np.int64)
    blocks = tuple(kept + np.flatnonzero((owner == name) & usable) for name in names)
    known = tuple(held.train[number] if kept else none for number in range(held.num_clients))
    assert rows.y is not None
    of = held.source.domain
    source = replace(
        held.source, test=None, client=None,
        x=np.concatenate([held.source.x[:kept], rows.x]), y=np.concatenate([held.source.y[:kept], rows.y]),
        domain=None if of is None else np.concatenate([of[:kept], np.full(len(rows.x), rows.domain)]),
    )  # fmt: skip
    federation = Federation(source, (*known, *blocks), (), (), held.num_clients, len(names), none)
    pool = pool_of(federation, setup.experiment.device, setup.pool.dtype)._replace(layout=setup.pool.layout)
    about = {"kind": "new", "adapted_on": rows.name, "classes": classes,
             "domain": None if rows.domain is None else source.domains[rows.domain].name}  # fmt: skip
    return {
        name: _model(trained, pool, held.num_clients + i, client=name if rows.client else None, **about)
        for i, name in enumerate(names)
        if client in (None, name)
    }


def _model(trained: Trained, pool: Pool | None, number: int, **about: Any) -> Personal:
    """Do for one client what evaluation does for all; without a pool the client has nothing to adapt to."""
    setup, state = trained.setup, trained.state
    e, held = setup.experiment, setup.pool.federation
    algorithm, now, client = setup.algorithm, turn.moment(state), torch.tensor(number, device=e.device)
    with torch.no_grad(), using(setup):
        (new,) = newcomers(algorithm, state, [number])
        own = [] if pool is None else turn.personal_batches(algorithm, pool, number, now, number, new=new)
        unseen = number >= held.num_clients
        shown, place = shown_to(state, client[None], unseen=unseen)
        received = turn.received_for_test(algorithm, shown.params, state.round, place[0], own, unseen=unseen)
        kept = tree.unstack(held_by(algorithm, state, [number]), 0)
        params = turn.own_model(algorithm, received, kept, own, new=new)
    described = {
        "metavd": VERSION, "method": e.method, "data": e.data,
        "run": None if trained.folder is None else str(trained.folder.resolve()),
        "spec": spec_hash(e), "model_sha256": state_hash(state), "round": now.done,
        "adapted_on": "nothing" if pool is None else "rows of the run",
        "samples": 0 if pool is None else len(pool.federation.train[number]),
        "classes": about.pop("classes", None) or class_names(e.data, held.source),
        "key": int(turn.answer_key(now, number)), "noise": _noise(algorithm), "result": trained.result,
        **about,
    }  # fmt: skip
    return Personal(params, blank(held.source), e, described, trained.module, _held(pool, number))


def _held(pool: Pool | None, number: int) -> Held | None:
    """Return a client's validation rows; rows of new clients are dealt none."""
    if pool is None or number >= len(pool.federation.valid):
        return None
    source, rows = pool.federation.source, pool.federation.valid[number]
    domain = None if source.domain is None else source.domain[rows]
    return Held(f"validation rows of client {pool.federation.name(number)}", source.x[rows], source.y[rows], domain)


def open_model(
    place: str | Path, *, client: str | None = None, domain: str | None = None, device: str | None = None, **how: Any
) -> Personal:
    """Return the model of a personalised folder, or of a run's client, or what a run has for a new client."""
    if (Path(place) / ABOUT).exists():
        if client is not None:
            raise UserError(f"client is {client!r}, but {place} is one client's model already; leave it out")
        return Personal.load(place, device=_usable(device or "cpu"))
    return personalize(place, client=client, domain=domain, device=device, **how)


def _usable(device: str) -> str:
    try:
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError):
        raise UserError(f"device is {device!r}, but torch has no such device here; use cpu") from None
    return device
