"""The round loop, over a `Transport`: clients in this process, or sites of a federation.

    collect (choose, send, train, receive) -> update -> check -> record -> [evaluate] -> [checkpoint]

and, when the last round is over, the evaluation that makes the result.

Shape letters: C clients.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from ..core.types import NonFiniteError, ServerState, Update
from ..errors import FailedError, UserError
from .checkpoint import load_checkpoint, save_checkpoint, state_hash
from .turn import Moment, check_finite, magnitudes, moment


class Record(NamedTuple):
    """What is known of a round once it is over."""

    round: int
    """Counted from 1."""
    cohort: list[int]
    """The clients whose answers arrived."""
    lost: list[int]
    """Those that were asked and did not answer."""
    loss: float | None
    """Mean training loss over the cohort's steps, weighted by data size; None of a round without an answer."""
    down: int
    """Bytes that the cohort received, and, below, sent; and what they would be without masks."""
    up: int
    dense_down: int
    dense_up: int
    more: Mapping[str, Any] = {}
    """What a transport adds."""

    def line(self) -> dict[str, Any]:
        """Return the record as a line of rounds.jsonl."""
        values: dict[str, Any] = self._asdict()
        more = values.pop("more")
        return {**values, **more}


class Account(NamedTuple):
    """What a round cost: see `Record`."""

    down: int
    up: int
    dense_down: int
    dense_up: int
    more: Mapping[str, Any] = {}


class Answers(NamedTuple):
    """What came back from the clients that a round asked."""

    cohort: list[int]
    """C clients that answered, ascending."""
    lost: list[int]
    update: Update | None
    """Their answers in the order of their ids; None where nobody answered."""
    losses: Tensor | None
    """(C,)."""
    account: Callable[[], Account]
    """Asked for when the round is over; may wait for the device."""


def _as_it_is(state: ServerState) -> ServerState:
    return state


class Transport(NamedTuple):
    """How a round reaches its clients."""

    collect: Callable[[ServerState, Moment], Answers]
    """Choose who takes part, send them what the state has for them, let them train, return their answers."""
    ready: Callable[[ServerState], ServerState] = _as_it_is
    """Called before every round and before the last evaluation: waits for clients, and may give newcomers rows."""
    ahead: int = 0
    """Rounds that may be under way while an earlier one is waited for."""


ServerUpdate = Callable[[ServerState, Update], ServerState]


def rounds(
    update: ServerUpdate, transport: Transport, state: ServerState, until: int
) -> Iterator[tuple[ServerState, Record]]:
    """Go on from a state until so many rounds are finished, yielding the state and the record after each."""
    first = moment(state)
    waiting: list[tuple[ServerState, Callable[[], Record]]] = []
    for done in range(first.done, until):
        with torch.no_grad():
            state = transport.ready(state)
            # Asking the device for its number of rounds would mean to wait for it.
            answers = transport.collect(state, Moment(first.key, done, state.round))
            begun = _taken(update, state, answers, done)
            waiting.append(begun)
            state = begun[0]
            finished = [(new, finish()) for new, finish in waiting[: len(waiting) - transport.ahead]]
        del waiting[: len(waiting) - transport.ahead]
        yield from finished
    for new, finish in waiting:
        yield new, finish()


def _taken(
    update: ServerUpdate, state: ServerState, answers: Answers, done: int
) -> tuple[ServerState, Callable[[], Record]]:
    """Take a round's answers; return the state that it ends in, and what waits for that and checks it.

    A round without a single answer leaves the server's parameters as they are.
    """
    if answers.update is None or answers.losses is None:
        return state._replace(round=state.round + 1), lambda: Record(
            done + 1, [], answers.lost, None, *answers.account()
        )
    new = update(state, answers.update)
    weight, answered = answers.update.weight, answers.update.params | {"loss": answers.losses}
    loss = (answers.losses * weight).sum() / weight.sum()
    told = _fetch(torch.stack([loss, *magnitudes([*answered.values(), *new.params.values()])]))

    def finish() -> Record:
        mean, *sizes = told()
        if not all(map(math.isfinite, sizes)):
            check_finite(answered, done + 1, answers.cohort)
            check_finite(new.params, done + 1, "the server's update")
        return Record(done + 1, answers.cohort, answers.lost, mean, *answers.account())

    return new, finish


def _fetch(values: Tensor) -> Callable[[], list[float]]:
    """Send numbers (n,) to the host; return what waits for them, and not for anything that the device does later."""
    if not values.is_cuda:
        return values.tolist
    here = torch.empty(values.shape, dtype=values.dtype, pin_memory=True).copy_(values, non_blocking=True)
    arrived = torch.cuda.Event()  # type: ignore[no-untyped-call]
    arrived.record()

    def wait() -> list[float]:
        arrived.synchronize()
        return here.tolist()

    return wait


# --- a whole run -----------------------------------------------------------------------------------------------------


class Listener(Protocol):
    """Whoever wants to know how a run goes on."""

    def start(self, experiment: Any, done: int) -> None:
        """A run begins, with `done` rounds behind it."""

    def round(self, record: Record) -> None:
        """A round is over."""

    def evaluation(self, round: int, summary: Mapping[str, Any]) -> None:
        """An evaluation is done."""

    def note(self, text: str) -> None:
        """Something happened that a person should know."""


class Silent:
    """A listener that ignores what it is told."""

    def start(self, experiment: Any, done: int) -> None: ...  # noqa: D102
    def round(self, record: Record) -> None: ...  # noqa: D102
    def evaluation(self, round: int, summary: Mapping[str, Any]) -> None: ...  # noqa: D102
    def note(self, text: str) -> None: ...  # noqa: D102


class InterruptedRun(FailedError):  # noqa: N818
    """The run was stopped by hand; its checkpoint is safe."""


class LostStateError(UserError):
    """A state that a run needs to go on is missing or damaged."""


class Spec(Protocol):
    """What of an experiment the loop must know."""

    @property
    def method(self) -> str: ...  # noqa: D102
    @property
    def data(self) -> str: ...  # noqa: D102
    @property
    def seed(self) -> int: ...  # noqa: D102
    @property
    def rounds(self) -> int: ...  # noqa: D102
    @property
    def device(self) -> str: ...  # noqa: D102
    @property
    def eval_every(self) -> int: ...  # noqa: D102
    @property
    def checkpoint_every(self) -> int: ...  # noqa: D102
    @property
    def patience(self) -> int: ...  # noqa: D102


class Journal(Protocol):
    """A run's folder."""

    @property
    def folder(self) -> Path: ...  # noqa: D102
    @property
    def checkpoint(self) -> Path: ...  # noqa: D102
    @property
    def best(self) -> Path: ...  # noqa: D102
    def add_round(self, record: Mapping[str, Any]) -> None: ...  # noqa: D102
    def finish(  # noqa: D102
        self, result: Mapping[str, Any], clients: Sequence[Mapping[str, Any]], details: Mapping[str, Any]
    ) -> None: ...


class Tested(NamedTuple):
    """An evaluation of all clients."""

    summary: dict[str, Any]
    files: Callable[[], tuple[list[dict[str, Any]], dict[str, Any]]]
    """A line for each client and what a report draws; asked for at the end of a run."""


@dataclass(frozen=True)
class Run:
    """A run, ready to be carried out."""

    spec: Spec
    spec_hash: str
    update: ServerUpdate
    transport: Transport
    test: Callable[[ServerState], Tested]
    """Personalise and test every client."""
    journal: Journal | None
    listener: Listener
    valid: Callable[[ServerState], Mapping[str, Any]] | None = None
    """Sum up the clients' answers on validation rows; for `patience`."""
    notes: Sequence[str] = ()
    """What a person should know before the first round."""
    about: Callable[[], Mapping[str, Any]] = dict
    """What stands in the result beside what every run has."""
    kept: Callable[[], Mapping[str, Any]] = dict
    """What a checkpoint keeps for the transport."""
    again: str = "go on with --resume"
    """How a stopped run is gone on with, for people."""


TRAFFIC = ("down", "up", "dense_down", "dense_up")


@dataclass(frozen=True)
class _Best:
    """The state with the smallest validation NLL so far, and for how many evaluations it has been that."""

    state: ServerState
    nll: float
    age: int = 0


def _better(best: _Best | None, state: ServerState, nll: float) -> _Best:
    return _Best(state, nll) if best is None or nll < best.nll else replace(best, age=best.age + 1)


def _best_so_far(run: Run, extra: Mapping[str, Any]) -> _Best | None:
    """Return the best state of a run that is resumed."""
    if run.journal is None or "best" not in extra:
        return None
    about = extra["best"]
    found = load_checkpoint(run.journal.best, run.spec.device, round=about["round"])
    if found is None:
        raise LostStateError(f"the best state, of round {about['round']}, is missing or damaged in {run.journal.best}")
    return _Best(found[0], about["nll"], about["age"])


@dataclass
class _Last:
    """The last good state, and what its checkpoint says beside it."""

    state: ServerState
    extra: dict[str, Any] = field(default_factory=dict)
    new: bool = False
    """Whether a round was finished since the run was begun or resumed."""


@contextmanager
def _saving(run: Run, last: _Last) -> Iterator[None]:
    """Keep the last good state safe whatever ends the training."""

    def save() -> None:
        if run.journal is not None and last.new:
            save_checkpoint(run.journal.checkpoint, last.state, last.extra, spec=run.spec_hash, seed=run.spec.seed)

    try:
        yield
    except KeyboardInterrupt:
        save()
        where = f"; the checkpoint is in {run.journal.folder}, {run.again}" if run.journal else ""
        raise InterruptedRun(f"stopped after round {int(last.state.round)}{where}") from None
    except NonFiniteError as error:
        save()
        kept = f"; the checkpoint of round {int(last.state.round)} is kept" if run.journal and last.new else ""
        raise NonFiniteError(f"{error}{kept}") from None


def carry_out(run: Run, state: ServerState, extra: Mapping[str, Any]) -> dict[str, Any]:
    """Train from a state to the end, evaluate, and return the result; `extra` is what its checkpoint said beside it."""
    e, journal = run.spec, run.journal
    total = {key: int(extra.get(key, 0)) for key in TRAFFIC}
    before, began = float(extra.get("seconds", 0.0)), time.monotonic()
    best, last = _best_so_far(run, extra), _Last(state)
    run.listener.start(e, int(state.round))
    for text in run.notes:
        run.listener.note(text)
    with _saving(run, last):
        stopped = best is not None and best.age >= e.patience
        for new, record in () if stopped else rounds(run.update, run.transport, state, e.rounds):
            state = new
            total = {key: total[key] + getattr(record, key) for key in TRAFFIC}
            run.listener.round(record)
            line = record.line()
            ends, known = record.round == e.rounds, best
            if record.round % e.eval_every == 0 and not ends:
                line |= run.test(state).summary
                run.listener.evaluation(record.round, line)
            if run.valid is not None and (record.round % e.eval_every == 0 or ends):
                valid = line["valid"] if "valid" in line else run.valid(state)
                best = _better(best, state, valid["nll"])
            if journal is not None:
                journal.add_round(line)
            last.state, last.new = state, True
            last.extra = {**total, "seconds": before + time.monotonic() - began, **run.kept()}
            if best is not None:
                last.extra["best"] = {"round": int(best.state.round), "nll": best.nll, "age": best.age}
            if journal is not None and best is not None and best is not known and best.state is state:
                save_checkpoint(journal.best, state, {}, spec=run.spec_hash, seed=e.seed)
            if journal is not None and (record.round % e.checkpoint_every == 0 or ends or best is not known):
                save_checkpoint(journal.checkpoint, state, last.extra, spec=run.spec_hash, seed=e.seed)
            if best is not None and best.age >= e.patience:
                break
        trained = int(state.round)
        if best is not None:
            state = best.state
            run.listener.note(f"  the state of round {int(state.round)} has the best validation NLL and is tested")
        state = run.transport.ready(state)
        final = run.test(state)
    run.listener.evaluation(trained, final.summary)
    result = {
        "method": e.method, "data": e.data, "seed": e.seed, "rounds": e.rounds, "device": e.device,
        "trained_rounds": trained, "tested_round": int(state.round),
        "seconds": round(before + time.monotonic() - began, 3),
        **final.summary,
        "bytes": total,
        "spec": run.spec_hash, "model_sha256": state_hash(state), **run.about(),
    }  # fmt: skip
    if journal is not None:
        journal.finish(result, *final.files())
    return result
