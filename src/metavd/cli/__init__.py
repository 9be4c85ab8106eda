"""The command line: reads argv, calls the rest. The only place that knows about terminals and exit statuses."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Sequence

import click

from ..bench.measure import BenchError
from ..core.types import NonFiniteError
from ..data.cohort import ParticipationError
from ..data.partition import PartitionError
from ..data.source import SourceError
from ..engine.rounds import InterruptedRun
from ..flower.config import FailedRunError, FederationError
from ..methods import MethodError
from ..report.read import ReportError
from ..runs.settings import SpecError
from ..runs.store import StoreError
from ..runs.track import TrackError
from ..studies.paper import PaperError
from ..studies.tables import TableError
from ..studies.tune import TuneError
from ..version import VERSION
from .bench import bench_command
from .catalogue import datasets_command, methods_command
from .data import data_group
from .federate import federate_group
from .paper import paper_command
from .report import report_command
from .terminal import Reporter
from .train import compare_command, run_command, show_command
from .tune import tune_command
from .use import export_command, personalize_command, predict_command

WRONG_INPUT = (
    MethodError,
    SourceError,
    PartitionError,
    ParticipationError,
    SpecError,
    StoreError,
    PaperError,
    TableError,
    TuneError,
    TrackError,
    ReportError,
    BenchError,
    FederationError,
)
"""What is the user's to mend: one sentence, exit status 2."""


@click.group(
    invoke_without_command=True, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100}
)
@click.version_option(VERSION, prog_name="metavd")
@click.pass_context
def cli(context: click.Context) -> None:
    """Personalised, Bayesian federated learning.

    \b
    metavd run                          train reptile+metavd on the embedded digits, beside fedavg
    metavd run maml+metavd --rounds 50  train one method
    metavd compare fedavg reptile       several methods and seeds, one table
    metavd tune reptile+metavd          search options on validation rows
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
    personalize_command, predict_command, export_command, report_command, paper_command,
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
    except WRONG_INPUT as error:
        _fail(str(error), 2)
    except (InterruptedRun, NonFiniteError, FailedRunError) as error:
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
