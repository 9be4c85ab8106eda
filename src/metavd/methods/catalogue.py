"""Every method by name: `base[+regulariser][+option]`, and what each part says of itself.

A regulariser or an extra turns `Parts` into `Parts`, a base turns `Parts` into an `Algorithm`; `reptile+metavd+drop` is
reptile(drop(metavd(plain))). What goes with what follows from what the parts give and need.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, TypeVar, cast

from .. import core, schema
from ..errors import SpecError
from ..registry import Registry
from ..schema import Option, Value
from .parts import REGULARISABLE, Options, Parts, Rates, Setting, plain

if TYPE_CHECKING:
    from ..core.types import Algorithm, Model

FAMILIES = (
    "averaging", "meta", "fedbe", "pfedgp", "alone", "fedper", "fedrep", "fedbabu", "ditto", "scaffold", "pfedme",
    "fedala", "feddbe", "pfedfda", "pfedvem", "lrbpfl",
    "variational", "dropout", "snip", "finetune", "prior", "dp",
)  # fmt: skip
"""Our own modules with methods, in the order in which methods are listed."""
REGISTRY: Registry[Entry] = Registry("metavd.methods", [f"{__package__}.{family}" for family in FAMILIES])
VARIANTS = ("default", "paper", "released")
VARIANT = Option(
    "variant", "default",
    "preset of all options: ours, ours with the values that the paper and its code state, or the released code's rules",
    choices=VARIANTS,
)  # fmt: skip

Kind = Literal["base", "regulariser", "extra"]
O = TypeVar("O", bound=Options)  # noqa: E741
B = TypeVar("B", bound=Rates)
C = TypeVar("C", bound=Callable[..., Any])


@dataclass(frozen=True)
class Entry:
    """A part of a name: how it is built, its line of description, its paper, its options, and what it goes with."""

    name: str
    kind: Kind
    text: str
    paper: str
    schema: type[Options]
    build: Callable[[Parts, Any], Any]
    gives: tuple[str, ...] = ()
    """What later parts may need of it."""
    needs: str = ""
    """What some part before it must give."""
    because: str = ""
    """What it does with that, for a person who gave it to a method without."""
    listed: tuple[str, ...] | None = None
    """Of an extra: bases and regularisers after which it is listed by name. Of a base: regularisers with which it is,
    all of them where it is None. What is not listed is possible all the same."""
    newcomer: str = ""
    """Of a base: what a client gets that never took part."""
    tuned_as: tuple[str, ...] | None = None
    """Parts in whose place it stands where nothing was tuned with it; None: none does, it is a method of its own."""

    @property
    def options(self) -> Mapping[str, Option]:
        """Its options by name."""
        return schema.options(cast(Hashable, self.schema))

    @property
    def sign(self) -> str:
        """Its name as it stands in a method's."""
        return self.name if self.kind == "base" else f"+{self.name}"


def _registered(name: str, kind: Kind, text: str, paper: str, options: type[Options], **more: Any) -> Callable[[C], C]:
    """Return the decorator that makes a part known."""

    def register(build: C) -> C:
        entry = Entry(name, kind, text, paper, options, build, **more)
        for each in entry.options.values():
            for preset in each.presets:
                if preset not in VARIANTS:
                    raise SpecError(f"option {each.name} of {name} has the preset {preset!r}, but there are {VARIANTS}")
        REGISTRY.add(name, entry, build.__module__)
        return build

    return register


Base = Callable[[Parts, B], "Algorithm"]
Part = Callable[[Parts, O], Parts]


def base(
    name: str,
    text: str,
    *,
    paper: str,
    options: type[B],
    gives: Sequence[str] = (),
    listed: Sequence[str] | None = None,
    newcomer: str = "does as the others with what it receives",
) -> Callable[[Base[B]], Base[B]]:
    """Register a base: what turns `Parts` into an `Algorithm`; it is `listed` with these regularisers, or all."""
    shown = None if listed is None else tuple(listed)
    return _registered(name, "base", text, paper, options, gives=tuple(gives), listed=shown, newcomer=newcomer)


def regulariser(
    name: str,
    text: str,
    *,
    paper: str,
    options: type[O],
    gives: Sequence[str] = (),
    tuned_as: tuple[str, ...] | None = None,
) -> Callable[[Part[O]], Part[O]]:
    """Register a regulariser, of which a method has at most one; see `Entry` for `tuned_as`."""
    because = "changes the loss of local training"
    return _registered(
        name, "regulariser", text, paper, options, gives=tuple(gives), needs=REGULARISABLE, because=because,
        tuned_as=tuned_as,
    )  # fmt: skip


def extra(
    name: str,
    text: str,
    *,
    paper: str,
    options: type[O],
    needs: str,
    because: str,
    listed: Sequence[str] = (),
) -> Callable[[Part[O]], Part[O]]:
    """Register what can be added to a method, regularised or not, and leaves it the method that was tuned."""
    return _registered(
        name, "extra", text, paper, options, needs=needs, because=because, listed=tuple(listed), tuned_as=()
    )


# --- names -----------------------------------------------------------------------------------------------------------


def entries(kind: Kind | None = None) -> dict[str, Entry]:
    """Return all parts of methods by name, or those of one kind."""
    return {name: entry for name, entry in REGISTRY.all().items() if kind in {None, entry.kind}}


def names() -> tuple[str, ...]:
    """Return every method that is listed, run and tested by name."""
    bases, regularisers, extras = (entries(kind).values() for kind in ("base", "regulariser", "extra"))
    found = [[each] for each in bases]
    found += [[one, last] for last in extras for one in bases if one.name in (last.listed or ())]
    found += [[one, two] for two in regularisers for one in bases if one.listed is None or two.name in one.listed]
    found += [
        [one, two, last]
        for last in extras
        for two in regularisers
        if two.name in (last.listed or ())
        for one in bases
        if one.listed is None
    ]
    return tuple("+".join(each.name for each in parts) for parts in found if _misfit(parts) is None)


def _misfit(parts: Sequence[Entry]) -> Entry | None:
    """Return the first part that needs what none before it gives."""
    given: set[str] = set()
    for part in parts:
        if part.needs and part.needs not in given:
            return part
        given.update(part.gives)
    return None


def parse(name: str) -> list[Entry]:
    """Split a method's name into its parts, or say in one sentence why there is no such method."""
    first, *rest = name.lower().split("+")
    if first not in REGISTRY or REGISTRY.own()[first].kind != "base":
        raise SpecError(f"unknown method {name!r}; {_nearest(name, names())}")
    for part in rest:
        if part not in REGISTRY or REGISTRY.own()[part].kind == "base":
            others = [each for each, entry in entries().items() if entry.kind != "base"]
            raise SpecError(f"unknown part {part!r} of method {name!r}; {_nearest(part, others)}")
    known = REGISTRY.own()
    chosen = [part for part in rest if known[part].kind == "regulariser"]
    if len(chosen) > 1:
        raise SpecError(f"method {name!r} has the regularisers {' and '.join(chosen)}, but one at most is possible")
    if len(set(rest)) < len(rest):
        raise SpecError(f"method {name!r} names a part twice; each may stand once")
    extras = (part for part, entry in known.items() if entry.kind == "extra" and part in rest)
    parts = [known[part] for part in (first, *chosen, *extras)]
    wrong = _misfit(parts)
    if wrong is not None:
        where = ", ".join(entry.sign for entry in known.values() if wrong.needs in entry.gives)
        example = next((each for each in names() if wrong.name in each.split("+")), "")
        raise SpecError(
            f"method {name!r} is not possible: {wrong.sign} {wrong.because}; it goes with {where}"
            + (f", for example {example}" if example else "")
        )
    return parts


def _nearest(word: str, known: Sequence[str]) -> str:
    return "; ".join([schema.nearest(word, known, "metavd methods lists all"), *REGISTRY.broken])


def check(name: str) -> str:
    """Return the method's name in its canonical spelling, or raise."""
    return "+".join(part.name for part in parse(name))


# --- options ---------------------------------------------------------------------------------------------------------


def options_of(name: str) -> dict[str, Option]:
    """Return the options of a method by name, a part's own overriding those of what it extends."""
    found: dict[str, Option] = {}
    for part in parse(name):
        found |= part.options
    return found | {VARIANT.name: VARIANT}


def resolve(name: str, given: Mapping[str, Any] | None = None) -> dict[str, Value]:
    """Return every option's value: the defaults, over them the variant's, over them what was given."""
    known, given = options_of(name), dict(given or {})
    for key in given:
        if key not in known:
            raise SpecError(f"method {name!r} has no option {key!r}; {schema.meant(key, known)}")
    variant = str(VARIANT.check(given.get(VARIANT.name, VARIANT.default)))
    values = {key: option.presets.get(variant, option.default) for key, option in known.items()}
    return values | {key: known[key].check(value) for key, value in given.items()}


def _filled(name: str, given: Mapping[str, Any] | None) -> list[tuple[Entry, Options]]:
    """Return a method's parts, each with its options.

    Where two parts have an option of one name, its value is the later part's, and the earlier keeps its preset.
    """
    values, parts = resolve(name, given), parse(name)
    owner = {key: part for part in parts for key in part.options}

    def value(part: Entry, key: str) -> Value:
        own = part.options[key]
        return values[key] if owner[key] is part else own.presets.get(str(values[VARIANT.name]), own.default)

    return [
        (part, part.schema(**{each.name: value(part, each.name) for each in fields(part.schema)})) for part in parts
    ]


class Traits(NamedTuple):
    """What a method means for the world around it: those properties of `Options`, of all its parts together."""

    server_rows_share: float | None
    admits_by_fitting: bool
    drops_from: int | None
    moves_all_rows: bool


def traits(name: str, options: Mapping[str, Any] | None = None) -> Traits:
    """Return what a method with these options means for the world around it."""
    told = [o for _, o in _filled(name, options)]
    return Traits(
        server_rows_share=max((o.server_rows_share for o in told if o.server_rows_share is not None), default=None),
        admits_by_fitting=any(o.admits_by_fitting for o in told),
        drops_from=min((o.drops_from for o in told if o.drops_from is not None), default=None),
        moves_all_rows=any(o.moves_all_rows for o in told),
    )


def notes(name: str, options: Mapping[str, Any] | None, rounds: int) -> list[str]:
    """Return what a person should know before a run of so many rounds."""
    return [text for _, o in _filled(name, options) for text in o.notes(rounds)]


# --- building --------------------------------------------------------------------------------------------------------


def algorithm(name: str, model: Model, setting: Setting, options: Mapping[str, Any] | None = None) -> Algorithm:
    """Build a method for a model and a federation."""
    (first, told), *rest = _filled(name, options)
    assert isinstance(told, Rates)
    parts = plain(model, setting, told)
    for part, o in rest:
        parts = part.build(parts, o)
    rule = core.rules.parse(setting.aggregate)
    if rule is None:
        built: Algorithm = first.build(parts, told)
        return parts.finish(built)
    why = next((o.only_mean for _, o in [(first, told), *rest] if o.only_mean), "")
    if not why and parts.aggregate is not core.aggregate.mean and parts.posterior is None:
        why = f"{name} has an aggregation of its own"
    if why:
        raise SpecError(f"aggregate is {setting.aggregate!r}, but {why}; leave it at mean")
    # Answers reach the server as the rule's consensus, votes by precision counted already.
    built = first.build(replace(parts, aggregate=core.aggregate.mean), told)
    posterior = parts.posterior if parts.votes_by_precision else None
    server = core.server.guarded(built.server, rule, posterior, by_size=not told.weighs_alike)
    return parts.finish(replace(built, server=server))


def describe(name: str) -> dict[str, Any]:
    """Return a method's line of description, its paper and its options, as plain values."""
    parts = parse(name)
    return {
        "name": name,
        "text": "; ".join(part.text for part in parts),
        "paper": "; ".join(dict.fromkeys(part.paper for part in parts)),
        "newcomer": parts[0].newcomer,
        "options": [_described(option) for option in options_of(name).values()],
    }


def _described(option: Option) -> dict[str, Any]:
    about = {
        "name": option.name, "default": option.default, "help": option.help, "low": option.low, "high": option.high,
        "choices": option.allowed, "search": option.search, "offered": option.offered,
        "presets": dict(option.presets) or None,
    }  # fmt: skip
    return {key: value for key, value in about.items() if value is not None}
