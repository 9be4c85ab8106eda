"""The command line: reads argv, calls the rest. The only place that knows about terminals and exit statuses.

A command's module is imported when the command is asked for, and what it works with when it is first used (`later`).
"""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

import click

from .. import methods
from ..errors import FailedError, UserError
from ..runs.settings import SETTINGS
from ..schema import asking, called, nearest
from ..version import VERSION
from .terminal import CommandGroup, Reporter

_HOMES = {
    "run": "train", "compare": "train", "show": "train", "methods": "catalogue", "datasets": "catalogue",
    "aggregations": "catalogue", "arena": "arena",
    "data": "data", "tune": "tune", "tune-all": "tune", "personalize": "use", "predict": "use", "trust": "use",
    "export": "use",
    "report": "report", "paper": "paper", "merge": "merge", "federate": "federate", "bench": "bench",
}  # fmt: skip
"""Each command's module, in the order of the help."""
_HELP = ["-h", "--help"]
_LEAVE = 10.0
"""Seconds that rank 0 has for saying what is wrong before another rank ends, since torchrun then ends all of them."""


class _Commands(CommandGroup):
    """Commands that are imported when they are asked for."""

    def list_commands(self, ctx: click.Context) -> list[str]:  # noqa: ARG002
        """Return the names of all commands."""
        return sorted(_HOMES)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:  # noqa: ARG002
        """Import a command."""
        if cmd_name not in _HOMES:
            return None
        home = import_module(f".{_HOMES[cmd_name]}", __name__)
        kinds = (f"{cmd_name.replace('-', '_')}_{kind}" for kind in ("command", "group"))
        found: click.Command = next(getattr(home, name) for name in kinds if hasattr(home, name))
        if cmd_name != "run" and _ranks()[1] > 1:
            raise UserError(f"torchrun shares one run among processes: metavd run; start {cmd_name} without it")
        # A command keeps the help option that it made for its first context, which may have been another's.
        found.context_settings.setdefault("help_option_names", _HELP)
        return found

    def invoke(self, ctx: click.Context) -> Any:
        """Run a command, which may be stopped by hand while it still imports; click would print an empty line first."""
        try:
            return super().invoke(ctx)
        except KeyboardInterrupt:
            raise FailedError("stopped") from None


@click.group(
    cls=_Commands,
    context_settings={"help_option_names": _HELP, "max_content_width": 100, "show_default": True},
)
@click.version_option(VERSION, prog_name="metavd")
def cli() -> None:
    """Personalised, Bayesian federated learning.

    \b
    metavd run                          train reptile+metavd on the embedded digits, beside fedavg
    metavd run maml+metavd --rounds 50  train one method
    metavd compare fedavg reptile       several methods and seeds, one table
    metavd tune reptile+metavd          search options on validation rows; tune-all: several methods alike
    metavd methods, metavd datasets     what can be trained, and on what
    metavd aggregations                 how clients' answers can become one
    metavd data show --data cifar10     who would hold what
    metavd show DIR                     a finished run again
    metavd report DIR...                one page of finished runs, with figures
    metavd personalize DIR --data NEW   a model for a new client; then predict, export
    metavd trust DIR                    coverage of sets of classes, and inputs of an unknown kind
    metavd paper T8                     a table of the paper, ours beside theirs
    metavd merge DIR OTHER...           join what several machines have run
    metavd federate demo                a real federation, with Flower, on this machine
    metavd bench                        how fast it is here, beside other ways
    """  # noqa: D301 - click reads the backspace as "keep these lines"


def main(argv: Sequence[str] | None = None) -> None:
    """Run the command line; exit status 0 only for a finished job, 2 for wrong input, 1 for failure."""
    Reporter.interrupted = False
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, _interrupt)
    Reporter.quiet = _ranks()[0] > 0
    if Reporter.quiet:  # torchrun started several of us: the first one speaks, all of them say what made them fail
        sys.stdout = Path(os.devnull).open("w")  # noqa: SIM115
    try:
        cli.main(args=argv, prog_name="metavd", standalone_mode=False)
    except click.NoSuchOption as error:
        _fail(f"there is no option {error.option_name}; {_meant(error)}", 2)
    except click.MissingParameter as error:
        _fail(
            f"{_name(error)} is missing; {error.ctx.command_path if error.ctx else 'metavd'} --help says what it is", 2
        )
    except click.BadParameter as error:
        _fail(_sentence(error), 2)
    except click.UsageError as error:  # a value too many or too few; click names it, and not what would be right
        where = "" if error.ctx is None else f"{error.ctx.command_path} "
        _fail(f"{_plain(error.format_message())}; {where}--help says what goes there", 2)
    except click.ClickException as error:
        _fail(error.format_message(), 2)
    except UserError as error:
        _fail(str(error), 2)
    except FailedError as error:
        _fail(str(error), 1)
    except (click.Abort, KeyboardInterrupt):
        _fail("stopped", 1)
    except BrokenPipeError:
        # Whoever read our output has seen enough; Python would complain once more when it closes it.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(128 + signal.SIGPIPE)
    except OSError as error:
        _fail(f"{error.strerror or error}{f': {error.filename}' if error.filename else ''}", 1)


def _meant(error: click.NoSuchOption) -> str:
    """Say which option may have been meant, or which setting, where the command takes --set."""
    params = [] if error.ctx is None else error.ctx.command.get_params(error.ctx)
    known = [each for one in params for each in one.opts if each.startswith("--")]
    every = dict(SETTINGS)
    for entry in methods.entries().values():
        every |= entry.options
    found = called(error.option_name.lstrip("-"), every) if "--set" in known else []
    own = {name: f"--{name.replace('_', '-')}" for name in found}
    right = [option if option in known else f"--set {name}=VALUE" for name, option in own.items()]
    return asking(right) if right else nearest(error.option_name, known)


def _interrupt(*_: object) -> None:
    Reporter.interrupted = True
    raise KeyboardInterrupt


def _sentence(error: click.BadParameter) -> str:
    """Name the value and what would be right, where an option is a number or a choice; other mistakes click names."""
    kind = None if error.param is None else error.param.type
    if error.param is not None and isinstance(kind, click.Path):  # click: "File 'x' is a directory."
        right = " or ".join(["a file"] * kind.file_okay + ["a folder"] * kind.dir_okay)
        there = " that exists" if kind.exists else ""
        return f"{_name(error)}: {_plain(error.message)}, but must be {right}{there}"
    value, refused, _ = error.message.rpartition(" is not ")  # so click says it of all these types
    if error.param is None or not refused:
        return error.format_message()
    if isinstance(kind, click.Choice):
        right = f"one of {', '.join(kind.choices)}"
    elif isinstance(kind, click.types.IntParamType | click.types.FloatParamType):
        right = "a whole number" if isinstance(kind, click.types.IntParamType) else "a number"
        if isinstance(kind, click.IntRange | click.FloatRange):
            right += f" {'above' if kind.min_open else 'from'} {kind.min}"
            right += f" to {kind.max}" if kind.max is not None else "" if kind.min_open else " on"
    else:
        return error.format_message()
    return f"{_name(error)} is {value}, but must be {right}"


def _plain(text: str) -> str:
    """Return click's sentence as the beginning of ours.

    >>> _plain("File 'x' is a directory.")
    "file 'x' is a directory"
    """
    return f"{text[:1].lower()}{text[1:].rstrip('.')}"


def _name(error: click.BadParameter) -> str:
    """Return what a person calls a parameter: --seeds, or FILE."""
    return "a value" if error.param is None else error.param.get_error_hint(error.ctx).strip("'")


def _fail(text: str, status: int) -> None:
    if status == 2 and Reporter.quiet:  # every rank finds the same mistake of a user's
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        time.sleep(_LEAVE)
    else:
        click.echo(f"metavd: {text}", err=True)
    sys.exit(status)


def _ranks() -> tuple[int, int]:
    """Return this process's number among those that torchrun started, and how many; 0 and 1 where it started none."""
    if "TORCHELASTIC_RUN_ID" not in os.environ:
        return 0, 1
    return int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
