"""SCAFFOLD: FedAvg whose clients correct their steps by how their gradients differ from everyone's.

    local     w    <- w - lr (clip(grad L(w)) - c_i + c)             c: received, c_i: the client's own
              c_i' =  c_i - c + (w_received - w) / (steps lr)        the mean gradient of the round
    server    w    <- mean of the w_i,   c <- c + |S|/N mean of (c_i' - c_i)

Clients send w and the change of their control, the latter added to c, so that an answer is as near to what was sent as
the client moved; c_i never leaves them. N counts all clients, S those of the round, and all count alike, whatever their
data, as in the paper: c is then the mean of all c_i after every round. All begin with c = c_i = 0. A client that has
never taken part uses w as it comes, as all others do.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from .. import core
from ..errors import SpecError
from .catalogue import base
from .parts import SOFTMAX, TUNABLE, Parts, Training, assemble

if TYPE_CHECKING:
    from torch import Tensor

    from ..core.types import Algorithm
    from ..tree import Params


@dataclass(frozen=True)
class ScaffoldOptions(Training):
    """FedAvg's."""

    @property
    def weighs_alike(self) -> bool:
        """Every client's answer counts alike."""
        return True


@base(
    "scaffold", "FedAvg with control variates against client drift", paper="Karimireddy et al., ICML 2020",
    options=ScaffoldOptions, gives=(TUNABLE, SOFTMAX),
    newcomer="uses what it receives, as the others do",
)  # fmt: skip
def scaffold(parts: Parts, o: ScaffoldOptions) -> Algorithm:
    """FedAvg with control variates against client drift."""
    if not o.lr:
        raise SpecError("lr is 0, but scaffold divides by it to find a client's mean gradient; give a number above 0")
    emits, serve, wrap, number = parts.emit, parts.serve, parts.wrap, parts.setting.num_clients
    control, own = core.local.CONTROL, core.local.OWN

    def zeros(key: Tensor) -> Params:
        return {control + name: value.new_zeros(value.shape) for name, value in emits.init(key).items()}

    def first(key: Tensor, client: Tensor) -> Params:  # noqa: ARG001
        return {own + name: value for name, value in zeros(key).items()}

    made = assemble(
        replace(
            parts,
            emit=core.types.Emit(lambda key: emits.init(key) | zeros(key), emits.apply),
            serve=lambda used: core.emit.without(serve(used), lambda name: name.startswith(control)),
            groups=parts.groups | {control: core.optim.Sgd(1.0)},
            wrap=lambda server: wrap(core.server.by_participation(server, control, number)),
        ),
        o,
        core.local.controlled(parts.outer, lr=o.lr, clip=o.clip),
        core.types.Sampling(o.batch, o.local_epochs),
        keep=core.types.Keep(first, alike=True),
    )
    return replace(made, personalize=replace(made.personalize, init=core.local.without_own))
