"""A state of the server, tested: clients answer with their own models, all or a sample of them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from .. import tree, wire
from ..core import rng
from ..core.types import Algorithm, ServerState
from ..data.cohort import sampled
from ..data.partition import Federation
from ..engine.evaluation import answers
from ..engine.ranks import spread
from ..evaluate.diagnose import diagnose
from ..evaluate.metrics import ClientResult, gap_interval, of_classes, summarize, tempered
from ..tree import Params
from .setup import Setup, grain_for


@dataclass(frozen=True)
class Evaluation:
    """Clients' answers at one state, participating ones first, and what they sum up to."""

    clients: list[ClientResult]
    summary: dict[str, Any]


def whom(setup: Setup, count: int) -> dict[str, Sequence[int]]:
    """Return the clients that an evaluation tests, by group: so many of each, 0 for all; the same in every round."""
    key = rng.key(setup.experiment.seed)
    return {name: sampled(key, group, count) for name, group in _groups(setup.pool.federation).items()}


def _groups(federation: Federation) -> dict[str, range]:
    known, new = federation.num_clients, federation.num_unseen
    groups = {"test": range(known), "unseen": range(known, known + new)}
    return groups | ({"valid_unseen": validation_clients(federation)} if federation.num_valid else {})


def partly_tested(setup: Setup, count: int) -> dict[str, dict[str, int]]:
    """Return of each group that is not tested whole how many clients are, and how many there are."""
    groups = _groups(setup.pool.federation)
    return {name: {"clients": count, "of": len(group)} for name, group in groups.items() if 0 < count < len(group)}


def samples_told(setup: Setup) -> list[str]:
    """Say which figures will rest on a sample of clients."""
    e, titles = setup.experiment, {"test": "participating", "unseen": "unseen", "valid_unseen": "validation"}
    last, said = partly_tested(setup, e.final_clients), []
    for name, what, rest in (
        ("eval_clients", "evaluations before the last test", "" if last else "; the last tests all"),
        ("final_clients", "the last evaluation, and so the result, tests", ""),
    ):
        found = partly_tested(setup, getattr(e, name))
        if found:
            parts = " and ".join(f"{each['clients']} of {each['of']} {titles[group]}" for group, each in found.items())
            said.append(f"{what} a sample: {parts} clients, always the same ({name}={getattr(e, name)}){rest}")
    return said


def evaluate(setup: Setup, state: ServerState, split: str = "test", *, count: int = 0) -> Evaluation:
    """Personalise and test clients at a state of the server: all, or a sample of `count` of each group."""
    federation = setup.pool.federation
    groups = whom(setup, count)
    known, unseen = groups["test"], groups["unseen"]
    results, sparsities = [], []
    for clients in (known, unseen):
        for result, masks in _answered(setup, state, clients, split):
            results.append(result)
            if clients is known:
                sparsities.append(sparsity(setup.algorithm, state, masks))
    released = setup.released
    parts = (results[: len(known)], results[len(known) :])
    test, new = (summarize(part, released=released) for part in parts)
    interval = gap_interval(*parts, released=released)
    summary = summed(
        setup.algorithm, state, federation.num_clients, test, new, interval=interval, sparsities=sparsities
    )
    if setup.experiment.valid and split == "test":
        held = _held(setup, state, known)
        summary["valid"] = summarize(held, released=released)
        summary["tempered"] = summarize(tempered(parts[0], held), released=released)
        if federation.num_valid:
            summary["valid_unseen"] = summarize(_held(setup, state, groups["valid_unseen"]), released=released)
    if federation.source.domains:
        summary["domains"] = {
            domain.name: {
                name: summarize(of_classes(part, domain.first_class, domain.num_classes))["accuracy"]
                for name, part in zip(("test", "unseen"), parts, strict=True)
            }
            for domain in federation.source.domains
        }
    found = partly_tested(setup, count)
    return Evaluation(results, summary | ({"sampled": found} if found else {}))


def sparsity(algorithm: Algorithm, state: ServerState, masks: Params) -> dict[str, float]:
    """Return how sparse a client's model is, with the masks that are its own."""
    return wire.sparsity(tree.without(state.params, "server.") | masks, algorithm.posterior)


def summed(
    algorithm: Algorithm, state: ServerState, clients: int, test: Mapping[str, Any], unseen: Mapping[str, Any], *,
    interval: list[float] | None, sparsities: Sequence[Mapping[str, float]],
) -> dict[str, Any]:  # fmt: skip
    """Sum up an evaluation of participating and of unseen clients, wherever they were tested.

    Args:
        algorithm: the method.
        state: the server's, that was tested.
        clients: how many take part.
        test: figures of participating clients, and `unseen`, of unseen ones.
        unseen: see there.
        interval: of the gap between their accuracies, where it is known.
        sparsities: see `sparsity`, of some participating clients.
    """
    known, new = test["accuracy"], unseen["accuracy"]
    return {
        "test": test,
        "unseen": unseen,
        "gap": None if known is None or new is None else new - known,
        "gap_interval": interval,
        "sparsity": {key: sum(each[key] for each in sparsities) / len(sparsities) for key in ("layer", "model")},
        "diagnostics": diagnose(algorithm, state, clients),
    }


def validation_clients(federation: Federation) -> range:
    """Return the clients that are only ever validated on: the last ones."""
    return range(len(federation.train) - federation.num_valid, len(federation.train))


def evaluate_valid(setup: Setup, state: ServerState, clients: Sequence[int] | None = None) -> dict[str, Any]:
    """Personalise clients, by default all participating ones, and sum up their answers on validation rows alone."""
    who = range(setup.pool.federation.num_clients) if clients is None else clients
    return summarize(_held(setup, state, who), released=setup.released)


def _held(setup: Setup, state: ServerState, clients: Sequence[int]) -> list[ClientResult]:
    return [each for each, _ in _answered(setup, state, clients, "valid")]


def _answered(
    setup: Setup, state: ServerState, clients: Sequence[int], split: str
) -> Iterable[tuple[ClientResult, Params]]:
    """Let clients answer their rows, each on one of the ranks."""
    e, ranks = setup.experiment, setup.ranks

    def answer(some: Sequence[int]) -> Iterator[tuple[ClientResult, Params]]:
        return answers(setup.algorithm, setup.pool, state, some, setup.schedule.map, split=split)

    if ranks is None:
        return answer(clients)
    return spread(ranks, state, clients, grain_for(e), answer)
