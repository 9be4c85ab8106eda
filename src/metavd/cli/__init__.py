"""The command line: reads argv, calls the rest. The only place that knows about terminals and exit statuses.

A command imports what it runs when it runs, so that every --help answers at once.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Sequence
from typing import Any

import click

from ..errors import FailedError, UserError
from ..version import VERSION
from .bench import bench_command
from .catalogue import datasets_command, methods_command
from .data import data_group
from .federate import federate_group
from .halving import tune_all_command
from .paper import paper_command
from .report import report_command
from .terminal import Reporter
from .train import compare_command, run_command, show_command
from .tune import tune_command
from .use import export_command, personalize_command, predict_command


class _Commands(click.Group):
    """Commands of which each may be stopped by hand while it still imports; click would print an empty line first."""

    def invoke(self, ctx: click.Context) -> Any:
        """Run a command."""
        try:
            return super().invoke(ctx)
        except KeyboardInterrupt:
            raise FailedError("stopped") from None


@click.group(
    cls=_Commands,
    invoke_without_command=True,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
)
@click.version_option(VERSION, prog_name="metavd")
@click.pass_context
def cli(context: click.Context) -> None:
    """Personalised, Bayesian federated learning.

    \b
    metavd run                          train reptile+metavd on the embedded digits, beside fedavg
    metavd run maml+metavd --rounds 50  train one method
    metavd compare fedavg reptile       several methods and seeds, one table
    metavd tune reptile+metavd          search options on validation rows; tune-all: several methods alike
    metavd methods, metavd datasets     what can be trained, and on what
    metavd data show --data cifar10     who would hold what
    metavd show DIR                     a finished run again
    metavd report DIR...                one page of finished runs, with figures
    metavd personalize DIR --data NEW   a model for a new client; then predict, export
    metavd paper T8                     a table of the paper, ours beside theirs
    metavd federate demo                a real federation, with Flower, on this machine
    metavd bench                        how fast it is here, beside other ways
    """  # noqa: D301 - click reads the backspace as "keep these lines"
    if context.invoked_subcommand is None:
        click.echo(context.get_help())


for command in (
    run_command, compare_command, show_command, methods_command, datasets_command, data_group, tune_command,
    tune_all_command, personalize_command, predict_command, export_command, report_command, paper_command,
    federate_group,
    bench_command,
):  # fmt: skip
    cli.add_command(command)


def main(argv: Sequence[str] | None = None) -> None:
    """Run the command line; exit status 0 only for a finished job, 2 for wrong input, 1 for failure."""
    Reporter.interrupted = False
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, _interrupt)
    try:
        cli.main(args=argv, prog_name="metavd", standalone_mode=False)
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


def _interrupt(*_: object) -> None:
    Reporter.interrupted = True
    raise KeyboardInterrupt


def _fail(text: str, status: int) -> None:
    click.echo(f"metavd: {text}", err=True)
    sys.exit(status)
