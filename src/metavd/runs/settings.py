"""What is to be run: a frozen, hashable, complete description, and its TOML form."""

from __future__ import annotations

import hashlib
import json
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any, Literal

from .. import core, methods, models
from ..errors import SpecError
from ..schema import Option, meant, option, options


def _test_rows() -> Sequence[str]:
    from ..data.partition import TEST_ROWS  # noqa: PLC0415 (NumPy)

    return TEST_ROWS


def _valid_rows() -> Sequence[str]:
    from ..data.partition import VALID_ROWS  # noqa: PLC0415 (NumPy)

    return ("", *VALID_ROWS)


def _precisions() -> Sequence[str]:
    from ..ops.precision import PRECISIONS  # noqa: PLC0415

    return ("auto", *PRECISIONS)


def _rule(text: str) -> str:
    return core.rules.check(text)  # imports torch only now


def _attack(text: str) -> str:
    from ..engine import attacks  # noqa: PLC0415 (torch)

    return attacks.check(text)


_MANY = 10**7
_FAILING = "it makes simulated clients fail; real ones do so by themselves"
_ONE_CLIENT = "a site trains one client; leave it out"
_SITES_TEST = "every site tests its own model; leave it out"


@dataclass(frozen=True)
class Experiment:
    """One run. Fields that are empty, 0 or -1 here take the dataset's default, see `resolve`."""

    method: str = option(
        "reptile+metavd", "base[+regulariser][+option]; metavd methods lists all", canonical=methods.check,
        also=("algorithm", "strategy"),
    )  # fmt: skip
    data: str = option("digits", "dataset, or several joined by +; metavd datasets lists all", also=("dataset",))
    root: str = option(
        "data", "folder that holds the files of datasets and, in .cache, fast copies of them", runtime=True,
        also=("data_dir", "data_path", "data_root"),
    )  # fmt: skip
    partition: str = option(
        "", "who gets which rows: dirichlet:ALPHA, iid, shards:K, quantity:SIGMA, natural", from_data="dirichlet:0.5"
    )
    test_rows: str = option(
        "", "how test rows are dealt: independent (the paper's), consistent, uniform", choices=_test_rows,
        from_data="independent",
    )  # fmt: skip
    domains: Literal["mixed", "separate"] = option(
        "mixed", "of several datasets, every client holds some of each (mixed) or one of them (separate)",
        foreign="several datasets at once are for the simulator; leave it out",
    )  # fmt: skip
    image_size: int = option(
        0, "side that images are brought to; 0: as stored, the largest of several datasets", low=0, high=4096
    )
    channels: int = option(
        0, "3 turns grey images into colour ones; 0: as stored, the most of several datasets", low=0, high=4
    )
    clients: int = option(
        0, "participating clients", low=1, high=_MANY, from_data=20, also=("n_clients", "num_clients", "total_clients")
    )
    unseen: int | float | str = option(
        -1, "clients that are never trained with: how many, their share of all clients, or their names", low=0,
        high=_MANY, share=True, names=True, from_data=5,
    )  # fmt: skip
    cohort: int | float = option(
        0, "clients asked in a round, or their share of the participating ones", low=1, high=_MANY, share=True,
        from_data=5, also=("clients_per_round", "client_fraction", "fraction_fit", "join_ratio", "participation"),
    )  # fmt: skip
    available: str = option(
        "1", "probability that a client can be asked in a round; LOW..HIGH: each has its own; or a list",
        foreign=_FAILING,
    )  # fmt: skip
    lost: str = option(
        "0", "probability that the answer of an asked client does not arrive; likewise", foreign=_FAILING
    )
    aggregate: str = option(
        "mean", "how answers become one: median, trimmed:SHARE, krum:LIARS, ...; metavd aggregations lists all",
        canonical=_rule, later=True,
    )  # fmt: skip
    max_share: float = option(
        0.0, "most that a client weighs in a round, times the median client; 0: no bound", low=0, later=True
    )
    attack: str = option(
        "none", "how a share of clients lies: sign-flip:SHARE, scale:SHARE:FACTOR, noise:SHARE:STD, label-flip:SHARE",
        canonical=_attack, later=True, foreign="it makes simulated clients lie; real ones do so by themselves",
    )  # fmt: skip
    rounds: int = option(
        0, "communication rounds", low=1, high=_MANY, from_data=100,
        also=("n_rounds", "num_rounds", "num_server_rounds", "global_rounds", "global_epochs", "communication_rounds"),
    )  # fmt: skip
    seed: int = option(
        0, "seed of everything random", low=0, high=2**32 - 1, also=("random_seed", "random_state", "manual_seed")
    )
    valid: float = option(0.0, "share of the training rows kept for validation", low=0, high=0.9)
    valid_rows: str = option(
        "", "how those are dealt: own (of a client's own rows), independent, consistent, uniform; empty: as test_rows",
        choices=_valid_rows, later=True,
    )  # fmt: skip
    valid_clients: int = option(
        0, "clients that are only ever validated on, for choices about unseen ones", low=0, high=_MANY, later=True
    )
    patience: int = option(
        0, "evaluations without a better validation NLL before training stops; 0: never; the best state is used",
        low=0, high=10**6, foreign="no validation rows are watched here; leave it out",
    )  # fmt: skip
    test_share: float = option(
        0.2, "share of rows for testing where the dataset has no split of its own", low=0, high=0.9
    )
    model: str = option(
        "auto",
        "network: auto, cnn, small-cnn, mlp, lenet, resnet8, resnet18, lstm, transformer, or an installed package's",
        canonical=models.check, from_data="auto", also=("network", "net", "architecture"),
    )  # fmt: skip
    width: int = option(
        0, "width of the network; 0: the model's own default, the same for every method", low=0, high=4096
    )
    weights: str = option(
        "", "safetensors file with the network's first weights; its content is what counts", runtime=True,
        foreign="a federation starts from the network's own first weights; leave it out",
    )  # fmt: skip
    eval_every: int = option(
        0, "rounds between evaluations; 0: a tenth of all, at least 5", low=1, high=_MANY, runtime=True
    )
    eval_clients: int = option(
        0, "clients of each group that evaluations before the last one test, drawn by the seed; 0: all", low=0,
        high=_MANY, runtime=True, later=True, foreign=_SITES_TEST,
    )  # fmt: skip
    final_clients: int = option(
        0, "the same of the last evaluation, which makes the result; 0: all, whatever eval_clients is", low=0,
        high=_MANY, later=True, foreign=_SITES_TEST,
    )  # fmt: skip
    checkpoint_every: int = option(
        0, "rounds between checkpoints; 0: a tenth of all, at most 50", low=1, high=_MANY, runtime=True,
        foreign="every round is saved; leave it out",
    )  # fmt: skip
    backend: str = option(
        "auto", "loop, threads (a client per core), vmap or auto: vmap on a GPU and for small networks, else threads",
        choices=("auto", "loop", "threads", "vmap"), runtime=True, foreign=_ONE_CLIENT,
    )  # fmt: skip
    chunk: int = option(
        0, "clients at once under vmap; 0: as many as the memory holds", low=0, high=10**6, runtime=True,
        foreign=_ONE_CLIENT,
    )  # fmt: skip
    part: int = option(
        512, "clients whose answers are in memory at once; a larger cohort's are added up in parts; 0: all at once",
        low=0, high=_MANY, runtime=True, later=True, foreign="its server holds all answers of a round; leave it out",
    )  # fmt: skip
    rank_wait: float = option(
        600.0, "seconds that a process of several (torchrun) waits for the others before the run ends", low=1,
        high=10**6, runtime=True, later=True, foreign="it is for one run over several processes; leave it out",
    )  # fmt: skip
    device: str = option(
        "auto", "auto, cpu or cuda", runtime=True, foreign="every site chooses its own in its node config"
    )
    precision: str = option(
        "auto", "of products on a GPU: exact (float32, same bits every time), tf32, bf16, or auto: bf16",
        choices=_precisions, runtime=True,
    )  # fmt: skip
    dtype: Literal["float32", "float64"] = option("float32", "float32 or float64")
    content: str = option("", "fingerprint of the data and of your own network; set by run")
    weights_content: str = option("", "fingerprint of the weights' file; set by run", later=True)
    options: Mapping[str, Any] = field(default_factory=dict)


SETTINGS: Mapping[str, Option] = options(Experiment)
"""Every setting of a run by name; the method's options are its own."""
RUNTIME = frozenset(name for name, setting in SETTINGS.items() if setting.runtime)
"""Fields that decide how a run is carried out, not what it computes."""
FROM_DATA = frozenset(name for name, setting in SETTINGS.items() if setting.from_data is not None)
"""Settings whose default is the dataset's."""


def with_data(settings: Mapping[str, Any], data: str, others: Sequence[str] = ()) -> dict[str, Any]:
    """Return the settings with options of the dataset in its text: data=table:F label=y is data=table:F,label=y.

    `data` is the dataset where the settings name none; `others` are settings that are no dataset's.
    """
    unknown = [key for key in settings if key not in SETTINGS and key not in others]
    if not unknown:
        return dict(settings)
    from ..data import collection, formats  # noqa: PLC0415 (NumPy)
    from ..data.source import SourceError  # noqa: PLC0415

    text = str(settings.get("data", data))
    try:
        parts = collection.parse(text)
    except SourceError:  # data handed over in Python; or a wrong name, which is found when it is read
        return dict(settings)
    known = formats.info(parts[0].name).options if len(parts) == 1 else {}
    own = {key: settings[key] for key in unknown if key in known}
    for key, value in own.items():
        if key in parts[0].options and parts[0].options[key] != known[key].parse(str(value)):
            raise SpecError(f"{key} is {value!r}, but {text!r} says {parts[0].options[key]!r} already; say it once")
        if key not in parts[0].options:
            text += ("," if parts[0].path or ":" in text else ":") + f"{key}={value}"
    rest = {key: value for key, value in settings.items() if key not in own}
    return rest | {"data": text} if own else rest


def with_settings(experiment: Experiment, settings: Mapping[str, Any]) -> Experiment:
    """Return the experiment with fields and options set by name, checked one by one."""
    method = methods.check(str(settings.get("method", experiment.method)))
    settings = with_data(settings, experiment.data, list(methods.options_of(method)))
    changes = {key: SETTINGS[key].check(value) for key, value in settings.items() if key in SETTINGS}
    method = str(changes.get("method", experiment.method))
    known = methods.options_of(method)
    chosen = dict(experiment.options)
    for key, value in settings.items():
        if key in SETTINGS:
            continue
        if key not in known:
            raise SpecError(f"there is no setting {key!r} for {method}; {meant(key, {**SETTINGS, **known})}")
        chosen[key] = known[key].check(value)
    return replace(experiment, **changes, options=chosen)  # type: ignore[arg-type]


def resolve(experiment: Experiment, defaults: Mapping[str, Any] | None = None) -> Experiment:
    """Fill in everything that was left open, and check it all; the result is enough to repeat the run.

    `defaults` are the settings that suit the data, see `data.collection`; by default those known for its name.
    """
    import torch  # noqa: PLC0415

    from ..data import formats  # noqa: PLC0415
    from ..ops.precision import BF16, EXACT  # noqa: PLC0415

    suits = dict(formats.info(experiment.data).defaults if defaults is None else defaults)
    known = methods.options_of(experiment.method)
    values = content(experiment)
    for name in FROM_DATA:
        if values[name] == SETTINGS[name].default:
            values[name] = suits.get(name, SETTINGS[name].from_data)
    clients, unseen, cohort = values["clients"], values["unseen"], values["cohort"]
    if not isinstance(unseen, str) and 0 < unseen < 1:
        values["unseen"] = round(unseen / (1 - unseen) * clients)
    if 0 < cohort < 1:
        values["cohort"] = max(1, round(cohort * clients))
    if not experiment.cohort:
        values["cohort"] = min(cohort, clients)
    values["eval_every"] = values["eval_every"] or max(5, values["rounds"] // 10)
    values["checkpoint_every"] = values["checkpoint_every"] or max(1, min(50, values["rounds"] // 10))
    if values["device"] == "auto":
        values["device"] = "cuda" if torch.cuda.is_available() else "cpu"
    if values["backend"] == "auto" and values["device"] != "cpu":  # on a CPU the network decides, see `schedule.choice`
        values["backend"] = "vmap"
    if values["precision"] == "auto":
        short = values["device"] != "cpu" and values["dtype"] == "float32"
        values["precision"] = BF16 if short else EXACT
    if values["valid"] and not values["valid_rows"]:
        values["valid_rows"] = "own" if values["partition"] == "natural" else values["test_rows"]
    preset = {key: value for key, value in suits.items() if key in known and key not in FROM_DATA}
    checked = {name: setting.check(values[name]) for name, setting in SETTINGS.items()}
    chosen = methods.resolve(experiment.method, preset | dict(experiment.options))
    if chosen.get("prior_answer") == "auto":
        dealt_alike = values["partition"] == "natural" or values["test_rows"] == "consistent"
        chosen["prior_answer"] = "with" if dealt_alike else "without"
    result = Experiment(**checked, options=chosen)  # type: ignore[arg-type]
    _check(result)
    return result


def _check(e: Experiment) -> None:
    import torch  # noqa: PLC0415

    from ..data import partition  # noqa: PLC0415
    from ..data.cohort import probabilities  # noqa: PLC0415
    from ..engine import attacks  # noqa: PLC0415

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
    core.rules.check_cohort(e.aggregate, int(e.cohort))
    attack = attacks.parse(e.attack)
    if attack is not None and not round(attack.share * e.clients):
        raise SpecError(f"attack is {e.attack!r}, but that is none of {e.clients} clients; raise the share")
    for name in ("available", "lost"):
        probabilities(getattr(e, name), e.clients, core.rng.key(0), name)


def content(experiment: Experiment) -> dict[str, Any]:
    """Return the description as plain values, fields first, options last."""
    values = {f.name: getattr(experiment, f.name) for f in fields(Experiment)}
    return values | {"options": dict(experiment.options)}


def spec_hash(experiment: Experiment) -> str:
    """Return 12 hex digits that name what is computed, whatever it is computed on and however often it is looked at."""
    # The only run that looks at what it sees on the way.
    when = {"eval_every", "eval_clients"} if experiment.patience else set()
    what = _told({key: value for key, value in content(experiment).items() if key not in RUNTIME - when}, SETTINGS)
    what["options"] = _told(what["options"], methods.options_of(experiment.method))
    return hashlib.sha256(json.dumps(what, sort_keys=True).encode()).hexdigest()[:12]


def _told(values: Mapping[str, Any], known: Mapping[str, Option]) -> dict[str, Any]:
    """Leave out what came later and is not used, so that a stored run keeps the name that it had before."""
    unused = {name for name, each in known.items() if each.later and values.get(name) == each.default}
    return {name: value for name, value in values.items() if name not in unused}


def to_toml(experiment: Experiment) -> str:
    """Write the description as TOML, which `from_toml` and `metavd run --config` read."""
    values = content(experiment)
    options = values.pop("options")
    lines = [f"{key} = {toml_value(value)}" for key, value in values.items()]
    lines += ["", "[options]", *(f"{key} = {toml_value(value)}" for key, value in options.items())]
    return "\n".join(lines) + "\n"


def toml_value(value: Any) -> str:
    """TOML's form of a number, a truth value or a text; JSON's is the same but for texts' rarest escapes."""
    if isinstance(value, float) and value == int(value) and abs(value) < 1e15:
        return f"{value:.1f}"
    return json.dumps(value, ensure_ascii=False)


def read_toml(path: Path, what: str) -> dict[str, Any]:
    """Read a TOML file, or say in one sentence why it cannot be."""
    try:
        return tomllib.loads(path.read_text())
    except OSError as error:
        raise SpecError(f"cannot read {what} {path}: {error.strerror}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise SpecError(f"{what} {path} is not TOML: {error}") from None


def from_toml(path: Path) -> dict[str, Any]:
    """Read settings from a TOML file: fields at the top, options in [options] or at the top."""
    values = read_toml(path, "the configuration")
    options = values.pop("options", {})
    if not values and not options:
        raise SpecError(f"the configuration {path} holds no settings; write some, or put back your copy of it")
    if not isinstance(options, dict):
        raise SpecError(f"options in {path} is {options!r}, but must be a table [options]")
    for key, value in {**values, **options}.items():
        if isinstance(value, dict | list):
            raise SpecError(f"{key} in {path} is a {type(value).__name__}, but must be a number, a text or true/false")
    return {**values, **options}
