"""FedAvg as people write it: one client after another, a module, an optimiser, `.item()` at every step.

`python -m metavd.bench.plain` reads an order from standard input and prints its times. With `tuned` it is the best
that such a loop can be: images in channels_last, no waiting for the device inside a client, and, where the order says
so, processes that share the cohort. Only torch and NumPy are imported.
"""

from __future__ import annotations

import copy
import json
import multiprocessing
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

from metavd.bench.workload import Assignment, Workload, from_json, peak_mb, timed


def network(work: Workload) -> nn.Sequential:
    """Build the workload's network."""
    channels, height, across = work.shape
    layers: list[nn.Module] = []
    hidden, inputs = (work.width, max(work.width // 2, 1)), channels * height * across
    if work.model == "cnn":
        for i in range(3):
            layers += [nn.Conv2d(work.width if i else channels, work.width, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)]
        hidden, inputs = (4 * work.width, 2 * work.width), work.width * (height // 8) * (across // 8)
    layers += [nn.Flatten(), nn.Linear(inputs, hidden[0]), nn.LeakyReLU(0.1)]
    layers += [nn.Linear(hidden[0], hidden[1]), nn.LeakyReLU(0.1), nn.Linear(hidden[1], work.classes)]
    return nn.Sequential(*layers)


def images(work: Workload) -> tuple[np.ndarray, np.ndarray]:
    """Return all rows, the same everywhere: random pixels (n, C, H, W) and labels (n,)."""
    draw = np.random.RandomState(0)
    return draw.randint(0, 256, (work.rows, *work.shape), np.uint8), draw.randint(0, work.classes, work.rows)


def slices(sizes: Sequence[int]) -> list[slice]:
    """Return which of the rows each client holds."""
    ends = np.cumsum(sizes)
    return [slice(int(end) - size, int(end)) for size, end in zip(sizes, ends, strict=True)]


def crop_and_flip(x: Tensor) -> Tensor:
    """Move every image by up to four pixels and mirror half of them."""
    count, _, height, width = x.shape
    padded = functional.pad(x, (4, 4, 4, 4))
    down, right = torch.randint(0, 9, (2, count, 1), device=x.device)
    columns = right + torch.arange(width, device=x.device)
    flipped = torch.rand(count, 1, device=x.device) < 0.5
    columns = torch.where(flipped, columns.flip(1), columns)
    rows = down + torch.arange(height, device=x.device)
    return padded[
        torch.arange(count, device=x.device)[:, None, None], :, rows[:, :, None], columns[:, None, :]
    ].permute(0, 3, 1, 2)


def prepared(raw: Tensor, work: Workload, *, tuned: bool) -> Tensor:
    """Return stored images as the network sees them."""
    x = crop_and_flip(raw) if work.augment else raw
    layout = torch.channels_last if tuned else torch.contiguous_format
    return ((x.float() / 255 - 0.5) / 0.5).contiguous(memory_format=layout)


def train(net: nn.Module, x: Tensor, y: Tensor, work: Workload, *, tuned: bool) -> float:
    """Train a client's copy of the network; return the sum of its losses."""
    optimizer = torch.optim.SGD(net.parameters(), lr=work.lr)
    total, waiting = 0.0, torch.zeros((), device=x.device)
    for _ in range(work.epochs):
        order = torch.randperm(len(x), device=x.device)
        for rows in torch.split(order, work.batch):
            optimizer.zero_grad()
            loss = functional.cross_entropy(net(prepared(x[rows], work, tuned=tuned)), y[rows])
            loss.backward()  # type: ignore[no-untyped-call]
            nn.utils.clip_grad_norm_(net.parameters(), work.clip)
            optimizer.step()
            if tuned:
                waiting += loss.detach()
            else:
                total += loss.item()
    return total + float(waiting)


def average(states: Sequence[dict[str, Tensor]], weights: Sequence[float]) -> dict[str, Tensor]:
    """Return the clients' mean, weighted by their rows."""
    total = sum(weights)
    return {
        name: torch.stack([w / total * state[name] for w, state in zip(weights, states, strict=True)]).sum(0)
        for name in states[0]
    }


def clients_of(order: Assignment) -> Callable[[nn.Module, Sequence[int]], tuple[list[dict[str, Tensor]], float]]:
    """Return the function that trains some clients from the server's network: their weights, and their loss."""
    work = order.work
    x, y = (torch.from_numpy(part).to(order.device) for part in images(work))
    held = slices(order.sizes)
    local = network(work).to(order.device)
    if order.tuned:
        local = local.to(memory_format=torch.channels_last)  # type: ignore[call-overload]

    def answers(server: nn.Module, clients: Sequence[int]) -> tuple[list[dict[str, Tensor]], float]:
        states, loss = [], 0.0
        for client in clients:
            local.load_state_dict(server.state_dict())
            loss += train(local, x[held[client]], y[held[client]], work, tuned=order.tuned)
            states.append(copy.deepcopy(local.state_dict()))
        return states, loss

    return answers


def one_process(order: Assignment) -> Callable[[int], float]:
    """Return the function that computes a round, one client after another."""
    server, answers = network(order.work).to(order.device), clients_of(order)

    def round(number: int) -> float:
        cohort = order.cohorts[number % len(order.cohorts)]
        states, loss = answers(server, cohort)
        server.load_state_dict(average(states, [order.sizes[client] for client in cohort]))
        if order.device == "cuda":
            torch.cuda.synchronize()
        return loss

    return round


def several_processes(order: Assignment) -> Callable[[int], float]:
    """Return the function that computes a round, its cohort shared by processes that each hold the data."""
    context = multiprocessing.get_context("spawn")
    server = network(order.work)
    pipes = []
    for _ in range(order.processes):
        ours, theirs = context.Pipe()
        context.Process(target=serve, args=(order.to_json(), theirs), daemon=True).start()
        pipes.append(ours)

    def round(number: int) -> float:
        cohort = order.cohorts[number % len(order.cohorts)]
        weights = {name: value.numpy() for name, value in server.state_dict().items()}
        for i, pipe in enumerate(pipes):
            pipe.send((weights, cohort[i :: order.processes]))
        parts = [pipe.recv() for pipe in pipes]
        states = [{name: torch.from_numpy(value) for name, value in mean.items()} for mean, _, _ in parts]
        server.load_state_dict(average(states, [weight for _, weight, _ in parts]))
        return float(sum(loss for _, _, loss in parts))

    return round


def serve(text: str, pipe: multiprocessing.connection.Connection) -> None:
    """Train shares of cohorts, until the other end is closed."""
    order = from_json(text)
    torch.set_num_threads(order.threads)
    server, answers = network(order.work), clients_of(order)
    while True:
        try:
            weights, cohort = pipe.recv()
        except EOFError:
            return
        server.load_state_dict({name: torch.from_numpy(value) for name, value in weights.items()})
        states, loss = answers(server, cohort)
        sizes = [order.sizes[client] for client in cohort]
        mean = {name: value.numpy() for name, value in average(states, sizes).items()}
        pipe.send((mean, float(sum(sizes)), loss))


def tell(found: dict[str, Any], device: str) -> None:
    """Print what was measured in this process, with its memory, for the one that started it."""
    found["memory_mb"] = peak_mb()
    if device == "cuda":
        found["cuda_mb"] = torch.cuda.max_memory_allocated() / 2**20
    print(json.dumps(found))


def main() -> None:
    """Read an order, measure, print."""
    order = from_json(sys.stdin.read())
    torch.manual_seed(0)
    if order.threads:
        torch.set_num_threads(order.threads)
    round = several_processes(order) if order.processes > 1 else one_process(order)
    found = timed(order, round, time.perf_counter)
    tell(found, order.device)


if __name__ == "__main__":
    main()
