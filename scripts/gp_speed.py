#!/usr/bin/env python3
"""Time the parts of pFedGP's round on random features, all clients at once under vmap; no data is needed.

    scripts/gp_speed.py [--device cuda] [--clients 10] [--rows 385] [--classes 100] [--asked 130] [--profile]

Prints the median milliseconds of a step (loss and gradient by features and inducing points), of the class trees and
of conditioning alone, and of an evaluation's two halves, conditioning and answering, for `--asked` clients; also of
the factors of all clients' roots, 20 chains each, and of PyTorch's own factors of the same matrices. Labels are drawn
by a Dirichlet distribution of 0.5 for every client. `--profile` adds the operators of a step that take longest.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.func import grad_and_value, vmap
from torch.profiler import ProfilerActivity, profile

from metavd.core import gp, rng
from metavd.ops.cholesky import factor
from metavd.ops.class_tree import class_tree

SPREAD = 2.0
"""Of rows around the mean of their class, whose entries are standard normal."""


def clients(count: int, rows: int, classes: int, features: int, device: str) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return features (C, n, F), labels and masks (C, n) and keys (C,) of clients."""
    torch.manual_seed(0)
    shares = torch.distributions.Dirichlet(torch.full((classes,), 0.5)).sample((count,))
    labels = torch.multinomial(shares, rows, replacement=True)
    centres = torch.randn(classes, features)
    drawn = (centres[labels] + SPREAD * torch.randn(count, rows, features)).relu()
    keys = rng.split(rng.key(0), count)
    return drawn.to(device), labels.to(device), torch.ones(count, rows, device=device), keys.to(device)


def milliseconds(function: Callable[[], Any], device: str, repeat: int) -> float:
    """Return the median time of a call, after one that is not counted."""
    taken = []
    for _ in range(repeat + 1):
        start = time.perf_counter()
        function()
        if device != "cpu":
            torch.cuda.synchronize()
        taken.append(1000 * (time.perf_counter() - start))
    return sorted(taken[1:])[repeat // 2]


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--clients", type=int, default=10)
    parser.add_argument("--rows", type=int, default=385)
    parser.add_argument("--classes", type=int, default=100)
    parser.add_argument("--features", type=int, default=200)
    parser.add_argument("--asked", type=int, default=130, help="clients of an evaluation")
    parser.add_argument("--queries", type=int, default=60, help="rows that each of them is asked about")
    parser.add_argument("--repeat", type=int, default=5)
    parser.add_argument("--profile", action="store_true")
    given = parser.parse_args()
    device, classes = given.device, given.classes
    points = 0.01 * torch.randn(classes, 1, given.features, device=device)

    def loss(moving: dict[str, Tensor], labels: Tensor, mask: Tensor, key: Tensor) -> Tensor:
        return gp.loss(moving["x"], labels, mask, key, classes, points=moving["points"], limit=400)

    def condition(x: Tensor, labels: Tensor, mask: Tensor, key: Tensor) -> Any:
        return gp.condition(x, labels, mask, key, classes, points=points, borrow=1.0, limit=400)

    x, labels, mask, keys = clients(given.clients, given.rows, classes, given.features, device)
    shared = points.expand(given.clients, *points.shape)
    one_hot = torch.nn.functional.one_hot(labels, classes).to(x)
    counts = one_hot.sum(1)
    means = one_hot.mT @ x / counts.clamp(min=1.0)[..., None]
    more = clients(given.asked, given.rows, classes, given.features, device)
    queries = more[0][:, : given.queries]

    half = gp.normalized(x)[:, ::2]
    gram, scale = gp.kernel(half, half), torch.rand(given.clients, 20, half.shape[1], device=device)

    def torchs() -> Any:
        matrix = scale[..., :, None] * gram[:, None] * scale[..., None, :]
        matrix.diagonal(dim1=-2, dim2=-1).add_(1.0)
        return torch.linalg.cholesky_ex(matrix)

    def step() -> Any:
        return vmap(grad_and_value(loss), randomness="error")({"x": x, "points": shared}, labels, mask, keys)

    with torch.no_grad():
        posterior = vmap(condition)(*more)
        parts: dict[str, Callable[[], Any]] = {
            "factors of the roots": lambda: factor(gram, scale),
            "the same by PyTorch": torchs,
            "class trees": lambda: vmap(class_tree)(means, counts),
            "conditioning": lambda: vmap(condition)(x, labels, mask, keys),
            "step: loss and gradient": step,
            f"conditioning of {given.asked}": lambda: vmap(condition)(*more),
            f"answers of {given.asked}": lambda: vmap(gp.predictive)(posterior, queries),
        }
        for name, function in parts.items():
            print(f"{name:<28} {milliseconds(function, device, given.repeat):10.1f} ms", flush=True)
        if given.profile:
            on_gpu = [ProfilerActivity.CUDA] if device != "cpu" else []
            with profile(activities=[ProfilerActivity.CPU, *on_gpu]) as seen:
                step()
                if on_gpu:
                    torch.cuda.synchronize()
            order = "self_cuda_time_total" if on_gpu else "self_cpu_time_total"
            print(seen.key_averages().table(sort_by=order, row_limit=30, max_name_column_width=60))
    if device != "cpu":
        print(f"largest memory {torch.cuda.max_memory_allocated() / 2**30:.1f} GiB")


if __name__ == "__main__":
    main()
