"""The workload in pfl's simulation: `python -m metavd.bench.with_pfl` reads an order and prints its times.

Clients, epochs, batches, clipping and weighting are pfl's own; only network, data and cohorts are ours. Runs under any
interpreter that has pfl, torch and NumPy.
"""

from __future__ import annotations

import json
import os
import sys
import time
from itertools import cycle, pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from metavd.bench.plain import images, network, prepared, slices
from metavd.bench.workload import Assignment, from_json, peak_mb


class Net(nn.Module):
    """The network with the two functions that pfl asks a module for."""

    def __init__(self, order: Assignment) -> None:
        super().__init__()
        self.body = network(order.work)
        self.order = order
        self.seen = 0
        """Images that a loss was taken of."""
        if order.tuned:
            self.to(memory_format=torch.channels_last)  # type: ignore[call-overload]

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        """Return the mean loss of stored images; pfl hands over all arrays as floats."""
        self.seen += len(y)
        return functional.cross_entropy(self.body(prepared(x, self.order.work, tuned=self.order.tuned)), y.long())

    def metrics(self, x: Tensor, y: Tensor) -> dict[str, Any]:
        """Return what an evaluation counts; none is timed."""
        from pfl.metrics import Weighted  # noqa: PLC0415 (this module is also read where pfl is not installed)

        return {"loss": Weighted(self.loss(x, y).item() * len(y), len(y))}


def main() -> None:
    """Read an order, measure, print."""
    order = from_json(sys.stdin.read())
    os.environ["PFL_PYTORCH_DEVICE"] = order.device
    torch.manual_seed(0)
    seconds, trained = rounds(order)
    print(json.dumps({"seconds": seconds, "trained": trained, "memory_mb": peak_mb()}))


def rounds(order: Assignment) -> tuple[list[float], list[int]]:
    """Return the seconds of each timed round, and the images that it trained on."""
    from pfl.aggregate.simulate import SimulatedBackend  # noqa: PLC0415
    from pfl.aggregate.weighting import WeightByDatapoints  # noqa: PLC0415
    from pfl.algorithm.base import NNAlgorithmParams  # noqa: PLC0415
    from pfl.algorithm.federated_averaging import FederatedAveraging  # noqa: PLC0415
    from pfl.callback.base import TrainingProcessCallback  # noqa: PLC0415
    from pfl.data.dataset import Dataset  # noqa: PLC0415
    from pfl.data.federated_dataset import FederatedDataset  # noqa: PLC0415
    from pfl.hyperparam.base import NNTrainHyperParams  # noqa: PLC0415
    from pfl.metrics import Metrics  # noqa: PLC0415
    from pfl.model.pytorch import PyTorchModel  # noqa: PLC0415

    work = order.work
    x, y = images(work)
    held = slices(order.sizes)
    asked = cycle(client for cohort in order.cohorts for client in cohort)
    data = FederatedDataset(lambda client: Dataset([x[held[client]], y[held[client]]], user_id=str(client)),
                            lambda: next(asked))  # fmt: skip
    ends: list[float] = []
    seen: list[int] = []

    class Clock(TrainingProcessCallback):  # type: ignore[misc]
        def after_central_iteration(self, *_: Any, **__: Any) -> tuple[bool, Metrics]:
            ends.append(time.perf_counter())
            seen.append(net.seen)
            timed = len(ends) - 1 - order.warm_up
            late = timed >= 2 and ends[-1] - ends[order.warm_up] > order.budget
            return timed >= order.rounds or late, Metrics()

    net = Net(order)
    model = PyTorchModel(net, torch.optim.SGD, torch.optim.SGD(net.parameters(), lr=1.0))
    FederatedAveraging().run(
        NNAlgorithmParams(order.warm_up + order.rounds + 1, 10**9, work.cohort, 0),
        SimulatedBackend(data, data, [WeightByDatapoints()]),
        model,
        NNTrainHyperParams(
            local_batch_size=work.batch,
            local_num_epochs=work.epochs,
            local_learning_rate=work.lr,
            local_max_grad_norm=work.clip,
        ),
        None,
        callbacks=[Clock()],
        send_metrics_to_platform=False,
    )
    # The first round evaluates, whatever the frequency; it is one more of warm-up.
    seconds, trained = ([after - before for before, after in pairwise(each[order.warm_up :])] for each in (ends, seen))
    return seconds, [int(count) for count in trained]


if __name__ == "__main__":
    main()
