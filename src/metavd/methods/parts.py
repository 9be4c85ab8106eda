"""What methods are made of, before any of it is built: the federation, a method in the making, options that all share.

Nothing here imports torch, so that methods can be listed at once.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Literal

from .. import core
from ..errors import SpecError
from ..schema import option

if TYPE_CHECKING:
    from torch import Tensor

    from ..core.optim import Rule
    from ..core.posterior import Posterior
    from ..core.privacy import Normal
    from ..core.types import (
        Admit,
        Aggregate,
        Algorithm,
        Emit,
        Keep,
        Local,
        Model,
        Newcomer,
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
SOFTMAX = "softmax"
"""Of a base: its clients minimise `Parts.outer`, the cross-entropy of logits among it."""
SUMMED = "summed"
"""Of a base: the sum of the clients' answers is all that its server needs, and may be noisy."""


@dataclass(frozen=True)
class Options:
    """What one part of a method is told. The properties say what that means for the world around the method."""

    weighs_alike: ClassVar[bool] = False
    """Whether every client's answer counts alike, not by its number of rows."""

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

    @property
    def moves_all_rows(self) -> bool:
        """Whether rows of the server that belong to one client move also in rounds that the client is not part of."""
        return False

    @property
    def only_mean(self) -> str:
        """Why no aggregation rule but the mean goes with it, in half a sentence; empty where all do."""
        return ""

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
    aggregate: str = "mean"
    """How answers become one, see `core.rules`."""
    cohort: int = 0
    """Clients asked in a round; 0: all."""
    normal: Normal | None = None
    """What noise that hides clients is drawn by; None: `core.rng.normal`."""


@dataclass(frozen=True)
class Parts:
    """A method in the making: what regularisers may change before a base puts it together."""

    setting: Setting
    model: Model
    emit: Emit
    inner: Objective
    outer: Objective
    aggregate: Aggregate
    groups: dict[str, Rule]
    predict: Predict
    lr: float
    """The base's local learning rate."""
    posterior: Posterior | None = None
    votes_by_precision: bool = True
    """Whether answers about weights with a posterior count by their precision, where an aggregation rule counts."""
    serve: Callable[[Emit], Emit] = lambda emits: emits
    """From what is emitted in training to what is emitted when a client is to be used or tested."""
    personal: Callable[[Objective], Objective] = lambda loss: loss
    """From what is minimised in training to what is minimised when a client is to be used or tested."""
    admit: Callable[[Emit, Objective], Admit] | None = None
    """(what is emitted for use, what personalisation minimises) -> how an unseen client is admitted, where it fits."""
    wrap: Callable[[Server], Server] = lambda base: base
    inner_clip: bool = True
    adapt_steps: int | None = None
    """Gradient steps of personalisation; None: clients use what they receive."""
    sparse: bool = True
    owned_by_share: bool = False
    finish: Callable[[Algorithm], Algorithm] = lambda built: built
    """What is done to the method once a base has put it together."""
    spread_at_lr: bool = False
    """Whether the posterior's entries move at `lr` where the base's other entries move at a rate of its own."""
    undropped: Emit | None = None
    """What would be emitted if no weight were dropped, where the released rules are followed; see `averaging`."""

    @property
    def posterior_entries(self) -> list[str]:
        """Names of what travels for the posterior, where there is one."""
        if self.posterior is None:
            return []
        return [name for _, name, _ in core.posterior.entries(self.posterior, self.model.layers)]


# --- options that bases share ----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Rates(Options):
    """Of every base: how fast clients and the server learn."""

    lr: float = option(
        0.02, "local learning rate; also of the inner step and of adaptation", low=0,
        search=[round(0.005 * i, 3) for i in range(1, 7)], also=("learning_rate", "client_lr", "local_lr", "step_size"),
    )  # fmt: skip
    clip: float = option(5.0, "largest norm of a local gradient", low=0)
    server_clip: float = option(100.0, "largest norm of the server's gradient", low=0)
    server_lr: float = option(
        1.0, "server learning rate; 1 lands on the clients' mean", low=0, also=("server_learning_rate", "global_lr")
    )
    server_momentum: float = option(0.0, "server momentum", low=0, high=1)
    server_optimizer: Literal["sgd", "adam", "yogi", "adagrad"] = option(
        "sgd", "the server's rule for the weights: server_lr and server_momentum, or an adaptive one (FedOpt)",
        later=True,
    )  # fmt: skip
    adaptive_lr: float = option(
        0.01, "server learning rate of adam, yogi and adagrad, in place of server_lr", low=0, later=True
    )
    server_tau: float = option(1e-3, "of adam, yogi, adagrad: added to sqrt(v), and its start", low=1e-12, later=True)
    server_beta1: float = option(0.9, "share of the old mean gradient in adam and yogi", low=0, high=1, later=True)
    server_beta2: float = option(0.99, "share of the old mean square in adam and yogi", low=0, high=1, later=True)

    @property
    def server_rule(self) -> Rule:
        """The server's rule for the weights. As in the paper, adagrad has no mean gradient but the last."""
        kind = self.server_optimizer
        if kind == "sgd":
            return core.optim.Sgd(self.server_lr, self.server_momentum)
        beta1 = 0.0 if kind == "adagrad" else self.server_beta1
        return core.optim.Adaptive(kind, self.adaptive_lr, self.server_tau, beta1, self.server_beta2)


@dataclass(frozen=True)
class Training(Rates):
    """Of bases that train on batches."""

    batch: int = option(64, "samples in a local batch", low=1, also=("batch_size", "local_batch_size"))
    local_epochs: int = option(
        5, "passes over a client's data in a round", low=1, also=("epochs", "n_epochs", "num_epochs")
    )


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
        {"": o.server_rule},
        core.predict.posterior_mean(model),
        o.lr,
    )


def descent(
    loss: Objective,
    o: Rates,
    *,
    only: Callable[[str], bool] | None = None,
    rate: Callable[[str], float] | None = None,
) -> Local:
    """Return gradient descent as a base's options say; for `only` and `rate` see `core.local.sgd`."""
    return core.local.sgd(loss, lr=o.lr, clip=o.clip, only=only, rate=rate)


def kept(model: Model, first: Callable[[Params], Params]) -> Keep:
    """Let every client begin with what `first` makes of the first weights that the run's key gives the network."""
    return core.types.Keep(lambda key, client: first(model.init(core.rng.fold(key, 0))), alike=True)  # noqa: ARG005


def assemble(
    parts: Parts,
    o: Training,
    steps: Local | None = None,
    batches: Sampling | None = None,
    *,
    pulls: Emit | None = None,
    keep: Keep | None = None,
    newcomer: Newcomer | None = None,
    use: tuple[Local, Sampling] | None = None,
) -> Algorithm:
    """Put the slots together; personalisation takes gradient steps where the method adapts.

    Args:
        parts: what regularisers made of the method.
        o: the base's options.
        steps: what a client does with its batches in a round; by default it descends what it minimises.
        batches: which batches these are; by default `local_epochs` passes over its rows.
        pulls: what the server takes the clients' differences to, where that is not what they received.
        keep: what clients keep between rounds.
        newcomer: what a client does before use or test that has kept nothing yet.
        use: what a client does before use or test, and on which batches, where that is not adaptation.
    """
    groups = core.optim.Groups(parts.groups, sparse=parts.sparse)
    pulled = core.server.pull(
        pulls or parts.emit,
        parts.aggregate,
        groups,
        clip=o.server_clip,
        by_size=not o.weighs_alike,
        owned_by_share=parts.owned_by_share,
        anew=pulls is not None,
    )
    used, loss = parts.serve(parts.emit), parts.personal(parts.outer)
    if use is None and parts.adapt_steps is not None:
        use = descent(loss, o), core.types.Sampling(o.batch, steps=parts.adapt_steps)
    elif use is None:
        # A client that does not adapt still needs a batch where its embedding is to be fitted.
        use = core.local.unchanged, core.types.Sampling(o.batch, steps=int(parts.admit is not None))
    return core.types.Algorithm(
        emit=parts.emit,
        local=steps or descent(parts.outer, o),
        server=parts.wrap(pulled),
        personalize=use[0],
        predict=parts.predict,
        serve=used.apply,
        admit=core.emit.as_newcomer(used) if parts.admit is None else parts.admit(used, loss),
        train_batches=batches or core.types.Sampling(o.batch, o.local_epochs),
        personal_batches=use[1],
        posterior=parts.posterior,
        keep=keep,
        newcomer=newcomer,
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


def linear_head(model: Model, method: str) -> str:
    """Return the name of the output layer of a method that computes with it: one linear layer with a bias."""
    name = model.head[-1]
    if len(model.layers[name]) != 2 or f"{name}.bias" not in model.init(core.rng.key(0)):
        raise SpecError(f"{method} needs a network that ends with a linear layer with a bias, but {name!r} is not one")
    return name


def linear_layers(model: Model) -> list[str]:
    """Names of the layers whose weight is a matrix."""
    return [name for name, shape in model.layers.items() if len(shape) == 2]
