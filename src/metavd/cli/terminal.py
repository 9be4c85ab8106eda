"""What all commands share: the terminal, how a run is shown on it, and how settings are read from argv."""

from __future__ import annotations

import math
import re
import shlex
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import click
from click.core import ParameterSource
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from .. import methods as catalogue
from ..errors import SpecError, UserError
from ..runs.settings import SETTINGS, Experiment, from_toml, with_settings
from ..schema import Value, nearest
from . import later

if TYPE_CHECKING:
    from ..engine.rounds import Record


class Finite(click.FloatRange):
    """A number in a range, of which nan would else be one."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        """Read it."""
        found = float(super().convert(value, param, ctx))
        if not math.isfinite(found):
            self.fail(f"{value!r} is not a number", param, ctx)
        return found


class CommandGroup(click.Group):
    """Commands under one word: alone it shows their help, and an unknown command names the nearest."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Read argv, where there is any."""
        return super().parse_args(ctx, args or ["--help"])

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """Find the command that is asked for, or say which one may have been meant."""
        known = self.list_commands(ctx)
        if args[0] not in known and not args[0].startswith("-"):
            asked = " ".join([*ctx.command_path.split()[1:], args[0]])
            raise UserError(f"there is no command {asked!r}; {nearest(args[0], known)}")
        return super().resolve_command(ctx, args)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """List the commands, each with the whole first sentence of its help; click cuts it at the end of a line."""
        found = [(name, self.get_command(ctx, name)) for name in self.list_commands(ctx)]
        rows = [(name, command.get_short_help_str(limit=1000)) for name, command in found if command is not None]
        with formatter.section("Commands"):
            formatter.write_dl(rows)


FILE, FOLDER, PLACE = click.Path(dir_okay=False), click.Path(file_okay=False), click.Path()
COUNT = click.IntRange(1, 1000)
_WIDE = 120
"""Columns of a table that does not go to a terminal."""
_SILENCE = 30.0
"""Seconds without a line after which a round is reported, so that a log shows that the run lives."""


def console() -> Console:
    """Return standard output, wide enough for tables where it is no terminal."""
    out = Console(highlight=False)
    return out if out.is_terminal else Console(highlight=False, width=_WIDE)


def print_table(
    headings: Sequence[str], rows: Iterable[Sequence[str]], *, title: str | None = None, numbers: int = 100, **look: Any
) -> None:
    """Print a table, whose columns from `numbers` on stand to the right."""
    table = Table(title=title, title_justify="left", **look)
    for place, heading in enumerate(headings):
        table.add_column(heading, justify="right" if place >= numbers else "left")
    for row in rows:
        table.add_row(*row)
    console().print(table)


def command_line() -> str:
    """Return the command that was given, as a page names it."""
    return f"metavd {shlex.join(sys.argv[1:])}"


def folder_name(text: str) -> str:
    """Return a text in a form that folders can have; paths, and names of a table, may hold anything."""
    return re.sub(r"[^\w.+=-]+", "-", text)


def folder_for(e: Experiment, sign: str, kind: str = "") -> Path:
    """Return runs/DATA-METHOD-sSEED-SIGN: the same command always has the same folder."""
    return Path("runs") / f"{kind}{folder_name(e.data)[-60:]}-{e.method}-s{e.seed}-{sign}"


class Shown:
    """Lines on standard error, and on a terminal a bar below them; the bar is away after `with`."""

    quiet = False
    """Whether another process speaks for this one."""

    def __init__(self) -> None:
        self.err = Console(stderr=True, highlight=False, quiet=self.quiet)
        self.bar: Progress | None = None
        self.total = 0
        self.said = time.monotonic()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def show(self, title: str, total: int, done: int) -> None:
        """Show the bar, where there is a terminal."""
        self.stop()
        if self.err.is_terminal:
            self.bar = Progress(
                TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TextColumn("{task.fields[text]}"),
                TimeRemainingColumn(), console=self.err, transient=True,
            )  # fmt: skip
            self.bar.add_task(title, total=total, completed=done, text="")
            self.bar.start()

    def move(self, **fields: Any) -> bool:
        """Move the bar; False where there is none."""
        if self.bar is not None:
            self.bar.update(self.bar.task_ids[0], **fields)
        return self.bar is not None

    def silent(self) -> bool:
        """Whether a line is due, so that a log shows that the work goes on."""
        return time.monotonic() - self.said > _SILENCE

    def note(self, text: str) -> None:
        """Print a line beside the bar."""
        self.said = time.monotonic()
        self.err.print(text, markup=False, soft_wrap=True)

    def stop(self) -> None:
        """Take the bar away."""
        if self.bar is not None:
            self.bar.stop()
            self.bar = None


class Reporter(Shown):
    """Tells a person how a run goes."""

    interrupted = False
    """Whether the person wants to stop. Python drops an interrupt that meets it in a callback; this word stays."""

    def __init__(self) -> None:
        super().__init__()
        self.began = 0.0
        self.first = 0
        self.accuracy = ""
        self.loss = ""

    def start(self, experiment: Experiment, done: int) -> None:
        """Say what begins."""
        self.total, self.first, self.accuracy = experiment.rounds, done, ""
        self.began = time.monotonic()
        title = f"{experiment.method} on {experiment.data}, seed {experiment.seed}"
        self.show(title, self.total, done)
        if self.bar is None:
            self.note(
                f"{title}: {self.total} round{'s' * (self.total != 1)}"
                + (f", going on after round {done}" if done else "")
            )

    @staticmethod
    def heed() -> None:
        """Stop if the person wants to."""
        if Reporter.interrupted:
            raise KeyboardInterrupt

    def round(self, record: Record) -> None:
        """Move the bar."""
        self.heed()
        self.loss = "no answers" if record.loss is None else f"loss {record.loss:.3f}"
        if not self.move(completed=record.round, text=f"{self.loss}{self.accuracy}") and self.silent():
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
        left = (time.monotonic() - self.began) / max(round - self.first, 1) * (self.total - round)
        self.note(f"  round {round}/{self.total}  {self.loss}  {shown}{left:.0f} s left")


def settings_of(config: str | None, pairs: Sequence[str], given: Mapping[str, Any]) -> dict[str, Any]:
    """Collect settings: from the file, over them --set and the command's own options, which may not contradict it."""
    values, said = from_toml(Path(config)) if config else {}, dict[str, str]()
    for pair in pairs:
        key, equals, value = pair.partition("=")
        if not equals or not key:
            raise SpecError(f"--set got {pair!r}, but needs key=value, for example --set lr=0.05")
        key, value = key.strip().replace("-", "_"), value.strip()
        if said.setdefault(key, value) != value:
            raise SpecError(f"{key} is given twice, as {key}={said[key]} and as {key}={value}; say it once")
    values |= said
    given = {key: value for key, value in given.items() if value is not None}
    if "root" in values and click.get_current_context().get_parameter_source("root") is ParameterSource.ENVIRONMENT:
        given.pop("root", None)  # a file's or a setting's word is closer than the environment's
    for key in given.keys() & said.keys():
        if str(given[key]) != said[key]:
            raise SpecError(f"{key} is given twice, as --{key} {given[key]} and as {key}={said[key]}; say it once")
    return values | given


def words(given: Sequence[str]) -> tuple[list[str], list[str]]:
    """Tell methods from settings: `--set lr=0.1 beta=2` may go on without another --set."""
    return [word for word in given if "=" not in word], [word for word in given if "=" in word]


def experiment_of(settings: Mapping[str, Any], method: str | None) -> Experiment:
    """Build the experiment that a command asks for."""
    base = with_settings(Experiment(), {"method": catalogue.check(method)}) if method is not None else Experiment()
    return with_settings(base, {key: value for key, value in settings.items() if method is None or key != "method"})


Command = Callable[..., None]
Decorator = Callable[[Command], Command]


def adding(*options: Decorator) -> Decorator:
    """Return a decorator that adds several options to a command, the first one first in its help."""

    def add(command: Command) -> Command:
        for option in reversed(options):
            command = option(command)
        return command

    return add


def setting(name: str, metavar: str, default: str = "", value: Value | None = None, **more: Any) -> Decorator:
    """Return the option of a command that sets a setting of the experiment, described as the setting is.

    Where it is not given, the command gets the value: None, unless the command has a default of its own.
    """
    about = SETTINGS[name]
    kind = type(about.default)
    shown = (
        default
        or (str(value) if value is not None else "")
        or ("the dataset's" if about.from_data is not None else str(about.default))
    )
    text = f"{about.help[0].upper()}{about.help[1:]}. [default: {shown}]"
    return click.option(
        f"--{name.replace('_', '-')}",
        name,
        type=kind,
        default=value,
        show_default=False,
        metavar=metavar,
        help=text,
        **more,
    )


where = adding(setting("data", "NAME"), setting("root", "DIR", "METAVD_DATA, else data", envvar="METAVD_DATA"))
"""Which data is meant and where it lies."""

how = adding(
    setting("seed", "S"),
    click.option("--config", type=PLACE, metavar="F.toml", help="Settings from a file, as config.toml."),
    click.option("--set", "pairs", multiple=True, metavar="KEY=VALUE",
                 help="Any setting or option of the method, for example --set beta=2; repeatable."),
)  # fmt: skip
"""Everything that has no option of its own."""

shared = adding(
    where,
    how,
    setting("rounds", "N"),
    setting("weights", "FILE", "drawn by the seed"),
    click.option("--out", type=PLACE, metavar="DIR", help="Folder for results. [default: below runs/]"),
    setting("device", "D"),
)
"""What `run` and `compare` share."""


def _share(_: click.Context, __: click.Parameter, value: str | None) -> later.studies_many.Share | None:
    """Read a share of a study, "3/16"; None: all of it."""
    return None if value in {None, "1/1"} else later.studies_many.Share.of(str(value))


_sliced = click.option(
    "--slice", "share", callback=_share, metavar="K/N",
    help="Run only the K-th of N shares of the missing runs, for several machines; see docs/scale.md.",
)  # fmt: skip


def _until(_: click.Context, __: click.Parameter, value: float | None) -> float | None:
    """Read in how many minutes all runs must be over, as a time of the clock `time.monotonic`."""
    return None if value is None else time.monotonic() + 60 * value


_timed = click.option(
    "--minutes", "until", type=Finite(0, min_open=True), callback=_until, metavar="M",
    help="Start no run that is expected to end more than M minutes from now, judged by those before it.",
)  # fmt: skip
"""What is left is for the same command another time."""


tuned = adding(
    click.option("--tuned", is_flag=True,
                 help="Use the settings that tune-all chose (results/tuned) for this method, data, test rows and "
                      "partition, or the nearest ones; the command says which."),
    click.option("--tuned-from", type=PLACE, metavar="DIR", help="The same, from another folder."),
)  # fmt: skip
"""Of commands that may take tuned settings; `tuned_folder` reads both options."""


def tuned_folder(*, tuned: bool, tuned_from: str | None) -> Path | None:
    """Return the folder of tuned settings that a command shall use; None: the methods' defaults."""
    if not (tuned or tuned_from):
        return None
    folder = Path(tuned_from) if tuned_from else later.studies_tuned.FOLDER
    if not folder.is_dir():
        raise SpecError(f"there are no tuned settings in {folder}; metavd tune-all METHOD --page F.md writes some")
    return folder


at_once = click.option(
    "--jobs", type=click.IntRange(0, 1000), default=0, show_default=False, metavar="P",
    help="Runs at once, each in its own process. [default: 4 on a GPU, 1 on a CPU]",
)  # fmt: skip
many = adding(at_once, _sliced, _timed)
"""Of commands whose runs may be spread over many processes and machines."""
