"""The workload in Flower's simulation: `python -m metavd.bench.with_flower` reads an order and prints its times.

Sampling, transport and averaging are Flower's own (FedAvg of its strategies, Ray behind it, one core a client); only
network, data and the training of a client are those of the loop. Runs under any interpreter that has
flwr[simulation], torch and NumPy.
"""

from __future__ import annotations

import json
import sys
import time
from functools import cache
from itertools import pairwise
from typing import Any

import torch

from metavd.bench.plain import images, network, slices, train
from metavd.bench.workload import Assignment, from_json, peak_mb

_MOST = 12
"""Rounds at most: the number must be said beforehand, and a round may take long."""


held_images = cache(images)  # made once per process


def main() -> None:
    """Read an order, measure, print."""
    order = from_json(sys.stdin.read())
    torch.manual_seed(0)
    seconds, trained = rounds(order)
    print(json.dumps({"seconds": seconds, "trained": trained, "memory_mb": peak_mb()}))


def rounds(order: Assignment) -> tuple[list[float], list[int]]:
    """Return the seconds of each timed round, from one's first message to the next one's, and the images trained on.

    Flower goes on with a warning where clients fail, so what really came back has to be counted.
    """
    from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict  # noqa: PLC0415 (may be missing)
    from flwr.clientapp import ClientApp  # noqa: PLC0415
    from flwr.serverapp import Grid, ServerApp  # noqa: PLC0415
    from flwr.serverapp.strategy import FedAvg  # noqa: PLC0415
    from flwr.simulation import run_simulation  # noqa: PLC0415

    work = order.work
    starts: list[float] = []
    trained: list[int] = []
    client_app, server_app = ClientApp(), ServerApp()

    @client_app.train()
    def fit(message: Message, context: Context) -> Message:
        client = int(context.node_config["partition-id"])
        x, y = (torch.from_numpy(part[slices(order.sizes)[client]]) for part in held_images(work))
        net = network(work)
        received: Any = message.content["arrays"]
        net.load_state_dict(received.to_torch_state_dict())
        net = net.to(order.device)
        if order.tuned:
            net = net.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        loss = train(net, x.to(order.device), y.to(order.device), work, tuned=order.tuned)
        metrics = MetricRecord({"loss": loss, "num-examples": len(y)})
        content = RecordDict({"arrays": ArrayRecord(net.cpu().state_dict()), "metrics": metrics})
        return Message(content=content, reply_to=message)

    class Timed(FedAvg):
        def configure_train(self, *arguments: Any, **more: Any) -> Any:
            starts.append(time.perf_counter())
            return super().configure_train(*arguments, **more)

        def aggregate_train(self, server_round: int, replies: Any) -> Any:
            answers = list(replies)
            good = [answer.content["metrics"]["num-examples"] for answer in answers if not answer.has_error()]
            trained.append(work.epochs * int(sum(good)))
            return super().aggregate_train(server_round, answers)

    @server_app.main()
    def serve(grid: Grid, context: Context) -> None:  # noqa: ARG001
        strategy = Timed(fraction_train=work.cohort / work.clients, fraction_evaluate=0.0,
                         min_train_nodes=work.cohort, min_available_nodes=work.clients)  # fmt: skip
        count = order.warm_up + min(order.rounds, _MOST)
        strategy.start(grid, ArrayRecord(network(work).state_dict()), num_rounds=count)
        starts.append(time.perf_counter())

    gpus = 0.5 if order.device == "cuda" else 0.0
    resources: Any = {"client_resources": {"num_cpus": 1, "num_gpus": gpus}}
    run_simulation(server_app, client_app, num_supernodes=work.clients, backend_config=resources)
    return [after - before for before, after in pairwise(starts[order.warm_up :])], trained[order.warm_up :]


if __name__ == "__main__":
    # Ray's workers look functions up in the module that they come from, and a program's own module is another there.
    from metavd.bench import with_flower  # noqa: PLW0406

    with_flower.main()
