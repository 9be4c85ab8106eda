"""What is to be run: a frozen, hashable, complete description, and its TOML form."""

from __future__ import annotations

import difflib
import hashlib
import json
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any

import torch

from .. import methods
from ..ops import fused
from ..core import rng
from ..data import formats, partition
from ..data.cohort import probabilities

MODELS = ("auto", "cnn", "small-cnn", "mlp")
DOMAINS = ("mixed", "separate")
RUNTIME = frozenset({"root", "device", "precision", "backend", "chunk", "eval_every", "checkpoint_every"})
"""Fields that decide how a run is carried out, not what it computes."""


class SpecError(ValueError):
    """A specification that cannot be run; the text says what would be right."""


@dataclass(frozen=True)
class Experiment:
    """One run. Fields that are empty, 0 or -1 here take the dataset's default, see `resolve`."""

    method: str = "reptile+metavd"
    data: str = "digits"
    root: str = "data"
    partition: str = ""
    test_rows: str = ""
    domains: str = "mixed"
    image_size: int = 0
    channels: int = 0
    clients: int = 0
    unseen: int | float = -1
    cohort: int | float = 0
    available: str = "1"
    lost: str = "0"
    rounds: int = 0
    seed: int = 0
    valid: float = 0.0
    patience: int = 0
    test_share: float = 0.2
    model: str = "auto"
    width: int = 0
    eval_every: int = 0
    checkpoint_every: int = 0
    backend: str = "auto"
    chunk: int = 0
    device: str = "auto"
    precision: str = "auto"
    dtype: str = "float32"
    content: str = ""
    options: Mapping[str, Any] = field(default_factory=dict)


_OPEN = Experiment()

HELP = {
    "method": "base[+regulariser][+option]; metavd methods lists all",
    "data": "dataset, or several joined by +; metavd datasets lists all",
    "root": "folder that holds the files of datasets and, in .cache, fast copies of them",
    "partition": "who gets which rows: dirichlet:ALPHA, iid, shards:K, quantity:SIGMA, natural",
    "test_rows": "how test rows are dealt: independent (the paper's), consistent, uniform",
    "domains": "of several datasets, every client holds some of each (mixed) or one of them (separate)",
    "image_size": "side that images are brought to; 0: as stored, the largest of several datasets",
    "channels": "3 turns grey images into colour ones; 0: as stored, the most of several datasets",
    "clients": "participating clients",
    "unseen": "clients that are never trained with, or their share of all clients",
    "cohort": "clients asked in a round, or their share of the participating ones",
    "available": "probability that a client can be asked in a round; LOW..HIGH: each has its own; or a list",
    "lost": "probability that the answer of an asked client does not arrive; likewise",
    "rounds": "communication rounds",
    "seed": "of everything random",
    "valid": "share of each participating client's training rows kept for validation",
    "patience": "evaluations without a better validation NLL before training stops; 0: never; the best state is used",
    "test_share": "share of rows for testing where the dataset has no split of its own",
    "model": f"network: {', '.join(MODELS)}",
    "width": "width of the network; 0: the model's own default, the same for every method",
    "eval_every": "rounds between evaluations; 0: a tenth of all, at least 5",
    "checkpoint_every": "rounds between checkpoints; 0: a tenth of all, at most 50",
    "backend": "loop, threads (a client a core), vmap or auto: vmap on a GPU and for small networks, else threads",
    "chunk": "clients at once under vmap; 0: as many as the memory holds",
    "device": "auto, cpu or cuda",
    "precision": "of products on a GPU: exact (float32, same bits every time), tf32, bf16, or auto: bf16",
    "dtype": "float32 or float64",
    "content": "fingerprint of the data and of your own network; set by run",
}
_CHOICES = {
    "test_rows": partition.TEST_ROWS,
    "domains": DOMAINS,
    "model": MODELS,
    "backend": ("auto", "loop", "threads", "vmap"),
    "precision": ("auto", *fused.PRECISIONS),
    "dtype": ("float32", "float64"),
}
_RANGES: dict[str, tuple[float, float]] = {
    "clients": (1, 10**7), "unseen": (0, 10**7), "cohort": (1, 10**7), "image_size": (0, 4096), "channels": (0, 4),
    "patience": (0, 10**6), "rounds": (1, 10**7), "seed": (0, 2**32 - 1),
    "valid": (0.0, 0.9), "test_share": (0.0, 0.9), "width": (0, 4096), "eval_every": (1, 10**7),
    "checkpoint_every": (1, 10**7), "chunk": (0, 10**6),
}  # fmt: skip
_GENERIC = {
    "partition": "dirichlet:0.5", "test_rows": "independent", "clients": 20, "unseen": 5, "cohort": 5, "rounds": 100,
    "model": "auto",
}  # fmt: skip


FROM_DATA = frozenset(_GENERIC)
"""Settings whose default is the dataset's."""


def nearest(word: str, known: Sequence[str]) -> str:
    """Say which known words a wrong one may have meant."""
    close = difflib.get_close_matches(word, known, 3, 0.5)
    return f"did you mean {' or '.join(close)}?" if close else f"choose from {', '.join(known)}"


def with_settings(experiment: Experiment, settings: Mapping[str, Any]) -> Experiment:
    """Return the experiment with fields and options set by name, checked one by one."""
    names = {f.name for f in fields(Experiment)} - {"options"}
    changes = {key: _typed(key, value) for key, value in settings.items() if key in names}
    if "method" in changes:
        changes["method"] = methods.check(changes["method"])
    method = changes.get("method", experiment.method)
    known = methods.options_of(method)
    options = dict(experiment.options)
    for key, value in settings.items():
        if key in names:
            continue
        if key not in known:
            everything = sorted(names | set(known))
            raise SpecError(f"there is no setting {key!r} for {method}; {nearest(key, everything)}")
        options[key] = known[key].check(value)
    return replace(experiment, **changes, options=options)


def _typed(name: str, value: Any) -> Any:
    """Return a field's value in its type and range, or say what is wrong with it."""
    kind = {f.name: str(f.type) for f in fields(Experiment)}[name]
    try:
        if kind == "int | float":  # a number, or a share of all
            value = float(value)
            value = int(value) if value == int(value) else value
            if isinstance(value, float) and value > 1:
                raise ValueError
        elif "int" in kind:
            if isinstance(value, bool) or (isinstance(value, float) and value != int(value)):
                raise ValueError
            value = int(value)
        elif "float" in kind:
            value = float(value)
        else:
            value = str(value)
    except (TypeError, ValueError, OverflowError):
        share = " or a share below 1" if kind == "int | float" else ""
        wanted = f"a whole number{share}" if "int" in kind else "a number"
        raise SpecError(f"{name} is {value!r}, but must be {wanted}") from None
    if name in _CHOICES and value not in _CHOICES[name]:
        raise SpecError(f"{name} is {value!r}; {nearest(value, _CHOICES[name])}")
    if name in _RANGES and not (kind == "int | float" and 0 < value < 1):
        low, high = _RANGES[name]
        if not low <= value <= high:
            raise SpecError(f"{name} is {value}, but must lie between {low} and {high}")
    return value


def resolve(experiment: Experiment, defaults: Mapping[str, Any] | None = None) -> Experiment:
    """Fill in everything that was left open, and check it all; the result is enough to repeat the run.

    `defaults` are the settings that suit the data, see `data.collection`; by default those known for its name.
    """
    defaults = _GENERIC | dict(formats.info(experiment.data).defaults if defaults is None else defaults)
    known = methods.options_of(experiment.method)
    values = {f.name: getattr(experiment, f.name) for f in fields(Experiment)}
    values |= {key: defaults[key] for key in _GENERIC if values[key] == getattr(_OPEN, key)}
    clients, unseen, cohort = values["clients"], values["unseen"], values["cohort"]
    if 0 < unseen < 1:
        values["unseen"] = round(unseen / (1 - unseen) * clients)
    if 0 < cohort < 1:
        values["cohort"] = max(1, round(cohort * clients))
    if not experiment.cohort:
        values["cohort"] = min(cohort, clients)
    values["eval_every"] = values["eval_every"] or max(5, values["rounds"] // 10)
    values["checkpoint_every"] = values["checkpoint_every"] or max(1, min(50, values["rounds"] // 10))
    if values["device"] == "auto":
        values["device"] = "cuda" if torch.cuda.is_available() else "cpu"
    if values["backend"] == "auto" and values["device"] != "cpu":  # on a CPU the network decides, see `engine.choice`
        values["backend"] = "vmap"
    if values["precision"] == "auto":
        short = values["device"] != "cpu" and values["dtype"] == "float32"
        values["precision"] = fused.BF16 if short else fused.EXACT
    preset = {key: value for key, value in defaults.items() if key in known and key not in _GENERIC}
    values["options"] = methods.resolve(experiment.method, preset | dict(experiment.options))
    checked = {key: value if key == "options" else _typed(key, value) for key, value in values.items()}
    result = Experiment(**checked)
    _check(result)
    return result


def _check(e: Experiment) -> None:
    if e.cohort > e.clients:
        raise SpecError(f"cohort is {e.cohort}, but only {e.clients} clients participate; it must be at most that")
    try:
        device = torch.device(e.device)
    except RuntimeError:
        raise SpecError(f"device is {e.device!r}, but must be auto, cpu or cuda") from None
    if device.type not in {"cpu", "cuda"}:
        raise SpecError(f"device is {e.device!r}, but must be auto, cpu or cuda")
    if device.type == "cuda" and not torch.cuda.is_available():
        raise SpecError("device is cuda, but torch finds no CUDA GPU here; use --device cpu")
    if e.patience and not e.valid:
        raise SpecError(f"patience is {e.patience}, but there are no validation rows to watch; set valid, such as 0.2")
    partition.parse(e.partition)
    for name in ("available", "lost"):
        probabilities(getattr(e, name), e.clients, rng.key(0), name)


def content(experiment: Experiment) -> dict[str, Any]:
    """Return the description as plain values, fields first, options last."""
    values = {f.name: getattr(experiment, f.name) for f in fields(Experiment)}
    return values | {"options": dict(experiment.options)}


def spec_hash(experiment: Experiment) -> str:
    """Return 12 hex digits that name what is computed, whatever it is computed on and however often it is looked at."""
    when = {"eval_every"} if experiment.patience else set()  # the only run that looks at what it sees on the way
    what = {key: value for key, value in content(experiment).items() if key not in RUNTIME - when}
    return hashlib.sha256(json.dumps(what, sort_keys=True).encode()).hexdigest()[:12]


def to_toml(experiment: Experiment) -> str:
    """Write the description as TOML, which `from_toml` and `metavd run --config` read."""
    values = content(experiment)
    options = values.pop("options")
    lines = [f"{key} = {_scalar(value)}" for key, value in values.items()]
    lines += ["", "[options]", *(f"{key} = {_scalar(value)}" for key, value in options.items())]
    return "\n".join(lines) + "\n"


def _scalar(value: Any) -> str:
    """TOML's form of a number, a truth value or a text; JSON's is the same but for texts' rarest escapes."""
    if isinstance(value, float) and value == int(value) and abs(value) < 1e15:
        return f"{value:.1f}"
    return json.dumps(value, ensure_ascii=False)


def from_toml(path: Path) -> dict[str, Any]:
    """Read settings from a TOML file: fields at the top, options in [options] or at the top."""
    try:
        values = tomllib.loads(path.read_text())
    except OSError as error:
        raise SpecError(f"cannot read the configuration {path}: {error.strerror}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise SpecError(f"the configuration {path} is not TOML: {error}") from None
    options = values.pop("options", {})
    if not isinstance(options, dict):
        raise SpecError(f"options in {path} is {options!r}, but must be a table [options]")
    for key, value in {**values, **options}.items():
        if isinstance(value, dict | list):
            raise SpecError(f"{key} in {path} is a {type(value).__name__}, but must be a number, a text or true/false")
    return {**values, **options}
