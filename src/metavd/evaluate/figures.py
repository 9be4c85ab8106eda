"""The figures by which runs are judged: each is defined once, here or in a user's package.

A figure says how it is taken from answers and how clients are pooled, and how people read it: unit, direction, help.
`result.json`, `clients.csv`, reports, `metavd compare`, `metavd paper`, tuning, what a site sends in a federation and
the table in docs/figures.md are all made from this registry. A figure of your own is one function:

    @figure(title="sure", unit="%", better="higher", help="share of answers with a probability above 0.9", client=True)
    def sure(answers):                                  # see `Answers`; one number per test row
        return answers.probs.max(1) > 0.9

It joins by being imported. Where your package has the entry point

    [project.entry-points."metavd.figures"]
    mine = "mypackage.figures"                          # the module that defines them

it joins by itself, in every process and on the command line too.

Shape letters: C clients, N samples, K classes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, TypeVar

import numpy as np

from ..errors import UserError
from ..registry import Registry
from .answers import Answers
from .calibration import Reliability, expected_error, maximum_error
from .intervals import interval
from .scores import batch_mean
from .uncertainty import auroc, fpr95

ENTRY_POINTS = "metavd.figures"
TRAFFIC = ("bytes", "total")
"""Where a result has the bytes of both directions together: nowhere, they are added up."""
LARGEST = 1e100
"""Beyond it a number is no figure of anything, and scales of pictures would overflow."""


# --- how a figure is taken -------------------------------------------------------------------------------------------


class Rows(NamedTuple):
    """One number per test row; the figure of a client, or of all rows, is their mean."""

    score: Callable[[Answers], np.ndarray | None]
    """(N,), or None where the figure is not defined."""
    in_batches: bool = False
    """Whether the released code takes a client's figure as a mean of batch means, see `scores.batch_mean`."""


class Whole(NamedTuple):
    """One number of many rows, such as an area under a curve."""

    of: Callable[[Answers], float | None]


class Binned(NamedTuple):
    """One number of a reliability diagram; of several clients, of their diagrams added up."""

    diagram: str
    """See `Answers.diagram`."""
    error: Callable[[Reliability], float]


Take = Rows | Whole | Binned


def together(take: Take, answers: Answers) -> float | None:
    """Return the figure of all rows together, whoever they belong to."""
    if isinstance(take, Rows):
        score = take.score(answers)
        return None if score is None else float(score.mean())
    if isinstance(take, Binned):
        return take.error(answers.diagram(take.diagram))
    return take.of(answers)


def by_client(take: Take, answers: Answers, *, released: bool = False) -> np.ndarray | None:
    """Return (C,) each client's own figure; None where it is not defined for all of them."""
    if isinstance(take, Rows):
        score, size = take.score(answers), answers.test_size
        if score is None:
            return None
        first = size.cumsum() - size
        if released and take.in_batches:
            return np.array([batch_mean(part) for part in np.split(score, first[1:])])
        mean: np.ndarray = np.add.reduceat(score.astype(np.float64), first) / size
        return mean
    each = [together(take, one) for one in answers.one_by_one()]
    return None if None in each else np.array(each, np.float64)


# --- how clients are pooled ------------------------------------------------------------------------------------------

Weight = Literal["train_size", "test_size", "clients"]


class Pooling(NamedTuple):
    """How the figures of clients become one of a group."""

    says: str
    """In words."""
    over: Callable[[np.ndarray, np.ndarray], float | None] | None
    """Clients' figures (C,) and weights (C,) -> the group's; None: all rows are taken together."""
    weight: Weight = "clients"
    """What the weights are; also those of the bootstrap interval."""


def _mean(values: np.ndarray, weights: np.ndarray) -> float | None:
    return float((weights * values).sum() / weights.sum()) if weights.any() else None


def weighted(by: Weight) -> Pooling:
    """Return the mean over clients, weighted by their rows of a kind, or not at all (`clients`)."""
    how = {"train_size": ", weighted by training rows", "test_size": ", weighted by test rows", "clients": ""}[by]
    return Pooling(f"mean over clients{how}", _mean, by)


def percentile(share: float) -> Pooling:
    """Return the figure that so many per cent of the clients stay below."""
    return Pooling(f"{share:g}th percentile of clients", lambda values, _: float(np.percentile(values, share)))


ROWS = Pooling("all test rows together", None, "test_size")
LOWEST = Pooling("lowest client", lambda values, _: float(values.min()))


def weights(pool: Pooling, train_size: np.ndarray, test_size: np.ndarray) -> np.ndarray:
    """Return (C,) the weights of clients in a pool."""
    return {"train_size": train_size, "test_size": test_size, "clients": np.ones(len(test_size))}[pool.weight]


# --- the registry ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Figure:
    """One figure: how it is taken, pooled, checked, shown and read."""

    name: str
    """Its key in files."""
    help: str
    """How to read it, in one clause."""
    more: str = ""
    """What the table of the documentation adds."""
    take: Take
    pool: Pooling = ROWS
    title: str = ""
    """Short, for headings of columns; by default the name."""
    label: str = ""
    """In plain words, for a newcomer; by default the title."""
    unit: str = ""
    """"%" is a share that people read times 100."""
    better: Literal["higher", "lower", ""] = ""
    digits: int = 3
    """Decimals in tables."""
    client: bool = False
    """Whether every client's own is a column of clients.csv, and crosses from a site."""
    low: float = 0.0
    high: float = math.inf
    """A site's value outside of these is not believed."""
    always: bool = False
    """Whether every client with test rows has it; of a site that does not send it nothing is believed."""
    interval: bool = False
    """Whether the group's has a bootstrap interval over clients; for means."""
    headline: Literal["", "wide", "always"] = ""
    """Shown in all tables, curves and dot plots (always), or where there is room (wide)."""

    @property
    def factor(self) -> float:
        """What a value is multiplied by before people see it."""
        return 100.0 if self.unit == "%" else 1.0

    @property
    def short(self) -> str:
        """What headings call it."""
        return self.title or self.name

    @property
    def meaning(self) -> str:
        """How to read it, and which way is better where that is not the usual one."""
        return self.help + ("; lower is better" if self.better == "lower" else "")

    @property
    def heading(self) -> str:
        """Title of a picture."""
        return self.short[0].upper() + self.short[1:] + (f", {self.unit}" if self.unit else "")

    def column(self, *path: str, heading: str = "") -> Column:
        """Return how a table shows it, where it stands at PATH/name of a result."""
        title = " ".join(filter(None, (heading, self.short, "%" if self.unit == "%" else "")))
        return Column(title, (*path, self.name), self.factor, self.digits, _SIGNS[self.better])

    def text(self, value: float | None) -> str:
        """Write a value with its unit, for a terminal."""
        if value is None:
            return "-"
        return f"{self.factor * value:.{self.digits}f}" + (" %" if self.unit == "%" else "")


_SIGNS = {"higher": 1, "lower": -1, "": 0}
_KNOWN: Registry[Figure] = Registry(ENTRY_POINTS)


def register(figure: Figure, module: str) -> Figure:
    """Add a figure of a module; its name must be new."""
    if figure.name in {"intervals", "clients", "samples"}:
        raise UserError(f"there is a figure {figure.name!r} already; give yours another name")
    if not figure.name.isidentifier():
        raise UserError(f"a figure is named {figure.name!r}, but a name is letters, digits and _, as in ece_top1")
    if figure.interval and not isinstance(figure.take, Rows):
        raise UserError(f"{figure.name} cannot have an interval: only means over rows or clients have one")
    _KNOWN.add(figure.name, figure, module)
    return figure


_Function = TypeVar("_Function", bound=Callable[..., Any])


def figure(*, per: Literal["row", "group"] = "row", name: str = "", **about: Any) -> Callable[[_Function], _Function]:
    """Register a function of `Answers` as a figure; see `Figure` for what can be said `about` it.

    per="row": it returns one number per test row, and the figure is their mean. per="group": it returns one number.
    Either may return None where the figure is not defined.
    """

    def add(function: _Function) -> _Function:
        take = Rows(function) if per == "row" else Whole(function)
        register(Figure(name=name or function.__name__, take=take, **about), function.__module__)
        return function

    return add


def figures() -> Mapping[str, Figure]:
    """Return all figures by name, the package's own first."""
    return _KNOWN.all()


def get(name: str) -> Figure:
    """Return one figure, or say which there are."""
    if name not in figures():
        known = f"choose from {', '.join(figures())}"
        raise UserError("; ".join([f"there is no figure {name!r}", known, *_KNOWN.broken]))
    return figures()[name]


def of_clients() -> list[Figure]:
    """Return the figures that each client has of its own: the columns of clients.csv, and what crosses from a site."""
    return [each for each in figures().values() if each.client]


def headline(*, wide: bool = False) -> list[Figure]:
    """Return the figures that every table shows; `wide` adds those that need room."""
    levels = {"always", "wide"} if wide else {"always"}
    return [each for each in figures().values() if each.headline in levels]


# --- how a number of a result is shown -------------------------------------------------------------------------------


Cell = tuple[float, float | None] | None
"""Mean and half width of the 95 % interval over seeds; None where there is no number."""


class Column(NamedTuple):
    """A figure of a table."""

    title: str
    path: tuple[str, ...]
    """Where it stands in a result."""
    factor: float = 1.0
    digits: int = 1
    better: int = 0
    """1: higher is better, -1: lower, 0: neither is said."""

    def values(self, results: Iterable[Mapping[str, Any]]) -> list[float]:
        """Return the figure of every result that has it, in its unit.

        >>> Column("accuracy %", ("test", "accuracy"), 100.0).values([{"test": {"accuracy": 0.5}}, {"test": {}}])
        [50.0]
        """
        found = (number(result, *self.path) for result in results)
        return [value * self.factor for value in found if value is not None]

    def cell(self, results: Iterable[Mapping[str, Any]]) -> Cell:
        """Return mean and half width of the 95 % interval over the results that have the figure."""
        known = self.values(results)
        return interval(known) if known else None

    def text(self, value: Cell, missing: str = "-") -> str:
        """Write a cell as "91.2 ± 0.8"."""
        if value is None:
            return missing
        mean, half = value
        return f"{mean:.{self.digits}f}" + ("" if half is None else f" ± {half:.{self.digits}f}")


GAP = Column("gap", ("gap",), 100.0, 2)
SENT = Column("MB sent", TRAFFIC, 1e-6, 2)
SECONDS = Column("seconds", ("seconds",))
EPSILON = Column("epsilon", ("privacy", "epsilon"), 1.0, 2)
"""Of runs that hide single clients alone."""
SPARSITY = Column("sparsity %", ("sparsity", "layer"), 100.0)


def number(value: Any, *path: str) -> float | None:
    """Return a usable number inside nested mappings, None where there is none; bytes, total is both directions.

    >>> number({"test": {"accuracy": 0.5, "nll": None}}, "test", "accuracy"), number({"test": 3}, "test", "nll")
    (0.5, None)
    """
    if path == TRAFFIC:
        down, up = number(value, "bytes", "down"), number(value, "bytes", "up")
        return None if down is None or up is None else down + up
    for key in path:
        value = value.get(key) if isinstance(value, Mapping) else None
    usable = isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < LARGEST
    return float(value) if usable else None


# --- the figures that come with the package --------------------------------------------------------------------------

_RIGHT = Rows(lambda answers: answers.right, in_batches=True)
_SURPRISE = 28.0
"""Nats: a probability counts as 1e-12 at least (`scores.SMALLEST`), which is 27.6; no entropy comes near it."""
_SHARE: dict[str, Any] = {"unit": "%", "digits": 1, "high": 1.0}


def _add(name: str, take: Take, help: str, **about: Any) -> None:
    register(Figure(name=name, take=take, help=help, **about), __name__)


def _add_accuracy(name: str, pool: Pooling, help: str, **about: Any) -> None:
    _add(name, _RIGHT, help, pool=pool, better="higher", **_SHARE, **about)


def _add_calibration(diagram: str, help: str, **about: Any) -> None:
    _add(f"ece_{diagram}", Binned(diagram, expected_error), help, better="lower", **_SHARE, **about)


def _add_auroc(
    name: str, doubt: str, positive: Callable[[Answers], np.ndarray | None], help: str, **about: Any
) -> None:
    def area(answers: Answers) -> float | None:
        score, what = getattr(answers, doubt), positive(answers)
        return None if score is None or what is None else auroc(score, what)

    _add(name, Whole(area), help, more="0.5 is chance", better="higher", high=1.0, **about)


def _wrong(answers: Answers) -> np.ndarray:
    return ~answers.right


def _unknown(answers: Answers) -> np.ndarray | None:
    return answers.unknown


def _passing(answers: Answers) -> float | None:
    return None if answers.unknown is None else fpr95(answers.entropy, answers.unknown)


_add_accuracy(
    "accuracy", weighted("train_size"), "mean over clients, weighted by their training data",
    more="the paper's headline number", client=True, always=True, interval=True, headline="always",
)  # fmt: skip
_add_accuracy("accuracy_pooled", ROWS, "accuracy, every test row counting alike", interval=True)
_add_accuracy("accuracy_uniform", weighted("clients"), "accuracy, every client counting alike", interval=True)
_add_accuracy(
    "worst_client", LOWEST, "accuracy of the client served worst", title="worst client", headline="wide"
)  # fmt: skip
_add_accuracy("percentile_10", percentile(10), "accuracy that a tenth of the clients stay below")
_add(
    "nll", Rows(lambda answers: answers.surprise), "surprise at the true labels", title="NLL", unit="nats",
    more="negative log-likelihood", better="lower", high=_SURPRISE, client=True, always=True, interval=True,
    headline="always",
)  # fmt: skip
_add(
    "brier", Rows(lambda answers: answers.squared_error), "squared distance of the probabilities from the truth",
    more="0 to 2", title="Brier score", better="lower", high=2.0 + 1e-6, client=True, always=True, interval=True,
)  # fmt: skip
_add_calibration(
    "top1", "how far confidence is from accuracy (ECE)", more="of the predicted class, 15 bins: the usual one",
    title="ECE", label="calibration error", client=True, headline="always",
)  # fmt: skip
_add_calibration("mass", "calibration error in 15 bins of equal counts")
_add_calibration("classwise", "calibration error class by class, one versus the rest")
_add_calibration(
    "flat", "the paper's: all class probabilities, one versus the rest, 10 bins",
    more="about 2/classes of the usual one, so the two must not be compared",
)  # fmt: skip
for _diagram in ("top1", "mass", "classwise", "flat"):
    _worst = f"largest error of one bin, see `ece_{_diagram}`"
    _add(f"mce_{_diagram}", Binned(_diagram, maximum_error), _worst, better="lower", **_SHARE)
_add(
    "entropy", Rows(lambda answers: answers.entropy), "how unsure answers are", unit="nats", high=_SURPRISE,
    client=True, always=True,
)  # fmt: skip
_add(
    "mutual_information", Rows(lambda answers: answers.information), "part of the entropy: doubt about the weights",
    more="of methods that draw", unit="nats", title="mutual information", high=_SURPRISE, client=True,
)  # fmt: skip
_add_auroc(
    "auroc_wrong", "entropy", _wrong, "how well entropy tells wrong from right answers", title="AUROC, wrong",
    client=True,
)  # fmt: skip
_add_auroc(
    "auroc_unknown", "entropy", _unknown, "how well it tells rows of a class that the client never trained on",
    title="AUROC, unknown", client=True,
)  # fmt: skip
_add(
    "fpr95_unknown", Whole(_passing), "share of rows of such classes that pass as known where 95 % of the known do",
    title="FPR95, unknown", better="lower", **_SHARE,
)  # fmt: skip
_add_auroc("auroc_wrong_information", "information", _wrong, "`auroc_wrong` of the mutual information")
_add_auroc("auroc_unknown_information", "information", _unknown, "`auroc_unknown` of the mutual information")
_add("unknown_share", Rows(_unknown), "share of test rows of a class that the client never trained on", **_SHARE)

OWN = tuple(_KNOWN.values())
"""The figures that come with the package; the documentation is about these."""
