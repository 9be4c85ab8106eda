"""What all commands share: the terminal, how a run is shown on it, and how settings are read from argv."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from click.core import ParameterSource

from .. import methods as catalogue
from ..errors import SpecError
from ..runs.settings import SETTINGS, Experiment, from_toml, with_settings

if TYPE_CHECKING:
    from rich.console import Console
    from rich.progress import Progress, TaskID

    from ..engine.rounds import Record

_WIDE = 120
"""Columns of a table that does not go to a terminal."""
_SILENCE = 30.0
"""Seconds without a line after which a round is reported, so that a log shows that the run lives."""


def console() -> Console:
    """Return standard output, wide enough for tables where it is no terminal."""
    from rich.console import Console

    out = Console(highlight=False)
    return out if out.is_terminal else Console(highlight=False, width=_WIDE)


class Reporter:
    """Tells a person how a run goes: a bar on a terminal, plain lines elsewhere."""

    interrupted = False
    """Whether the person wants to stop. Python drops an interrupt that meets it in a callback; this word stays."""

    def __init__(self) -> None:
        from rich.console import Console

        self.err = Console(stderr=True, highlight=False)
        self.bar: Progress | None = None
        self.task: TaskID | None = None
        self.total = 0
        self.began = self.said = 0.0
        self.first = 0
        self.accuracy = ""
        self.loss = ""

    def start(self, experiment: Experiment, done: int) -> None:
        """Say what begins."""
        self.stop()
        self.total, self.first, self.accuracy = experiment.rounds, done, ""
        self.began = self.said = time.monotonic()
        title = f"{experiment.method} on {experiment.data}, seed {experiment.seed}"
        if self.err.is_terminal:
            from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

            self.bar = Progress(
                TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TextColumn("{task.fields[text]}"),
                TimeRemainingColumn(), console=self.err, transient=True,
            )  # fmt: skip
            self.task = self.bar.add_task(title, total=self.total, completed=done, text="")
            self.bar.start()
        else:
            self.note(f"{title}: {self.total} rounds" + (f", going on after round {done}" if done else ""))

    def round(self, record: Record) -> None:
        """Move the bar."""
        if Reporter.interrupted:
            raise KeyboardInterrupt
        self.loss = "no answers" if record.loss is None else f"loss {record.loss:.3f}"
        if self.bar is not None and self.task is not None:
            self.bar.update(self.task, completed=record.round, text=f"{self.loss}{self.accuracy}")
        elif time.monotonic() - self.said > _SILENCE:
            self._line(record.round, "")

    def evaluation(self, round: int, summary: Mapping[str, Any]) -> None:
        """Show an evaluation."""
        shown = "  ".join(
            f"{name} {summary[name]['accuracy']:.1%}"
            for name in ("test", "unseen")
            if summary[name]["accuracy"] is not None
        )
        self.accuracy = f"  {shown}" if shown else ""
        if self.bar is None:
            self._line(round, f"{shown}  ")
        elif round >= self.total:
            self.stop()

    def _line(self, round: int, shown: str) -> None:
        self.said = time.monotonic()
        left = (self.said - self.began) / max(round - self.first, 1) * (self.total - round)
        self.note(f"  round {round}/{self.total}  {self.loss}  {shown}{left:.0f} s left")

    def note(self, text: str) -> None:
        """Print a line beside the bar."""
        self.err.print(text, markup=False, soft_wrap=True)

    def stop(self) -> None:
        """Take the bar away."""
        if self.bar is not None:
            self.bar.stop()
            self.bar = None


def settings_of(config: str | None, pairs: Sequence[str], given: Mapping[str, Any]) -> dict[str, Any]:
    """Collect settings: from the file, over them --set, over them the command's own options."""
    values = from_toml(Path(config)) if config else {}
    for pair in pairs:
        key, equals, value = pair.partition("=")
        if not equals or not key:
            raise SpecError(f"--set got {pair!r}, but needs key=value, for example --set lr=0.05")
        values[key.strip().replace("-", "_")] = value.strip()
    given = {key: value for key, value in given.items() if value is not None}
    if "root" in values and click.get_current_context().get_parameter_source("root") is ParameterSource.ENVIRONMENT:
        given.pop("root", None)  # a file's or a setting's word is closer than the environment's
    return values | given


def words(given: Sequence[str]) -> tuple[list[str], list[str]]:
    """Tell methods from settings: `--set lr=0.1 beta=2` may go on without another --set."""
    return [word for word in given if "=" not in word], [word for word in given if "=" in word]


def experiment_of(settings: Mapping[str, Any], method: str | None) -> Experiment:
    """Build the experiment that a command asks for."""
    base = with_settings(Experiment(), {"method": catalogue.check(method)}) if method else Experiment()
    return with_settings(base, {key: value for key, value in settings.items() if not (method and key == "method")})


Command = Callable[..., None]
Decorator = Callable[[Command], Command]


def adding(*options: Decorator) -> Decorator:
    """Return a decorator that adds several options to a command, the first one first in its help."""

    def add(command: Command) -> Command:
        for option in reversed(options):
            command = option(command)
        return command

    return add


def setting(name: str, metavar: str, default: str = "", **more: Any) -> Decorator:
    """Return the option of a command that sets a setting of the experiment, described as the setting is."""
    about = SETTINGS[name]
    kind = type(about.default)
    shown = default or ("the dataset's" if about.from_data is not None else str(about.default))
    text = f"{about.help[0].upper()}{about.help[1:]}. [default: {shown}]"
    return click.option(
        f"--{name.replace('_', '-')}", name, type=kind, default=None, metavar=metavar, help=text, **more
    )


where = adding(setting("data", "NAME"), setting("root", "DIR", "METAVD_DATA, else data", envvar="METAVD_DATA"))
"""Which data is meant and where it lies."""

how = adding(
    setting("seed", "S"),
    click.option("--config", type=click.Path(), metavar="F.toml", help="Settings from a file, as config.toml."),
    click.option("--set", "pairs", multiple=True, metavar="KEY=VALUE",
                 help="Any setting or option of the method, for example --set beta=2; repeatable."),
)  # fmt: skip
"""Everything that has no option of its own."""

shared = adding(
    where,
    how,
    setting("rounds", "N"),
    click.option("--out", type=click.Path(), metavar="DIR", help="Folder for results. [default: below runs/]"),
    setting("device", "D"),
)
"""What `run` and `compare` share."""


at_once = click.option(
    "--jobs", type=click.IntRange(0, 1000), default=0, metavar="P",
    help="Runs at once, each in its own process. [default: 4 on a GPU, 1 on a CPU]",
)  # fmt: skip
"""Of commands that carry out many runs."""
