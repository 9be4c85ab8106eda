"""metavd federate demo, run, link, node, app, allow, certificates, key, rekey, rows, nodes, audit."""

from __future__ import annotations

import os
import sys
import tempfile
import time
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import click
from rich.console import Console
from rich.live import Live
from rich.markup import escape
from rich.table import Table

from .. import methods as catalogue
from ..errors import UserError
from ..extras import need
from . import later
from .terminal import FILE, FOLDER, PLACE, CommandGroup, Finite, Reporter, setting
from .train import print_results

_PORTS = click.IntRange(1, 65_535)


@click.group("federate", cls=CommandGroup)
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
    metavd federate audit OUT                        verify what a run's log says of its sites
    """  # noqa: D301 - click reads the backspace as "keep these lines"


def _ready() -> None:
    need("flwr", "flower", "metavd federate")


# --- one machine -----------------------------------------------------------------------------------------------------


@federate_group.command("demo")
@click.option("--nodes", type=click.IntRange(1, 50), default=3, help="Clients, two processes each.")
@setting("rounds", "N", value=5)
@setting("method", "METHOD", value="reptile+metavd+drop")
@setting("seed", "S", value=0)
@click.option("--set", "text", default=None, metavar="TEXT", help="Options of the method, such as 'beta=2 lr=0.05'.")
@click.option("--out", type=PLACE, metavar="DIR", help="Folder for results. [default: below runs/]")
@click.option("--insecure", is_flag=True, help="Without TLS and without keys: anybody on this machine could join.")
def demo_command(
    *, nodes: int, rounds: int, method: str, seed: int, text: str | None, out: str | None, insecure: bool
) -> None:
    """Run a whole federation on this machine: certificates, keys, a server, clients, rounds, a report.

    Every client holds a share of scikit-learn's handwritten digits. All of it is stopped at the end, and only the
    results stay.
    """
    _ready()
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
    later.flower_config.run_config(config)  # wrong input is found before anything is started
    reporter = Reporter()
    began = time.monotonic()
    if insecure:
        reporter.note("insecure mode: no TLS, no keys; use it on this machine alone")
    with (
        tempfile.TemporaryDirectory(prefix="metavd-federation-") as scratch,
        later.flower_local.federation(Path(scratch), secure=not insecure) as local,
    ):
        _start(local, nodes, reporter)
        with _watching(folder, rounds, reporter) as look:
            local.run(config, look)
    notes = later.report_page.write_report([folder], folder / "report.html", command="metavd federate demo")
    for note in notes:
        reporter.note(note)
    print_results([later.runs_store.Store(folder).read_result()])
    click.echo(f"\nFiles: {folder}, with report.html; {time.monotonic() - began:.0f} s, and everything is stopped")


def _shown(method: str, rounds: int) -> str:
    """Return options with which a few rounds show what the method does: dropped weights from the second half on."""
    return f"rate=0.5 drop_from={rounds // 2}" if catalogue.traits(method).drops_from is not None else ""


def _start(local: later.flower_local.LocalFederation, nodes: int, reporter: Reporter) -> None:
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
    store, shown = later.runs_store.Store(folder), 0
    if not reporter.err.is_terminal:

        def lines() -> None:
            nonlocal shown
            reporter.heed()
            for record in store.read_rounds()[shown:]:
                reporter.note("  " + "  ".join(f"{name} {text}" for name, text in _cells(record).items()))
                shown += 1

        yield lines
        return
    with Live(_table([], rounds), console=reporter.err, transient=True, refresh_per_second=4) as live:

        def table() -> None:
            reporter.heed()
            live.update(_table(store.read_rounds(), rounds))

        yield table
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
@click.argument("folder", type=FOLDER, metavar="DIR")
@click.option("--host", "hosts", multiple=True, required=True, metavar="NAME",
              help="Name or address by which sites reach the server; repeatable.")  # fmt: skip
@click.option("--ca-dir", type=FOLDER, metavar="DIR",
              help="Folder of the authority, on another machine than the server. [default: DIR]")  # fmt: skip
@click.option("--days", type=click.IntRange(1, 36_500), default=825, help="Until it expires.")
def certificates_command(*, folder: str, hosts: tuple[str, ...], ca_dir: str | None, days: int) -> None:
    """Make the server's certificate in DIR, and, where there is none yet, the authority that signs it.

    With --ca-dir, DIR holds what the server needs (ca.crt, server.crt, server.key), and ca.key stays where it is.
    """
    _ready()
    place, security = Path(folder), later.flower_security
    names = [*hosts, *(each for each in ("127.0.0.1", "localhost") if each not in hosts)]
    security.certificates(place, names, authority=None if ca_dir is None else Path(ca_dir), days=days)
    click.echo(f"{place / security.SERVER} for {', '.join(hosts)}; every site needs {place / security.CA}")
    if (place / security.CA_KEY).exists():
        click.echo(f"{place / security.CA_KEY} can sign for anybody: keep it off the server (--ca-dir)")


@federate_group.command("key")
@click.argument("path", type=FILE, metavar="FILE")
def key_command(path: str) -> None:
    """Make a site's key: FILE stays at the site, FILE.pub goes to the server."""
    _ready()
    public = later.flower_security.node_key(Path(path))
    click.echo(f"{path} stays here; on the server: flwr supernode register {public.name} NAME-OF-THE-SUPERLINK")


@federate_group.command("rekey")
@click.argument("folder", type=PLACE, metavar="OUT")
@click.argument("name", metavar="CLIENT")
@click.argument("public", type=PLACE, metavar="NEW.pub")
def rekey_command(*, folder: str, name: str, public: str) -> None:
    """Let CLIENT (a name or number) of the run in OUT go on with a new key, while the run is stopped."""
    (store, path), registry = _registry(folder), later.flower_registry
    with store.lock():
        known = registry.load(path)
        identity = registry.by_key(later.flower_security.fingerprint(Path(public)))
        registry.save(path, registry.rekeyed(known, name, identity))
        later.flower_audit.note(store.folder, "rekey", client=name, key=Path(public).name)
    click.echo(f"{path}: client {name} is known by {public} from now on")


@federate_group.command("rows")
@click.argument("folder", type=PLACE, metavar="OUT")
@click.argument("name", metavar="CLIENT")
@click.argument("rows", type=click.IntRange(1, 10**9), metavar="ROWS")
def rows_command(*, folder: str, name: str, rows: int) -> None:
    """Let CLIENT (a name or number) of the run in OUT claim up to ROWS rows, while the run is stopped.

    Without it, an answer that claims more rows than the client had before is refused.
    """
    (store, path), registry = _registry(folder), later.flower_registry
    with store.lock():
        registry.save(path, registry.with_rows(registry.load(path), name, rows))
        later.flower_audit.note(store.folder, "rows", client=name, rows=rows)
    click.echo(f"{path}: client {name} may claim {rows} rows from now on")


@federate_group.command("nodes")
@click.argument("folder", type=PLACE, metavar="OUT")
def nodes_command(*, folder: str) -> None:
    """List the clients of the run in OUT: names, keys, when each last answered, how often each was refused."""
    store, path = _registry(folder)
    offences = later.flower_registry.load_offences(store.folder)
    rounds = store.read_rounds()
    seen = {client: line["round"] for line in rounds for client in line["cohort"]}
    table = Table(box=None)
    for title in ("client", "name", "known by", "last answer", "refused", "last reason"):
        table.add_column(title, overflow="fold")
    for each in later.flower_registry.load(path).members:
        reasons = [line["rejected"][str(each.number)] for line in rounds if str(each.number) in line["rejected"]]
        last = f"round {seen[each.number]} of {len(rounds)}" if each.number in seen else "none"
        known = each.identity if each.trains else f"{each.identity}, never trains"
        table.add_row(
            str(each.number), escape(each.name), escape(known), last, str(offences.get(each.number, 0)),
            escape(reasons[-1] if reasons else ""),
        )  # fmt: skip
    Console(width=None if sys.stdout.isatty() else 200).print(table)


@federate_group.command("audit")
@click.argument("folder", type=PLACE, metavar="OUT")
@click.option("--head", metavar="HASH", help="Hash of the last line, from the run's log or result.json.")
def audit_command(*, folder: str, head: str | None) -> None:
    """Verify the audit log of the run in OUT: every line as it was written, none missing, moved or put in.

    Only --head shows whether lines were cut off at the end. Exit status 1 names the first line that is wrong.
    """
    store, _ = _registry(folder)
    path = store.folder / later.flower_audit.FILE
    if not path.exists():
        raise UserError(f"{path} is not there; it was removed, or the run is older than metavd's audit log")
    found = later.flower_audit.verify(path, head or "")
    torn = f"; {found.torn} bytes of half a line follow, as a killed process leaves them" if found.torn else ""
    click.echo(f"{path}: {found.lines} lines hold together, head {found.head}{torn}")


def _registry(folder: str) -> tuple[Any, Path]:
    """Return the folder of a federation's run, and the file that says who is who."""
    _ready()
    store = later.runs_store.Store(Path(folder))
    path = store.folder / later.flower_registry.FILE
    if not path.exists():
        raise UserError(f"{folder} holds no federation's run; name the folder out of its run config")
    return store, path


@federate_group.command("app")
@click.argument("folder", type=FOLDER, metavar="DIR")
@click.option("--superlink", metavar="HOST:PORT", help="Also write this SuperLink into Flower's config, as `here`.")
@click.option("--certificates", type=PLACE, metavar="DIR", help="Folder with ca.crt.")
@click.option("--insecure", is_flag=True, help="That SuperLink has no TLS.")
def app_command(*, folder: str, superlink: str | None, certificates: str | None, insecure: bool) -> None:
    """Write the Flower app that `metavd federate run DIR/metavd-app` starts: a run config, explained, and no code."""
    click.echo(later.flower_config.write_app(Path(folder)))
    if superlink is not None:
        _ready()
        if not insecure and certificates is None:
            raise UserError("--superlink needs --certificates DIR with the server's ca.crt, or --insecure")
        authority = None if insecure else (Path(str(certificates)) / later.flower_security.CA).resolve()
        home = later.flower_config.flower_home()
        home.mkdir(parents=True, exist_ok=True, mode=0o700)
        if (home / "config.toml").exists():
            raise UserError(f"{home / 'config.toml'} is there already; add the SuperLink to it by hand")
        (home / "config.toml").write_text(later.flower_local.connection(superlink, authority))
        click.echo(home / "config.toml")


@federate_group.command("allow")
@click.argument("app", type=click.Path(exists=True, file_okay=False), metavar="APP")
@click.option("--database", type=FILE, default="federation.db", help="The server's database.")
def allow_command(*, app: str, database: str) -> None:
    """Let the server run a Flower app with code of its own: register the hash of the folder APP as it is now.

    An app that `metavd federate app` wrote holds no code and needs no registering: the metavd that is installed runs.
    """
    _ready()
    path = later.flower_apps.registered(database)
    click.echo(f"{path}: {later.flower_apps.allow(Path(app), path)}")


@federate_group.command("run")
@click.argument("words", nargs=-1, metavar="[APP] [KEY=VALUE]...")
@click.option("--superlink", default="here", help="Its name in Flower's config.")
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
    chosen = later.flower_config.run_config(config)  # wrong input is found before anything is started
    _need_superlink(superlink)
    # The SuperLink may have been started in another folder.
    out = str(Path(chosen.out).expanduser().resolve())
    values = {key: getattr(chosen, key.replace("-", "_")) for key in given} | {"out": out}
    with tempfile.TemporaryDirectory(prefix="metavd-app-") as scratch:
        if app is None:
            app = later.flower_config.write_app(Path(scratch))
        later.flower_follow.follow(
            app, values, superlink=superlink, environment={**later.flower_local.QUIET, **os.environ},
            show=lambda line: click.echo(line, nl=False), meanwhile=Reporter.heed,
        )  # fmt: skip
    print_results([later.runs_store.Store(Path(out)).read_result()])


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
        why = error.strerror if isinstance(error, OSError) else error
        raise UserError(f"{path} is no app of metavd ({why}); write one with metavd federate app") from None


def _need_superlink(name: str) -> None:
    path = later.flower_config.flower_home() / "config.toml"
    try:
        known = tomllib.loads(path.read_text()).get("superlink", {})
    except (OSError, ValueError) as error:
        raise UserError(
            f"Flower's config {path} cannot be read ({error}); metavd federate app . --superlink HOST:PORT writes it"
        ) from None
    if not isinstance(known.get(name), dict):
        names = ", ".join(each for each, value in known.items() if isinstance(value, dict)) or "none"
        raise UserError(f"superlink is {name!r}, but {path} has {names}; name one of them with --superlink")


@federate_group.command("link")
@click.option("--certificates", type=PLACE, metavar="DIR", help="Folder from metavd federate certificates.")
@click.option("--host", default="0.0.0.0", help="Address to listen on.")
@click.option("--port", type=_PORTS, default=8000)
@click.option("--database", type=FILE, default="federation.db", help="File with the registered keys and the runs.")
@click.option("--connections", type=_PORTS, default=128,
              help="Most connections from one address; from all together eight times as many.")  # fmt: skip
@click.option("--insecure", is_flag=True, help="Without TLS and without keys: whoever reaches the port may join.")
def link_command(
    *, certificates: str | None, host: str, port: int, database: str, connections: int, insecure: bool
) -> None:
    """Serve a federation: a Flower SuperLink, with TLS and for registered nodes only.

    Runs are started and nodes registered from this machine alone, by root and the user that this command runs as.
    """
    _ready()
    arguments = ["--host", host, "--port", str(port), "--database", str(Path(database).resolve())]
    if insecure:
        Reporter().note("insecure mode: no TLS, no keys; whoever reaches the port may join and read everything")
        arguments.append("--insecure")
    elif certificates is None:
        raise UserError("a server needs --certificates DIR (see metavd federate certificates), or --insecure")
    else:
        arguments += later.flower_security.link_arguments(Path(certificates).resolve())
        if (Path(certificates) / later.flower_security.CA_KEY).exists():
            Reporter().note(f"{certificates} has {later.flower_security.CA_KEY}, which belongs on another machine")
    _quiet(1.0)
    later.flower_link.main(arguments, connections)


@federate_group.command("node")
@click.option("--superlink", required=True, metavar="HOST:PORT", help="The server.")
@click.option("--data", metavar="TEXT", help="The site's rows, such as npz:rows.npz or folder:photos.")
@click.option("--client", metavar="ID", help="Whose rows this site has, where the data name several clients.")
@click.option("--root", envvar="METAVD_DATA", metavar="DIR", help="Folder with the datasets' files.")
@click.option("--name", metavar="NAME", help="How the server's log calls this site.")
@click.option("--authority", type=FILE, metavar="F", help="The server's ca.crt.")
@click.option("--key", type=FILE, metavar="FILE", help="The site's key, from metavd federate key.")
@click.option("--policy", type=PLACE, metavar="FILE", help="What the site allows, see docs/deploy.md.")
@click.option("--no-train", is_flag=True, help="Be personalised and tested, but never trained with.")
@click.option("--device", default="cpu", help="cpu or cuda.")
@click.option("--partition-id", type=int, metavar="I", help="Hold this share of the run's dataset, in place of --data.")
@click.option("--poll", type=Finite(0.05, 60), default=1.0, help="Seconds between two checks for messages.")
@click.option("--port", type=_PORTS, default=9094, help="Local port; every node on a machine needs its own.")
@click.option("--insecure", is_flag=True, help="The server has neither TLS nor registered keys.")
def node_command(
    *, superlink: str, authority: str | None, key: str | None, insecure: bool, poll: float, port: int,
    no_train: bool, partition_id: int | None, **config: str | None,
) -> None:  # fmt: skip
    """Take part with data that stays here: a Flower SuperNode that runs metavd's code and nobody else's."""
    _ready()
    values: dict[str, Any] = {name: value for name, value in config.items() if value is not None}
    if no_train:
        values["train"] = False
    if partition_id is not None:
        values["partition-id"] = partition_id
    if "data" in values:
        kind, colon, path = str(values["data"]).partition(":")
        if colon and Path(path).expanduser().exists():
            values["data"] = f"{kind}:{Path(path).expanduser().resolve()}"
    if "policy" in values:
        values["policy"] = str(Path(values["policy"]).expanduser().resolve())
        later.flower_policy.read(values)
    # Data that cannot be read is better known now than in the first round.
    later.flower_site.look(later.flower_config.node_config(values))
    arguments = ["--superlink", superlink, "--port", str(port), "--node-config", later.flower_follow.pairs(values)]
    if insecure:
        Reporter().note("insecure mode: what is sent can be read and changed on its way")
        arguments.append("--insecure")
    elif authority is None or key is None:
        raise UserError("a node needs --authority ca.crt and --key FILE (see metavd federate key), or --insecure")
    else:
        arguments += ["--root-certificates", authority, "--auth-supernode-private-key", key]
    _quiet(poll)
    later.flower_warm.main(arguments)


def _quiet(poll: float) -> None:
    """Let Flower report to nobody and install nothing, unless the operator has said otherwise."""
    for name, value in {**later.flower_local.QUIET, later.flower_warm.POLL: str(poll)}.items():
        os.environ.setdefault(name, value)
