"""What is trained: a run's description and what its rows look like, made into a network and a method's slots.

The only place that builds an algorithm. The simulator, a federation's server, its clients and a personalised model all
ask here, so that they cannot differ. A caller that never updates a server asks for the client's part, which needs none
of the server's own rows.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor, nn

from .. import methods
from ..core.privacy import Normal
from ..core.server import limited
from ..core.types import Algorithm, Model
from ..data.source import Source
from ..models import model_for

_BUILDING = threading.Lock()
"""Held while a network is built, whoever builds it."""


@dataclass(frozen=True)
class Task:
    """A description, made into functions."""

    takes: Source
    """What rows look like; those in it are not read."""
    model: Model
    algorithm: Algorithm

    @property
    def num_weights(self) -> int:
        """How many weights the network's layers have."""
        return sum(math.prod(shape) for shape in self.model.layers.values())


def task(
    spec: Any,
    takes: Source,
    module: nn.Module | Model | None = None,
    *,
    server_rows: Callable[[Tensor], Tensor] | None = None,
    normal: Normal | None = None,
) -> Task:
    """Build the task of whoever holds the server's state.

    Args:
        spec: the run's description, complete: an `Experiment` of `runs.settings`.
        takes: what rows look like.
        module: a network of the user's own, or what `network` made; by default the one that the description names.
        server_rows: (key) -> (D, ...) unlabelled rows of the server, for methods that distil on them.
        normal: what noise that hides clients is drawn by; by default the run's key.
    """
    model = network(spec, takes, module)
    setting = methods.Setting(
        int(spec.clients), takes.num_classes, spec.rounds, server_rows=server_rows, aggregate=spec.aggregate,
        cohort=int(spec.cohort), normal=normal,
    )  # fmt: skip
    algorithm = methods.algorithm(spec.method, model, setting, spec.options)
    if spec.max_share and algorithm.privacy is None:  # hidden clients count alike
        algorithm = replace(algorithm, server=limited(algorithm.server, spec.max_share))
    return Task(takes, model, algorithm)


def client_task(
    spec: Any, takes: Source, module: nn.Module | Model | None = None, *, normal: Normal | None = None
) -> Task:
    """Build the task of a client, or of a model in use: everything but the server's update works."""
    return task(spec, takes, module, server_rows=_elsewhere, normal=normal)


def _elsewhere(key: Tensor) -> Tensor:  # noqa: ARG001
    raise AssertionError("the server's rows are where the server is, and nobody else updates it")


def notes(spec: Any, algorithm: Algorithm) -> list[str]:
    """Return what a person should know of a method before the first round."""
    private = () if algorithm.privacy is None else algorithm.privacy.told()
    return [*methods.notes(spec.method, spec.options, spec.rounds), *private]


def network(spec: Any, takes: Source, module: nn.Module | Model | None = None) -> Model:
    """Return the network of a description, one that several threads may run at once.

    A user's own `Model` is taken as it is, and there is only one of it.
    """
    if isinstance(module, Model):
        return model_for(spec, takes, module)
    return reentrant(lambda: model_for(spec, takes, module))


def reentrant(build: Callable[[], Model]) -> Model:
    """Return a model that several threads may run at once.

    A call of a module with given weights puts them into the module and takes them out again, so two calls must not
    share one. Every call borrows a model that nobody else uses; there are as many as were ever in use together. They
    are built one at a time: that a module draws random numbers is seen by torch's generator, which all threads share.
    """

    def built() -> Model:
        with _BUILDING:
            return build()

    first = built()
    idle = [first]

    def borrow(call: Callable[[Model], Tensor]) -> Tensor:
        try:
            own = idle.pop()
        except IndexError:
            own = built()
        try:
            return call(own)
        finally:
            idle.append(own)

    return first._replace(
        apply=lambda params, x, keys: borrow(lambda own: own.apply(params, x, keys)),
        features=lambda params, x: borrow(lambda own: own.features(params, x)),
        run=lambda params, x, extras, draws: borrow(lambda own: own.run(params, x, extras, draws)),
    )
