"""The round loop, over a `Transport`: clients in this process, or sites of a federation.

    collect (choose, send, train, receive) -> update -> check, count -> record -> [evaluate] -> [checkpoint]

and, when the last round is over, the evaluation that makes the result. What rounds reveal of single clients is counted
in the loop itself, so that nobody trains past a privacy budget.

Shape letters: C clients.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from ..core.accountant import Mechanism
from ..core.owned import moved
from ..core.types import NonFiniteError, ServerState, Update
from ..errors import FailedError, UserError
from ..tree import Params
from .checkpoint import hashes, load_checkpoint, save_checkpoint
from .ledger import Ledger
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


class Returned(NamedTuple):
    """What came back from the clients that a round asked."""

    cohort: list[int]
    """C clients that answered, ascending."""
    lost: list[int]
    update: Update | None
    """Their answers in the order of their ids; None where nobody answered and the server is not to know of it."""
    losses: Tensor | None
    """(C,)."""
    account: Callable[[], Account]
    """Asked for when the round is over; may wait for the device."""
    kept: Params = {}  # noqa: RUF012 (nobody writes into it)
    """(C, ...) what the clients keep, where they are simulated and the method lets them."""
    sizes: Tensor | None = None
    """(C,) sum of magnitudes of each client's answer, where the answers themselves were added up and are gone."""


class Transport(NamedTuple):
    """How a round reaches its clients."""

    collect: Callable[[ServerState, Moment], Returned]
    """Choose who takes part, send them what the state has for them, let them train, return their answers."""
    ready: Callable[[ServerState], ServerState] = lambda state: state
    """Called before every round and before the last evaluation: waits for clients, and may give newcomers rows."""
    ahead: int = 0
    """Rounds that may be under way while an earlier one is waited for."""


ServerUpdate = Callable[[ServerState, Update], ServerState]


def rounds(
    update: ServerUpdate, transport: Transport, state: ServerState, until: int, ledger: Ledger
) -> Iterator[tuple[ServerState, Record]]:
    """Go on from a state until so many rounds are finished, yielding the state and the record after each.

    The ledger counts them; when none fits its budget any more there are no further ones, see `Ledger.full`. One that
    is under way by then is given up.
    """
    first = moment(state)
    waiting: list[tuple[ServerState, Callable[[], Record]]] = []

    def finished() -> tuple[ServerState, Record]:
        new, finish = waiting.pop(0)
        record = finish()
        return new, record._replace(more={**record.more, **ledger.add(len(record.cohort))})

    for done in range(first.done, until):
        if ledger.full():
            return
        with torch.no_grad():
            state = transport.ready(state)
            # Asking the device for its number of rounds would mean to wait for it.
            answers = transport.collect(state, Moment(first.key, done, state.round))
            waiting.append(_taken(update, state, answers, done))
            state = waiting[-1][0]
            over = [finished() for _ in range(len(waiting) - transport.ahead)]
        yield from over
    while waiting and not ledger.full():
        yield finished()


def _taken(
    update: ServerUpdate, state: ServerState, answers: Returned, done: int
) -> tuple[ServerState, Callable[[], Record]]:
    """Take a round's answers; return the state that it ends in, and what waits for that and checks it.

    A round without a single answer leaves the server's parameters as they are.
    """
    if answers.update is None or answers.losses is None:
        return state._replace(round=state.round + 1), lambda: Record(
            done + 1, [], answers.lost, None, *answers.account()
        )
    new = _updated(update, state, answers.update)
    if state.kept is not None:
        new = new._replace(kept=state.kept.put(answers.cohort, answers.kept) if answers.cohort else state.kept)
    weight, answered = answers.update.weight, answers.update.params | answers.kept | {"loss": answers.losses}
    if answers.sizes is not None:
        answered["its answer"] = answers.sizes
    loss = (answers.losses * weight).sum() / weight.sum()  # no number where nobody answered
    told = _fetch(torch.stack([loss, *magnitudes([*answered.values(), *new.params.values()])]))

    def finish() -> Record:
        mean, *sizes = told()
        if not all(map(math.isfinite, sizes)):
            check_finite(answered, done + 1, answers.cohort)
            check_finite(new.params, done + 1, "the server's update")
        known = mean if answers.cohort else None
        return Record(done + 1, answers.cohort, answers.lost, known, *answers.account())

    return new, finish


def _updated(update: ServerUpdate, state: ServerState, answers: Update) -> ServerState:
    """Let the server take answers; it sees nothing of what clients keep, and of rows that clients own only theirs."""

    def step(shown: ServerState, clients: Tensor) -> ServerState:
        return update(shown._replace(kept=None), answers._replace(client=clients))

    return moved(state, answers.client, step)


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


class Tested(NamedTuple):
    """An evaluation of clients, all or a sample."""

    summary: dict[str, Any]
    files: Callable[[], tuple[list[dict[str, Any]], dict[str, Any]]]
    """A line for each client and what a report draws; asked for at the end of a run."""


@dataclass(frozen=True)
class Run:
    """A run, ready to be carried out."""

    spec: Any
    """An `Experiment` of `runs.settings`, of which this loop knows what every method shares."""
    spec_hash: str
    update: ServerUpdate
    transport: Transport
    test: Callable[[ServerState], Tested]
    """Personalise and test clients for the result, after the last round."""
    look: Callable[[ServerState], Tested]
    """The same on the way there, perhaps with fewer clients."""
    journal: Any
    """The run's folder, a `Store` of `runs.store`; None: nothing is written."""
    listener: Listener
    written: Any = None
    """The run's folder where another process writes it: only a best state is read from there."""
    valid: Callable[[ServerState], Mapping[str, Any]] | None = None
    """Sum up the clients' answers on validation rows; for `patience`."""
    notes: Sequence[str] = ()
    """What a person should know before the first round."""
    warned: Callable[[float | None, Mapping[str, Any]], Sequence[str]] = lambda *_: ()
    """(the last round's loss, the last evaluation) -> what a person should know before the result is believed."""
    about: Callable[[], Mapping[str, Any]] = dict
    """What stands in the result beside what every run has."""
    kept: Callable[[], Mapping[str, Any]] = dict
    """What a checkpoint keeps for the transport."""
    again: str = "go on with --resume"
    """How a stopped run is gone on with, for people."""
    privacy: Mechanism | None = None
    """How single clients are hidden, where they are."""
    ledger: Ledger | None = None
    """What was revealed of them so far; None: what the checkpoint says."""


TRAFFIC = ("down", "up", "dense_down", "dense_up")


@dataclass(frozen=True)
class _Best:
    """The state with the smallest validation NLL so far, and for how many evaluations it has been that."""

    state: ServerState
    nll: float
    age: int = 0


def _best_so_far(run: Run, extra: Mapping[str, Any]) -> _Best | None:
    """Return the best state of a run that is resumed."""
    store = run.journal or run.written
    if store is None or "best" not in extra:
        return None
    about = extra["best"]
    found = load_checkpoint(store.best, run.spec.device, round=about["round"])
    if found is None:
        raise UserError(f"the best state, of round {about['round']}, is missing or damaged in {store.best}")
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


def _tell_if_spent(run: Run, ledger: Ledger, done: int) -> None:
    """Say that a run ends before its last round because no further one fits its privacy budget."""
    why = ledger.full() if done < run.spec.rounds else ""
    if why:
        run.listener.note(f"  {why}; training ends here")


def carry_out(run: Run, state: ServerState, extra: Mapping[str, Any]) -> dict[str, Any]:
    """Train from a state to the end, evaluate, and return the result; `extra` is what its checkpoint said beside it."""
    e, journal, ledger = run.spec, run.journal, run.ledger or Ledger.opened(run.privacy, extra)
    total = {key: int(extra.get(key, 0)) for key in TRAFFIC}
    before, began = float(extra.get("seconds", 0.0)), time.monotonic()
    best, last, loss = _best_so_far(run, extra), _Last(state), extra.get("loss")
    run.listener.start(e, int(state.round))
    for text in run.notes:
        run.listener.note(text)
    with _saving(run, last):
        stopped = best is not None and best.age >= e.patience
        for new, record in () if stopped else rounds(run.update, run.transport, state, e.rounds, ledger):
            state = new
            total = {key: total[key] + getattr(record, key) for key in TRAFFIC}
            run.listener.round(record)
            line = record.line()
            ends, known = record.round == e.rounds or bool(ledger.full()), best
            if record.round % e.eval_every == 0 and not ends:
                line |= run.look(state).summary
                run.listener.evaluation(record.round, line)
            if run.valid is not None and (record.round % e.eval_every == 0 or ends):
                nll = (line["valid"] if "valid" in line else run.valid(state))["nll"]
                best = _Best(state, nll) if best is None or nll < best.nll else replace(best, age=best.age + 1)
            if journal is not None:
                journal.add_round(line)
            last.state, last.new = state, True
            loss = loss if record.loss is None else record.loss
            last.extra = {**total, "seconds": before + time.monotonic() - began, "loss": loss, **run.kept(),
                          **ledger.state()}  # fmt: skip
            if best is not None:
                last.extra["best"] = {"round": int(best.state.round), "nll": best.nll, "age": best.age}
            if journal is not None and best is not None and best is not known and best.state is state:
                save_checkpoint(journal.best, state, {}, spec=run.spec_hash, seed=e.seed)
            if journal is not None and (record.round % e.checkpoint_every == 0 or ends or best is not known):
                save_checkpoint(journal.checkpoint, state, last.extra, spec=run.spec_hash, seed=e.seed)
            if best is not None and best.age >= e.patience:
                break
        trained = int(state.round)
        _tell_if_spent(run, ledger, trained)
        if best is not None:
            state = best.state
            run.listener.note(f"  the state of round {int(state.round)} has the best validation NLL and is tested")
        state = run.transport.ready(state)
        final = run.test(state)
    run.listener.evaluation(trained, final.summary)
    warnings = list(run.warned(loss, final.summary))
    for text in warnings:
        run.listener.note(text)
    result = {
        "method": e.method, "data": e.data, "seed": e.seed, "rounds": e.rounds, "device": e.device,
        "trained_rounds": trained, "tested_round": int(state.round),
        "seconds": round(before + time.monotonic() - began, 3),
        **final.summary,
        "warnings": warnings,
        "bytes": total,
        "spec": run.spec_hash, **hashes(state), **ledger.summary(state), **run.about(),
    }  # fmt: skip
    if journal is not None:
        journal.finish(result, *final.files())
    return result
