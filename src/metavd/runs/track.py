"""Tell other programs how a run goes on. A tracker is a listener; a new one is one function and one entry here.

A tracker gets the run's folder and the experiment, and writes nothing before the run starts: only then is it sure
that the folder is this run's.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from ..container import write_atomic
from ..engine.rounds import Listener, Record, Silent
from ..errors import UserError
from ..extras import need
from .settings import Experiment, content, spec_hash, to_toml

Tracker = Callable[[Path, Experiment], Listener]
Write = Callable[[dict[str, float], int, bool], None]
"""Takes numbers by name, the round they belong to, and whether they are the last."""


class _Both:
    """Listeners that hear the same."""

    def __init__(self, *listeners: Listener) -> None:
        self.listeners = listeners

    def start(self, experiment: Experiment, done: int) -> None:
        for listener in self.listeners:
            listener.start(experiment, done)

    def round(self, record: Record) -> None:
        for listener in self.listeners:
            listener.round(record)

    def evaluation(self, round: int, summary: Mapping[str, Any]) -> None:
        for listener in self.listeners:
            listener.evaluation(round, summary)

    def note(self, text: str) -> None:
        for listener in self.listeners:
            listener.note(text)


def both(*listeners: Listener) -> Listener:
    """Return one listener that tells all of them, in this order."""
    return listeners[0] if len(listeners) == 1 else _Both(*listeners)


def numbers(summary: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, float]]:
    """Yield the finite numbers of a nested mapping, named by their way in; lists and texts are no curves.

    >>> list(numbers({"test": {"accuracy": 0.5, "nll": None}, "gap": 0.1, "cohort": [1, 2]}))
    [('test/accuracy', 0.5), ('gap', 0.1)]
    """
    for key, value in summary.items():
        if isinstance(value, Mapping):
            yield from numbers(value, f"{prefix}{key}/")
        elif isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value):
            yield f"{prefix}{key}", float(value)


class _Curves(Silent):
    """Turns what a run tells into numbers by name. `begin` gets the experiment and the rounds that are done."""

    def __init__(self, begin: Callable[[Experiment, int], Write]) -> None:
        self.begin = begin

    def start(self, experiment: Experiment, done: int) -> None:
        self.rounds, self.write = experiment.rounds, self.begin(experiment, done)

    def round(self, record: Record) -> None:
        told = {
            "train/loss": record.loss, "train/clients": len(record.cohort), "train/lost": len(record.lost),
            "bytes/down": record.down, "bytes/up": record.up,
        }  # fmt: skip
        self.write(dict(numbers(told)), record.round, False)

    def evaluation(self, round: int, summary: Mapping[str, Any]) -> None:
        measured = {key: value for key, value in summary.items() if isinstance(value, Mapping) or key == "gap"}
        self.write(dict(numbers(measured)), round, round >= self.rounds)


def tensorboard(folder: Path, experiment: Experiment) -> Listener:  # noqa: ARG001 - told again at the start
    """Return a listener that writes event files to FOLDER/tensorboard; what a resumed run repeats is taken back."""
    need("tensorboard", "track", "--track tensorboard")
    from torch.utils import tensorboard as board  # noqa: PLC0415 - it imports the package

    def begin(experiment: Experiment, done: int) -> Write:
        writer = board.SummaryWriter(str(folder / "tensorboard"), purge_step=done + 1)
        writer.add_text("config.toml", f"```\n{to_toml(experiment)}```", done)
        writer.flush()

        def write(values: dict[str, float], round: int, last: bool) -> None:  # noqa: ARG001
            for name, value in values.items():
                writer.add_scalar(name, value, round)
            writer.flush()  # a run may be killed at any time, and who watches it wants to see it

        return write

    return _Curves(begin)


def mlflow(folder: Path, experiment: Experiment) -> Listener:  # noqa: ARG001
    """Return a listener that tells MLflow, where MLFLOW_TRACKING_URI says; a resumed run goes on in its MLflow run."""
    flow = need("mlflow", "mlflow", "--track mlflow")

    def begin(experiment: Experiment, done: int) -> Write:
        client, known = flow.MlflowClient(), folder / "mlflow.txt"
        try:
            if not done or not known.exists():
                group = client.get_experiment_by_name("metavd")
                group = group.experiment_id if group else client.create_experiment("metavd")
                run = client.create_run(group, run_name=folder.name).info.run_id
                for name, value in _settings(experiment).items():
                    client.log_param(run, name, value)
                write_atomic(known, run.encode())
            run = known.read_text()
            client.update_run(run, "RUNNING")
        except flow.MlflowException as error:
            raise UserError(f"--track mlflow: {flow.get_tracking_uri()} does not take the run ({error})") from None

        def write(values: dict[str, float], round: int, last: bool) -> None:
            for name, value in values.items():
                client.log_metric(run, name, value, step=round)
            if last:
                client.set_terminated(run)

        return write

    return _Curves(begin)


def wandb(folder: Path, experiment: Experiment) -> Listener:  # noqa: ARG001
    """Return a listener that tells Weights & Biases; with WANDB_MODE=offline it writes to FOLDER/wandb alone."""
    bias = need("wandb", "wandb", "--track wandb")

    def begin(experiment: Experiment, done: int) -> Write:  # noqa: ARG001
        try:
            run = bias.init(
                project="metavd", name=folder.name, dir=folder, config=_settings(experiment), resume="allow",
                id=spec_hash(experiment), settings=bias.Settings(console="off", silent=True),
            )  # fmt: skip
        except bias.Error as error:
            raise UserError(f"--track wandb: {error}; log in, or set WANDB_MODE=offline") from None
        run.define_metric("*", step_metric="round")  # its own step only rises, and a resumed run repeats rounds

        def write(values: dict[str, float], round: int, last: bool) -> None:
            run.log({**values, "round": round})
            if last:
                run.finish()

        return write

    return _Curves(begin)


def _settings(experiment: Experiment) -> dict[str, Any]:
    """Return settings and options side by side."""
    plain = content(experiment)
    return {**plain.pop("options"), **plain}


TRACKERS: dict[str, Tracker] = {"tensorboard": tensorboard, "mlflow": mlflow, "wandb": wandb}
