"""What methods are made of, before any of it is built: the federation, a method in the making, options that all share.

Nothing here imports torch, so that methods can be listed at once.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from .. import core
from ..errors import SpecError
from ..schema import option

if TYPE_CHECKING:
    from torch import Tensor

    from ..core.optim import Sgd
    from ..core.posterior import Posterior
    from ..core.types import (
        Admit,
        Aggregate,
        Algorithm,
        Batch,
        Emit,
        Local,
        Model,
        Objective,
        Predict,
        Sampling,
        Server,
    )
    from ..tree import Params

REGULARISABLE = "regularisable"
"""Of a base: a regulariser may change its training loss, its messages and its aggregation."""
POSTERIOR = "posterior"
"""Of a regulariser: weights have dropout rates."""
TUNABLE = "tunable"
"""Of a base: it takes no adaptation step before use, and may be given one."""


@dataclass(frozen=True)
class Options:
    """What one part of a method is told. The properties say what that means for the world around the method."""

    @property
    def server_rows_share(self) -> float | None:
        """Share of every client's rows that the server gets, unlabelled; None: it needs no rows of its own."""
        return None

    @property
    def admits_by_fitting(self) -> bool:
        """Whether a client that was never seen must receive all that the server knows, to fit its own part of it."""
        return False

    @property
    def drops_from(self) -> int | None:
        """First round in which weights are dropped; None: never."""
        return None

    def notes(self, rounds: int) -> Sequence[str]:  # noqa: ARG002
        """What a person should know before a run of so many rounds."""
        return ()


@dataclass(frozen=True)
class Setting:
    """What a method must know of the federation it runs in."""

    num_clients: int
    num_classes: int
    rounds: int
    server_rows: Callable[[Tensor], Tensor] | None = None
    """A round's key -> the server's own unlabelled rows (D, ...), where the method asks for them."""


@dataclass(frozen=True)
class Parts:
    """A method in the making: what regularisers may change before a base puts it together."""

    setting: Setting
    model: Model
    emit: Emit
    inner: Objective
    outer: Objective
    aggregate: Aggregate
    groups: dict[str, Sgd]
    predict: Predict
    lr: float
    """The base's local learning rate."""
    noise: Posterior | None = None
    serve: Callable[[Emit], Emit] = lambda emits: emits
    """From what is emitted in training to what is emitted when a client is to be used or tested."""
    personal: Callable[[Objective], Objective] = lambda loss: loss
    """From what is minimised in training to what is minimised when a client is to be used or tested."""
    admit: Callable[[Emit], Admit] | None = None
    wrap: Callable[[Server], Server] = lambda base: base
    inner_clip: bool = True
    adapt_steps: int | None = None
    """Gradient steps of personalisation; None: clients use what they receive."""
    sparse: bool = True
    owned_by_share: bool = False
    undropped: Emit | None = None
    """What would be emitted if no weight were dropped, where the released rules are followed; see `averaging`."""

    @property
    def posterior_entries(self) -> list[str]:
        """Names of what travels for the posterior, where there is one."""
        if self.noise is None:
            return []
        return [name for layer in self.noise.layers for name in self.noise.entries(layer, self.model.layers[layer])]


# --- options that bases share ----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Rates(Options):
    """Of every base: how fast clients and the server learn."""

    lr: float = option(
        0.02, "local learning rate; also of the inner step and of adaptation", low=0,
        search=[round(0.005 * i, 3) for i in range(1, 7)],
    )  # fmt: skip
    clip: float = option(5.0, "largest norm of a local gradient", low=0)
    server_clip: float = option(100.0, "largest norm of the server's gradient", low=0)
    server_lr: float = option(1.0, "server learning rate; 1 lands on the clients' mean", low=0)
    server_momentum: float = option(0.0, "server momentum", low=0, high=1)


@dataclass(frozen=True)
class Training(Rates):
    """Of bases that train on batches."""

    batch: int = option(64, "samples in a local batch", low=1)
    local_epochs: int = option(5, "passes over a client's data in a round", low=1)


@dataclass(frozen=True)
class Momentum(Training):
    """Of bases whose server has momentum."""

    server_lr: float = option(0.9, "server learning rate", low=0, search=[0.6, 0.7, 0.8, 0.9, 1.0])
    server_momentum: float = option(0.9, "server momentum", low=0, high=1)


@dataclass(frozen=True)
class Adapting(Options):
    """Of whatever takes gradient steps before use."""

    adapt_steps: int = option(1, "gradient steps of personalisation before use and test", low=0)


# --- what builders share ---------------------------------------------------------------------------------------------


def plain(model: Model, setting: Setting, o: Rates) -> Parts:
    """No regulariser: shared weights, cross-entropy, plain averaging."""
    loss = core.objective.cross_entropy(model)
    return Parts(
        setting,
        model,
        core.emit.shared(model),
        loss,
        loss,
        core.aggregate.mean,
        {"": core.optim.Sgd(o.server_lr, o.server_momentum)},
        core.predict.posterior_mean(model),
        o.lr,
    )


def assemble(parts: Parts, o: Training, steps: Local, batches: Sampling, *, pulls: Emit | None = None) -> Algorithm:
    """Put the slots together; personalisation takes gradient steps where the method adapts.

    `pulls` is what the server takes the clients' differences to, where that is not what they received.
    """
    import torch  # noqa: PLC0415

    groups = core.optim.Groups(parts.groups, sparse=parts.sparse)
    pulled = core.server.pull(
        pulls or parts.emit,
        parts.aggregate,
        groups,
        clip=o.server_clip,
        owned_by_share=parts.owned_by_share,
        anew=pulls is not None,
    )
    used = parts.serve(parts.emit)

    def admit(params: Params, round: Tensor, batches: Sequence[Batch]) -> Params:  # noqa: ARG001
        return used.apply(params, torch.full((), core.types.NEW, dtype=torch.int64, device=round.device), round)

    adapts = parts.adapt_steps is not None
    # A client that does not adapt still needs a batch where its embedding is to be fitted.
    num_steps = parts.adapt_steps if parts.adapt_steps is not None else int(parts.admit is not None)
    return core.types.Algorithm(
        emit=parts.emit,
        local=steps,
        server=parts.wrap(pulled),
        personalize=core.local.sgd(parts.personal(parts.outer), lr=o.lr, clip=o.clip) if adapts else core.local.keep,
        predict=parts.predict,
        serve=used.apply,
        admit=admit if parts.admit is None else parts.admit(used),
        train_batches=batches,
        personal_batches=core.types.Sampling(o.batch, steps=num_steps),
        noise=parts.noise,
    )


def named(model: Model, text: str, default: Sequence[str]) -> tuple[str, ...]:
    """Return the layers that the option `layers` names, or say in one sentence why it cannot be these."""
    names = tuple(default) if text == "auto" else tuple(part.strip() for part in text.split(",") if part.strip())
    for name in names:
        if name not in model.layers:
            raise SpecError(f"option layers names {name!r}, but the model's layers are {', '.join(model.layers)}")
    if not names:
        raise SpecError(f"option layers is {text!r}, but must name at least one of {', '.join(model.layers)}")
    return names


def linear_layers(model: Model) -> list[str]:
    """Names of the layers whose weight is a matrix."""
    return [name for name, shape in model.layers.items() if len(shape) == 2]
