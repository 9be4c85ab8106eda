"""First and second derivatives of several clients at once, for tests of networks."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from metavd.core import rng
from metavd.core.types import Model


def check_vmap_is_a_loop(model: Model, rows: Tensor, y: Tensor, *, atol: float) -> None:
    """Parity: a gradient through a gradient step, each client with weights and rows (C, B, ...) of its own."""
    each = [model.init(rng.key(seed)) for seed in range(len(rows))]

    def loss(params, x):
        return nn.functional.cross_entropy(model.apply(params, x, None)[0], y)

    def twice(params, x):
        grad = torch.func.grad(loss)
        return torch.func.grad(lambda p: loss({k: p[k] - 0.1 * g for k, g in grad(p, x).items()}, x))(params)

    stacked = {key: torch.stack([params[key] for params in each]) for key in each[0]}
    together = torch.func.vmap(twice, randomness="error")(stacked, rows)
    for place, params in enumerate(each):
        for key, value in twice(params, rows[place]).items():
            torch.testing.assert_close(together[key][place], value, rtol=1e-8, atol=atol)
