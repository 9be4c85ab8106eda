"""metavd federate demo, run, link, node, app, certificates, key, rekey."""

from __future__ import annotations

import os
import tempfile
import time
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from .. import methods as catalogue
from ..errors import UserError
from .terminal import Reporter
from .train import print_results

if TYPE_CHECKING:
    from rich.table import Table

    from ..flower.local import Local

_PORT = 8000


@click.group("federate")
def federate_group() -> None:
    """Train where the data is: a federation on Flower, docs/deploy.md.

    \b
    metavd federate demo                             all of it on this machine, in one command
    metavd federate certificates DIR --host NAME     for the server: an authority and a certificate
    metavd federate link --certificates DIR          the server
    metavd federate key FILE                         for a site: its key
    metavd federate node --data npz:rows.npz ...     a site
    metavd federate app DIR                          tell Flower where the server is, and write a run config
    metavd federate run method=fedavg rounds=10      train, on the server; status 0 only for a finished run
    """  # noqa: D301 - click reads the backspace as "keep these lines"


def _ready() -> None:
    from ..serve.export import need

    need("flwr", "flower", "metavd federate")


# --- one machine -----------------------------------------------------------------------------------------------------


@federate_group.command("demo")
@click.option("--nodes", type=click.IntRange(1, 50), default=3, show_default=True, help="Clients, two processes each.")
@click.option("--rounds", type=click.IntRange(1, 10_000), default=5, show_default=True, help="Communication rounds.")
@click.option("--method", default="reptile+metavd+drop", show_default=True, help="See metavd methods.")
@click.option("--seed", type=int, default=0, show_default=True, help="Seed of everything random.")
@click.option("--set", "text", default=None, metavar="TEXT", help="Options of the method, such as 'beta=2 lr=0.05'.")
@click.option("--out", type=click.Path(), metavar="DIR", help="Folder for results. [default: below runs/]")
@click.option("--insecure", is_flag=True, help="Without TLS and without keys: anybody on this machine could join.")
def demo_command(
    *, nodes: int, rounds: int, method: str, seed: int, text: str | None, out: str | None, insecure: bool
) -> None:
    """Run a whole federation on this machine: certificates, keys, a server, clients, rounds, a report.

    Every client holds a share of scikit-learn's handwritten digits. All of it is stopped at the end, and only the
    results stay.
    """
    _ready()
    from ..flower.config import plan
    from ..runs.store import Store

    method = catalogue.check(method)
    folder = Path(out) if out else Path("runs") / time.strftime("federation-%Y%m%d-%H%M%S")
    if folder.exists() and any(folder.iterdir()):
        raise UserError(f"the folder {folder} is not empty; name a new one")
    chosen = text if text is not None else _shown(method, rounds)
    config = {
        "method": method, "set": f"unseen=0 {chosen}".strip(), "rounds": rounds, "seed": seed, "clients": nodes,
        "data": "digits", "out": str(folder.resolve()), "join-timeout": 120.0, "round-timeout": 300.0, "eval-every": 1,
        "identity": "name" if insecure else "key",
    }  # fmt: skip
    plan(config)  # wrong input is found before anything is started
    reporter = Reporter()
    began = time.monotonic()
    from ..flower.local import federation

    if insecure:
        reporter.note("insecure mode: no TLS, no keys; use it on this machine alone")
    with (
        tempfile.TemporaryDirectory(prefix="metavd-federation-") as scratch,
        federation(Path(scratch), secure=not insecure) as local,
    ):
        _start(local, nodes, reporter)
        with _watching(folder, rounds, reporter) as look:
            local.run(config, look)
    from ..report.page import write_report

    notes = write_report([folder], folder / "report.html", command="metavd federate demo")
    for note in notes:
        reporter.note(note)
    print_results([Store(folder).read_result()])
    click.echo(f"\nFiles: {folder}, with report.html; {time.monotonic() - began:.0f} s, and everything is stopped")


def _shown(method: str, rounds: int) -> str:
    """Return options with which a few rounds show what the method does: dropped weights from the second half on."""
    return f"rate=0.5 drop_from={rounds // 2}" if catalogue.traits(method).drops_from is not None else ""


def _start(local: Local, nodes: int, reporter: Reporter) -> None:
    names = [f"client-{index}" for index in range(nodes)]
    with reporter.err.status("certificates, keys and the SuperLink"):
        local.link()
        if local.secure:
            local.register(names)
    for index, name in enumerate(names):
        local.node(name, {"partition-id": index, "name": name})
    how = "TLS and node authentication" if local.secure else "neither TLS nor authentication"
    reporter.note(f"SuperLink at 127.0.0.1:{local.port} with {how}, and {nodes} SuperNodes, each with its own data")


@contextmanager
def _watching(folder: Path, rounds: int, reporter: Reporter) -> Iterator[Any]:
    """Show the rounds that are finished: a table that grows on a terminal, lines elsewhere."""
    from rich.live import Live

    from ..runs.store import Store

    store, shown = Store(folder), 0
    if not reporter.err.is_terminal:

        def lines() -> None:
            nonlocal shown
            for record in store.read_rounds()[shown:]:
                reporter.note("  " + "  ".join(f"{name} {text}" for name, text in _cells(record).items()))
                shown += 1

        yield lines
        return
    with Live(_table([], rounds), console=reporter.err, transient=True, refresh_per_second=4) as live:
        yield lambda: live.update(_table(store.read_rounds(), rounds))
    reporter.err.print(_table(store.read_rounds(), rounds))


def _cells(record: Mapping[str, Any]) -> dict[str, str]:
    """Return what a person sees of a round."""
    accuracy = (record.get("test") or {}).get("accuracy")
    layer = (record.get("sparsity") or {}).get("layer")
    return {
        "round": str(record["round"]),
        "answers": str(len(record["cohort"])),
        "loss": "-" if record["loss"] is None else f"{record['loss']:.3f}",
        "accuracy": "-" if accuracy is None else f"{accuracy:.1%}",
        "dropped": "-" if layer is None else f"{layer:.1%}",
        "kB down": f"{record['down'] / 1e3:.0f}",
        "kB up": f"{record['up'] / 1e3:.0f}",
        "seconds": f"{record['seconds']:.1f}",
    }


def _table(records: Sequence[Mapping[str, Any]], rounds: int) -> Table:
    from rich.table import Table

    waiting = "" if len(records) >= rounds else "; the next one is under way" if records else "; clients are starting"
    table = Table(title=f"{len(records)} of {rounds} rounds{waiting}", title_justify="left")
    blank = {"round": 0, "cohort": [], "loss": None, "down": 0, "up": 0, "seconds": 0.0}
    for name in _cells(blank):
        table.add_column(name, justify="right")
    for record in records:
        table.add_row(*_cells(record).values())
    return table


# --- several machines ------------------------------------------------------------------------------------------------


@federate_group.command("certificates")
@click.argument("folder", type=click.Path(file_okay=False), metavar="DIR")
@click.option("--host", "hosts", multiple=True, required=True, metavar="NAME",
              help="Name or address by which sites reach the server; repeatable.")  # fmt: skip
@click.option("--days", type=click.IntRange(1, 36_500), default=825, show_default=True, help="Until it expires.")
def certificates_command(*, folder: str, hosts: tuple[str, ...], days: int) -> None:
    """Make the server's certificate in DIR, and, where there is none yet, the authority that signs it."""
    _ready()
    from ..flower import security

    place = Path(folder)
    security.certificates(
        place, [*hosts, *(each for each in ("127.0.0.1", "localhost") if each not in hosts)], days=days
    )
    click.echo(f"{place / security.SERVER} for {', '.join(hosts)}; every site needs {place / security.CA}")


@federate_group.command("key")
@click.argument("path", type=click.Path(dir_okay=False), metavar="FILE")
def key_command(path: str) -> None:
    """Make a site's key: FILE stays at the site, FILE.pub goes to the server."""
    _ready()
    from ..flower import security

    public = security.node_key(Path(path))
    click.echo(f"{path} stays here; on the server: flwr supernode register {public.name} NAME-OF-THE-SUPERLINK")


@federate_group.command("rekey")
@click.argument("folder", type=click.Path(), metavar="OUT")
@click.argument("name", metavar="CLIENT")
@click.argument("public", type=click.Path(), metavar="NEW.pub")
def rekey_command(*, folder: str, name: str, public: str) -> None:
    """Let CLIENT (a name or number) of the run in OUT go on with a new key, while the run is stopped."""
    _ready()
    from ..flower import registry, security
    from ..runs.store import Store

    store = Store(Path(folder))
    path = store.folder / registry.FILE
    if not path.exists():
        raise UserError(f"{folder} holds no federation's run; name the folder out of its run config")
    with store.lock():
        known = registry.rekeyed(registry.load(path), name, registry.by_key(security.fingerprint(Path(public))))
        registry.save(path, known)
    click.echo(f"{path}: client {name} is known by {public} from now on")


@federate_group.command("app")
@click.argument("folder", type=click.Path(file_okay=False), metavar="DIR")
@click.option("--superlink", metavar="HOST:PORT", help="Also name this SuperLink in Flower's config, as `here`.")
@click.option("--certificates", type=click.Path(), metavar="DIR", help="Folder with ca.crt.")
@click.option("--insecure", is_flag=True, help="That SuperLink has no TLS.")
def app_command(*, folder: str, superlink: str | None, certificates: str | None, insecure: bool) -> None:
    """Write the Flower app that `metavd federate run DIR/metavd-app` starts: a run config, explained, and no code."""
    click.echo(_write_app(Path(folder)))
    if superlink is not None:
        _ready()
        from ..flower.local import connection
        from ..flower.security import CA

        if not insecure and certificates is None:
            raise UserError("--superlink needs --certificates DIR with the server's ca.crt, or --insecure")
        authority = None if insecure else (Path(str(certificates)) / CA).resolve()
        home = _flower_home()
        home.mkdir(parents=True, exist_ok=True)
        if (home / "config.toml").exists():
            raise UserError(f"{home / 'config.toml'} is there already; add the SuperLink to it by hand")
        (home / "config.toml").write_text(connection(superlink, authority))
        click.echo(home / "config.toml")


@federate_group.command("run")
@click.argument("words", nargs=-1, metavar="[APP] [KEY=VALUE]...")
@click.option("--superlink", default="here", show_default=True, help="Its name in Flower's config.")
def run_command(*, words: tuple[str, ...], superlink: str) -> None:
    """Train with the clients that are connected, show the run's log, and answer with the run's own outcome.

    APP is a folder that `metavd federate app` wrote; without it every key has its default. KEY=VALUE overrides a key,
    for example method=fedavg rounds=10 out=runs/first; docs/federation.md lists all. The same command goes on after
    the last round that was saved. Exit status 0 only for a finished run, 1 for one that failed, 2 for wrong input.
    """
    _ready()
    app = Path(words[0]) if words and "=" not in words[0] else None
    given = dict(_pair(word) for word in words[app is not None :])
    config = _app_config(app) | given
    from ..flower.config import plan
    from ..runs.store import Store

    chosen = plan(config)  # wrong input is found before anything is started
    _need_superlink(superlink)
    from ..flower.follow import follow
    from ..flower.local import QUIET

    # The SuperLink may have been started in another folder.
    out = str(Path(chosen.out).expanduser().resolve())
    values = {key: getattr(chosen, key.replace("-", "_")) for key in given} | {"out": out}
    with tempfile.TemporaryDirectory(prefix="metavd-app-") as scratch:
        if app is None:
            app = _write_app(Path(scratch))
        follow(
            app, values, superlink=superlink, environment={**QUIET, **os.environ},
            show=lambda line: click.echo(line, nl=False),
        )  # fmt: skip
    print_results([Store(Path(out)).read_result()])


def _pair(word: str) -> tuple[str, str]:
    key, equals, value = word.partition("=")
    if not key or not equals:
        raise UserError(f"{word!r} is no key=value of a run config; write for example rounds=10")
    return key, value


def _app_config(app: Path | None) -> dict[str, Any]:
    """Return the run config that an app's folder holds."""
    if app is None:
        return {}
    path = app / "pyproject.toml"
    try:
        return dict(tomllib.loads(path.read_text())["tool"]["flwr"]["app"]["config"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UserError(f"{path} is no app of metavd ({error}); write one with metavd federate app") from None


def _need_superlink(name: str) -> None:
    path = _flower_home() / "config.toml"
    try:
        known = tomllib.loads(path.read_text()).get("superlink", {})
    except (OSError, ValueError) as error:
        raise UserError(
            f"Flower's config {path} cannot be read ({error}); metavd federate app . --superlink HOST:PORT writes it"
        ) from None
    if not isinstance(known.get(name), dict):
        names = ", ".join(each for each, value in known.items() if isinstance(value, dict)) or "none"
        raise UserError(f"superlink is {name!r}, but {path} has {names}; name one of them with --superlink")


def _flower_home() -> Path:
    return Path(os.environ.get("FLWR_HOME", "~/.flwr")).expanduser()


def _write_app(folder: Path) -> Path:
    from ..flower.config import APP, app_toml

    place = folder / APP
    place.mkdir(parents=True, exist_ok=True)
    (place / "pyproject.toml").write_text(app_toml())
    return place


@federate_group.command("link")
@click.option("--certificates", type=click.Path(), metavar="DIR", help="What metavd federate certificates made.")
@click.option("--host", default="0.0.0.0", show_default=True, help="Address to listen on.")
@click.option("--port", type=click.IntRange(1, 65_535), default=_PORT, show_default=True)
@click.option("--database", type=click.Path(dir_okay=False), default="federation.db", show_default=True,
              help="File with the registered keys and the runs.")  # fmt: skip
@click.option("--insecure", is_flag=True, help="Without TLS and without keys: whoever reaches the port may join.")
def link_command(*, certificates: str | None, host: str, port: int, database: str, insecure: bool) -> None:
    """Serve a federation: a Flower SuperLink, with TLS and for registered nodes only.

    Runs are started and nodes registered from this machine alone, with flwr.
    """
    _ready()
    from ..flower import link, security

    arguments = ["--host", host, "--port", str(port), "--database", str(Path(database).resolve())]
    if insecure:
        Reporter().note("insecure mode: no TLS, no keys; whoever reaches the port may join and read everything")
        arguments.append("--insecure")
    elif certificates is None:
        raise UserError("a server needs --certificates DIR (see metavd federate certificates), or --insecure")
    else:
        names = {"ca-certfile": security.CA, "certfile": security.SERVER, "keyfile": security.SERVER_KEY}
        for option, name in names.items():
            path = Path(certificates).resolve() / name
            if not path.exists():
                raise UserError(f"{path} is not there; make it with metavd federate certificates")
            arguments += [f"--ssl-{option}", str(path)]
        arguments.append("--enable-supernode-auth")
    _quiet(1.0)
    link.main(arguments)


@federate_group.command("node")
@click.option("--superlink", required=True, metavar="HOST:PORT", help="The server.")
@click.option("--data", metavar="TEXT", help="The site's rows, such as npz:rows.npz or folder:photos.")
@click.option("--client", metavar="ID", help="Of data with several people, whose rows this site has.")
@click.option("--root", envvar="METAVD_DATA", metavar="DIR", help="Folder with the datasets' files.")
@click.option("--name", metavar="NAME", help="How the server's log calls this site.")
@click.option("--authority", type=click.Path(dir_okay=False), metavar="F", help="The server's ca.crt.")
@click.option("--key", type=click.Path(dir_okay=False), metavar="FILE", help="What metavd federate key made.")
@click.option("--no-train", is_flag=True, help="Be personalised and tested, but never trained with.")
@click.option("--device", default="cpu", show_default=True, help="cpu or cuda.")
@click.option("--partition-id", type=int, metavar="I", help="A share of the run's dataset in place of --data.")
@click.option("--poll", type=click.FloatRange(0.05, 60), default=1.0, show_default=True,
              help="Seconds between two looks for messages.")  # fmt: skip
@click.option("--port", type=click.IntRange(1, 65_535), default=9094, show_default=True,
              help="Of this machine alone; every node on it needs its own.")  # fmt: skip
@click.option("--insecure", is_flag=True, help="The server has neither TLS nor registered keys.")
def node_command(
    *, superlink: str, authority: str | None, key: str | None, insecure: bool, poll: float, port: int,
    no_train: bool, partition_id: int | None, **config: str | None,
) -> None:  # fmt: skip
    """Take part with data that stays here: a Flower SuperNode that runs metavd's code and nobody else's."""
    _ready()
    from ..flower import warm
    from ..flower.follow import pairs
    from ..flower.site import look

    values: dict[str, Any] = {name: value for name, value in config.items() if value is not None}
    if no_train:
        values["train"] = False
    if partition_id is not None:
        values["partition-id"] = partition_id
    if "data" in values:
        kind, colon, path = str(values["data"]).partition(":")
        if colon and Path(path).expanduser().exists():
            values["data"] = f"{kind}:{Path(path).expanduser().resolve()}"
    look(values)  # data that cannot be read is better known now than in the first round
    arguments = ["--superlink", superlink, "--port", str(port), "--node-config", pairs(values)]
    if insecure:
        Reporter().note("insecure mode: what is sent can be read and changed on its way")
        arguments.append("--insecure")
    elif authority is None or key is None:
        raise UserError("a node needs --authority ca.crt and --key FILE (see metavd federate key), or --insecure")
    else:
        arguments += ["--root-certificates", authority, "--auth-supernode-private-key", key]
    _quiet(poll)
    warm.main(arguments)


def _quiet(poll: float) -> None:
    """Let Flower report to nobody and install nothing, unless the operator has said otherwise."""
    from ..flower.local import QUIET
    from ..flower.warm import POLL

    for name, value in {**QUIET, POLL: str(poll)}.items():
        os.environ.setdefault(name, value)
