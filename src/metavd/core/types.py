"""The values that flow through a round, and the five slots that a method fills.

    received_i = emit(server_params, i)               what client i receives
    adapted_i  = local(received_i, batches_i)         what client i does with its data
    server'    = server.update(server, {adapted_i})   what the server makes of the answers
    own_i      = personalize(received_i', batches_i)  what a client does before it is used or tested
    answer     = predict(own_i, x, key)               how a personalised model answers

Shape letters: C clients, T local steps, B batch, S noise draws, K classes, N participating clients.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from .. import tree
from ..errors import FailedError
from ..ops.step import descend
from ..tree import Params
from .posterior import Posterior

NEW = -1
"""The id of a client that the server has never trained with."""


class NonFiniteError(FailedError, ArithmeticError):
    """Training or an answer gave a NaN or an infinity; the text names the round, the client and the tensor."""


class Batch(NamedTuple):
    """One step's data of one client. All randomness of the step comes from `key`."""

    x: Tensor
    """(B, ...) inputs."""
    y: Tensor
    """(B,) labels."""
    mask: Tensor | None
    """(B,) 1 for a real row, 0 for padding; None when every row is real. A batch of padding alone is no step."""
    key: Tensor
    """() int64, see `rng`."""
    round: Tensor
    """() float, for schedules."""
    size: Tensor
    """() float, how many training samples the client has."""


class Job(NamedTuple):
    """One client's work: what a function of one client is called with."""

    client: Tensor
    """() int64."""
    batches: Sequence[Batch]
    rows: Tensor
    """(R, ...) inputs to answer, none when training."""
    key: Tensor


class Model(NamedTuple):
    """A network as two pure functions.

    `apply(params, x, keys)` returns logits (S, B, K): one draw per key in `keys` (S,), or, with `keys=None`, the one
    answer (1, B, K) at the posterior mean. `features(params, x)` returns the inputs (B, F) of the output layer.
    """

    init: Callable[[Tensor], Params]
    apply: Callable[[Params, Tensor, Tensor | None], Tensor]
    features: Callable[[Params, Tensor], Tensor]
    run: Callable[[Params, Tensor, Params, int], Tensor]
    """(parameters, x, what noisy layers are given, number of draws S) -> (S, B, K): what `apply` is made of."""
    layers: dict[str, tuple[int, ...]]
    """The linear and convolutional layers in the module's order, with the shapes of their weights."""
    variational: tuple[str, ...]
    """Names of the layers that carry a posterior when a method asks for one."""
    fresh: bool
    """Whether `init` draws new weights (False: it returns those that the module came with)."""


class Emit(NamedTuple):
    """What clients receive. `init(key)` makes the server's parameters, `apply(params, client, round)` a client's."""

    init: Callable[[Tensor], Params]
    apply: Callable[[Params, Tensor, Tensor], Params]


class Update(NamedTuple):
    """One round's answers: C client ids, their stacked parameters, their sample counts, and what they were sent.

    The first three are all that ever crosses the wire upward.
    """

    client: Tensor
    params: Params
    weight: Tensor
    sent: Params
    """(C, ...) what each client received, to the bit; what all share is one tensor, expanded."""


class ServerState(NamedTuple):
    """All that a server knows; a checkpoint is exactly this."""

    params: Params
    slots: Params
    """Optimiser memory, by parameter name."""
    round: Tensor
    """() float: rounds finished."""
    key: Tensor
    """() int64: the run's key."""


class Answer(NamedTuple):
    """What a personalised model says of B rows. Tensors alone, no None: `vmap` returns it as it is."""

    probs: Tensor
    """(B, K) class probabilities."""
    drawn: Params
    """What only draws can tell: "information" (B,), see `predict.mutual_information`; empty where nothing is drawn."""


class Server(NamedTuple):
    """`init(key)` starts a run, `update(state, update)` takes one round's answers."""

    init: Callable[[Tensor], ServerState]
    update: Callable[[ServerState, Update], ServerState]


class Move(NamedTuple):
    """What one step changes in a client's parameters; an entry in neither tree stays as it is."""

    slope: Params
    """Entries that go down this slope, clipped: w <- w - lr min(1, clip / |slope|) slope, see `Local`."""
    put: Params
    """Entries that take a new value, or that are new."""


Step = Callable[[Params, Sequence[Batch], Params, Tensor], tuple[Move, Tensor]]
"""(parameters, the step's batches, what was received, () int64 the step's number from 0) -> what changes, loss."""


@dataclass(frozen=True)
class Local:
    """What one client does with its data, as a value: `init`, then one `step` per group of batches, then `final`.

    Calling it does all of that for one client. A schedule may also take the steps itself, for many clients at once:
    nothing is carried from step to step but the parameters, and a step ends by landing, apart from the step, so that a
    schedule which needs the old parameters no more can land in place. A group of padding is no step: it moves nothing,
    it counts for no loss, and the steps after it have the numbers that they would have without it.
    """

    step: Step
    lr: float = 0.0
    clip: float | None = None
    group: int = 1
    """Batches of one step."""
    init: Callable[[Params], Params] | None = None
    """What was received -> where the steps start; None: there."""
    final: Callable[[Params], Params] | None = None
    """Where the steps ended -> what the client ends with, also one without any batch; None: that."""

    def land(self, params: Params, move: Move) -> Params:
        """End a step: return the changed parameters."""
        if not move.slope:
            return params | move.put if move.put else params
        start = {name: params[name] for name in move.slope}
        return params | descend(start, move.slope, self.lr, self.clip) | move.put

    def take(self, params: Params, batches: Sequence[Batch], received: Params, index: Tensor) -> tuple[Params, Tensor]:
        """Take a whole step; return the new parameters and the loss."""
        move, loss = self.step(params, batches, received, index)
        return self.land(params, move), loss

    def __call__(self, received: Params, batches: Sequence[Batch]) -> tuple[Params, Tensor]:
        """Return what a client makes of what it received, and the mean loss of its steps."""
        params = received if self.init is None else self.init(received)
        total = next(iter(received.values())).new_zeros(())
        count = torch.zeros_like(total)
        for start in range(0, len(batches), self.group):
            chunk = batches[start : start + self.group]
            new, loss = self.take(params, chunk, received, count.to(torch.int64))
            mask = chunk[0].mask
            if mask is None:
                params, active = new, torch.ones_like(total)
            else:
                active = (mask.sum() > 0).to(total.dtype)
                params = tree.where(active > 0, new, params)
            total = total + torch.where(active > 0, loss, torch.zeros_like(loss))
            count = count + active
        return params if self.final is None else self.final(params), total / count.clamp(min=1.0)


Objective = Callable[[Params, Batch, Params], Tensor]
"""(parameters, batch, what was received) -> scalar loss."""
Aggregate = Callable[[Params, Tensor], Params]
"""((C, ...) adapted, (C,) weights that sum to 1) -> (C, ...) targets."""
Predict = Callable[[Params, Tensor, Tensor], Answer]
"""(personalised, x (B, ...), key) -> what it answers."""
Serve = Callable[[Params, Tensor, Tensor], Params]
"""(server parameters, client, round) -> what a known client receives when it is to be used or tested."""
Admit = Callable[[Params, Tensor, Sequence[Batch]], Params]
"""(server parameters, round, batches) -> what a client that was never seen receives."""


@dataclass(frozen=True)
class Sampling:
    """Which batches a `Local` wants: `epochs` shuffled passes, in groups of `group` batches that belong to one step."""

    batch: int
    epochs: int = 1
    steps: int | None = None
    """Exactly so many batches instead of whole passes."""
    group: int = 1
    """Batches a step consumes (MAML: support and two query batches), disjoint while the client has rows enough."""
    independent: bool = False
    """Draw every batch anew from all rows, as the released code does for MAML and PerFedAvg."""
    full: bool = False
    """One batch holds every row."""
    augment: bool = True
    """Crop and mirror photographs at random, where the data allows it."""
    extra: int = 0
    """Rows of every class, from the pooled training rows, that a client is given on top (pFedGP's protocol)."""


@dataclass(frozen=True)
class Algorithm:
    """A method: five slots, and the batches that its two client stages want."""

    emit: Emit
    local: Local
    server: Server
    personalize: Local
    predict: Predict
    serve: Serve
    admit: Admit
    train_batches: Sampling
    personal_batches: Sampling
    noise: Posterior | None = None
    """The posterior, where there is one: for diagnostics of its dropout rates."""
