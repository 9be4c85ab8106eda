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
from typing import TYPE_CHECKING, ClassVar

from .. import core
from ..errors import SpecError
from .catalogue import base
from .parts import SOFTMAX, TUNABLE, Parts, Training, assemble, kept

if TYPE_CHECKING:
    from torch import Tensor

    from ..core.types import Algorithm
    from ..tree import Params


@dataclass(frozen=True)
class ScaffoldOptions(Training):
    """FedAvg's."""

    weighs_alike: ClassVar[bool] = True


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

    def zeros(params: Params, prefix: str) -> Params:
        return {prefix + name: value.new_zeros(value.shape) for name, value in params.items()}

    def init(key: Tensor) -> Params:
        params = emits.init(key)
        return params | zeros(params, control)

    steps = core.local.controlled(parts.outer, lr=o.lr, clip=o.clip)
    parts = replace(
        parts,
        emit=core.types.Emit(init, emits.apply),
        serve=lambda used: core.emit.without(serve(used), lambda name: name.startswith(control)),
        groups=parts.groups | {control: core.optim.Sgd(1.0)},
        wrap=lambda server: wrap(core.server.by_participation(server, control, number)),
    )
    made = assemble(parts, o, steps, keep=kept(parts.model, lambda first: zeros(first, own + control)))
    return replace(made, personalize=replace(made.personalize, init=core.local.without_own))
