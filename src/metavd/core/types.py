"""The values that flow through a round, and the slots that a method fills.

    received_i       = emit(server_params, i)                what client i receives
    sent_i, kept_i'  = local(received_i, kept_i, batches_i)  what client i does with its data
    server'          = server.update(server, {sent_i})       what the server makes of the answers
    own_i            = personalize(received_i', kept_i, ...) what a client does before it is used or tested
    answer           = predict(own_i, x, key)                how a personalised model answers

What a client keeps between rounds begins as `keep.init(key, i)` and never leaves it. For its own computation the two
trees are one: a client's stage sees `received | kept`, and of what it ends with, the names that were kept stay.

Shape letters: C clients, T local steps, B batch, S noise draws, K classes, N participating clients.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from .. import tree
from ..errors import FailedError
from ..ops.step import descend
from ..tree import Params
from .accountant import Mechanism
from .posterior import Posterior

LABELS = "labels"
"""(K,) float: how many of a client's training rows have each label."""
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
    about: Params = {}  # noqa: RUF012 (nobody writes into it)
    """What else the stage asked to be told of the client: `LABELS` where its `Sampling` counts classes, or nothing."""

    def real(self) -> Tensor:
        """Return the mask, also where every row is real: (B,)."""
        return torch.ones_like(self.size).expand(len(self.y)) if self.mask is None else self.mask

    def rows(self) -> Tensor:
        """Return the number of real rows, ()."""
        return torch.full_like(self.size, len(self.y)) if self.mask is None else self.mask.sum()

    def labels(self, num_classes: int) -> Tensor:
        """Return (B, K) 1 for a real row's label, else 0."""
        return (self.y[:, None] == torch.arange(num_classes, device=self.y.device)) * self.real()[:, None]


class Job(NamedTuple):
    """One client's work: what a function of one client is called with."""

    client: Tensor
    """() int64."""
    batches: Sequence[Batch]
    rows: Tensor
    """(R, ...) inputs to answer, none when training."""
    key: Tensor
    kept: Params = {}  # noqa: RUF012 (nobody writes into it)
    """What the client keeps."""


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
    head: tuple[str, ...] = ()
    """Names of the layers that turn features into logits: what methods with a private head keep."""
    num_classes: int = 0
    """How many logits a row gets; 0 where nobody has looked."""
    called: tuple[str, ...] = ()
    """Names of the layers in the order in which a forward pass calls them; the head ends them."""
    settle: Callable[[Tensor], Model] | None = None
    """(rows) -> the model with its head and its layer before the head found by a forward pass; None: they are found."""

    def in_head(self, name: str) -> bool:
        """Whether a parameter belongs to the head."""
        return name.rpartition(".")[0] in self.head


class Emit(NamedTuple):
    """What clients receive. `init(key)` makes the server's parameters, `apply(params, client, round)` a client's."""

    init: Callable[[Tensor], Params]
    apply: Callable[[Params, Tensor, Tensor], Params]


class Keep(NamedTuple):
    """What a client keeps between rounds."""

    init: Callable[[Tensor, Tensor], Params]
    """(key of the run, id of the client) -> what the client keeps before its first turn."""
    alike: bool = False
    """Whether that is the same for all clients: a run then makes it once, not for the newcomers of every round."""


class Update(NamedTuple):
    """One round's answers: C client ids, their stacked parameters, their sample counts, and what they were sent.

    The first three are all that ever crosses the wire upward.
    """

    client: Tensor
    params: Params
    weight: Tensor
    sent: Params
    """(C, ...) what each client received, to the bit; what all share is one tensor, expanded."""
    moved: Params = {}  # noqa: RUF012 (nobody writes into it)
    """(C, ...) params - sent, where that is known better than a subtraction tells; empty: it is not."""
    sums: Params = {}  # noqa: RUF012 (nobody writes into it)
    """What a server has added up of the answers as they came (`Server.take`), in place of `params` and `sent`."""


class Kept(Protocol):
    """What all simulated clients keep at one moment: a table with one row per client; see `engine.kept`."""

    def rows(self, clients: Sequence[int]) -> Params:
        """Return what clients keep, (C, ...); zeros for one that has not kept anything yet."""

    def has(self, clients: Sequence[int]) -> list[bool]:
        """Return of each client whether it has kept anything yet."""

    def put(self, clients: Sequence[int], kept: Params) -> Kept:
        """Return the table of the next moment, in which clients keep something else; this one stays as it is."""

    def visited(self) -> list[int]:
        """Return the clients that have kept something, ascending."""

    def everyone(self) -> Params:
        """Return what all clients keep, (N, ...); of the newest table to be read before the next one is made."""

    def first(self, make: Callable[[], Params]) -> Params:
        """Return what everybody begins with, which is made when it is first asked for."""

    def __len__(self) -> int:
        """Return the number of clients."""


class ServerState(NamedTuple):
    """All that a server knows, and in a simulation what its clients keep; a checkpoint is exactly this."""

    params: Params
    slots: Params
    """Optimiser memory, by parameter name."""
    round: Tensor
    """() float: rounds finished."""
    key: Tensor
    """() int64: the run's key."""
    kept: Kept | None = None
    """What simulated clients keep, where the method lets them; no function of the server is ever given it."""
    rows: Kept | None = None
    """Rows of the server that belong to one client each, where there are too many for `params`; see `core.owned`."""


class Answer(NamedTuple):
    """What a personalised model says of B rows. Tensors alone, no None: `vmap` returns it as it is."""

    probs: Tensor
    """(B, K) class probabilities."""
    drawn: Params
    """What only draws can tell: "information" (B,), see `predict.mutual_information`; empty where nothing is drawn."""


class Server(NamedTuple):
    """`init(key)` starts a run, `update(state, update)` takes one round's answers, or what `take` made of them."""

    init: Callable[[Tensor], ServerState]
    update: Callable[[ServerState, Update], ServerState]
    take: Take | None = None
    """How answers are added up part by part; None: the server needs all of them at once."""


Take = Callable[[ServerState, Update, Tensor], Params]
"""(state, a part of the cohort's answers, the whole cohort's weights (C,)) -> sums over the part's clients.

Added entry by entry over all parts they are `Update.sums`. Only one part's answers are ever in memory.
"""


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
    settle: Callable[[Params], Params] | None = None
    """Where a step landed -> the entries that are then changed, such as those put back into a range; None: none are."""
    final: Callable[[Params], Params] | None = None
    """Where the steps ended -> what the client ends with, also one without any batch; None: that."""

    captured: bool = True
    """Whether a GPU may keep its step as a CUDA graph: not where its shapes depend on values, or where a library within
    it takes memory or waits for the host, as batched Cholesky solves do in torch up to 2.11."""

    def land(self, params: Params, move: Move) -> Params:
        """End a step: return the changed parameters."""
        landed = params | move.put if move.put else params
        if move.slope:
            start = {name: params[name] for name in move.slope}
            landed = params | descend(start, move.slope, self.lr, self.clip) | move.put
        return landed if self.settle is None else landed | self.settle(landed)

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
"""((C, ...) adapted, (C,) weights that sum to 1) -> (C, ...) targets. One that adds up part by part is a `Summed`."""


@dataclass(frozen=True)
class Summed:
    """An `Aggregate` for which sums over clients suffice: some entries have one target for all, others their own."""

    targets: Aggregate
    names: tuple[str, ...]
    """Entries with one target for all clients, the consensus; every other entry's target is the client's answer."""
    sums: Callable[[Params, Tensor], Params]
    """((n, ...) some clients' answers, (n,) their weights, of which the whole cohort's sum to 1) -> sums over them."""
    consensus: Callable[[Params, Params], Params]
    """(sums over all clients, where the entries are now) -> the consensus of each of `names`."""

    def __call__(self, params: Params, weight: Tensor) -> Params:
        """Return the targets of all clients at once."""
        return self.targets(params, weight)


Veil = Callable[[Params, Params, Tensor], Params]
"""(received, answer, key) -> what a client sends in place of its answer."""
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
    own: bool = True
    """Whether the client's own rows are there too, or only those `extra` ones."""
    classes: int = 0
    """Classes of which batches say how many rows the client has, see `Batch.about`; 0: they do not say."""

    def epoch(self, index: Tensor, batch: Batch) -> Tensor:
        """Return the pass over a client's rows, from 0, to which its step of this number belongs.

        Each client has its own number of steps in a pass, and padding counts for none: so phases of training ("first
        the head, then the features") agree however clients are run.
        """
        return torch.div(index.to(batch.size.dtype), self._steps(batch), rounding_mode="floor")

    def seen(self, index: Tensor, batch: Batch) -> Tensor:
        """Return how many rows of its pass the steps before this one held, one batch being one step."""
        begun = self.epoch(index, batch) * self._steps(batch)
        return (index.to(batch.size.dtype) - begun) * self.batch

    def _steps(self, batch: Batch) -> Tensor:
        """Return the number of steps in a client's pass."""
        return torch.ceil(batch.size / (self.batch * self.group)).clamp(min=1.0)


@dataclass(frozen=True)
class Newcomer:
    """What a client does before use or test that has kept nothing yet: in place of `personalize`."""

    stage: Local
    batches: Sampling


@dataclass(frozen=True)
class Algorithm:
    """A method: its slots, and the batches that its client stages want."""

    emit: Emit
    local: Local
    server: Server
    personalize: Local
    predict: Predict
    serve: Serve
    admit: Admit
    train_batches: Sampling
    personal_batches: Sampling
    posterior: Posterior | None = None
    """The posterior, where there is one: for diagnostics of its dropout rates."""
    keep: Keep | None = None
    """What clients keep between rounds; None: nothing."""
    newcomer: Newcomer | None = None
    """For clients that have kept nothing yet; None: they do as the others."""
    privacy: Mechanism | None = None
    """How the server's parameters hide single clients; None: they do not."""
    veil: Veil | None = None
    """What a client does to its answer before it leaves; None: nothing."""
