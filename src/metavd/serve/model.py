"""A client's own model: it answers rows, and is kept in a folder that needs neither the run nor its data any more.

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

from .. import container
from ..container import Format, write_atomic
from ..core.types import Algorithm, Model, NonFiniteError, Predict
from ..data.source import Source, transform
from ..engine import turn
from ..engine.machine import tuned
from ..engine.task import Task, client_task
from ..errors import UserError
from ..evaluate.uncertainty import entropy
from ..runs.settings import Experiment, from_toml, to_toml, with_settings
from ..runs.setup import channels_last
from ..tree import Params
from .samples import described, domain_number, fit, restored

MODEL = Format("model", 2)
WEIGHTS, CONFIG, ABOUT = "weights.safetensors", "config.toml", "model.json"
OWN_MODULE = "was trained on a network of your own, which no folder holds; use Python and pass it as module="


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
            raise UserError(f"{folder} {OWN_MODULE}")
        found = Personal(params, takes, experiment, about, module)
        check_module(found, str(folder))
        return found


def _sums(contents: Mapping[str, bytes]) -> dict[str, str]:
    return {name: hashlib.sha256(data).hexdigest() for name, data in contents.items()}


def check_module(own: Personal, place: str) -> None:
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
    if own.about["noise"] != noise_of(own.algorithm()):
        raise UserError(f"{place} has another posterior than the module gives it; pass the module as it was trained")


def noise_of(algorithm: Algorithm) -> dict[str, Any] | None:
    """Describe a method's posterior in plain values."""
    return None if algorithm.posterior is None else json.loads(json.dumps(algorithm.posterior.describe()))
