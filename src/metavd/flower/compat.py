"""Everything here that leans on the inside of Flower. Each lean was seen in 1.41.0, to which the version is pinned.

tests/flower/test_compat.py has one test per lean: it fails when that inside has moved, and its name is the name of the
function here. Other modules use Flower's documented interfaces alone (`flwr.app`, `flwr.serverapp`, `flwr.clientapp`
and the command line). Flower is imported inside the functions: it takes a second, and most callers need one of them.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import json
import logging
import re
import sys
import time
import tomllib
import zipfile
from collections.abc import Callable, Mapping
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

SEEN = "1.41.0"
"""The version of Flower that was read."""
TASK_INTERVAL = "FLWR_SUPEREXEC_TASK_POLL_INTERVAL"
"""Environment variable: seconds between two looks of an executor for tasks. Seen: `run_superexec`."""
LINK_PORT, NODE_PORT = "8000", "9094"
"""Where SuperLink and SuperNode listen unless `--port` says otherwise. Seen: `SUPERLINK_UVICORN_DEFAULT_PORT` and
`SUPERNODE_UVICORN_DEFAULT_PORT`."""
HEARTBEAT = 10
"""Seconds, Flower's least; a SuperLink takes a node that is silent for two of them as gone, and not before. Seen:
`HEARTBEAT_MIN_INTERVAL`, `HEARTBEAT_PATIENCE`."""
FLEET, HEALTH = "/v1/fleet/", "/health"
"""Paths of a SuperLink that other machines need. Seen: the routes of `create_app`."""
_ACTIVATE = f"{FLEET}activate-node"
_NOT_ACTIVATED = 2004
"""The code of an error whose sentence a node shows. Seen: `ApiErrorCode.FLEET_NODE_ACTIVATION_FAILED`."""

# --- the ServerApp -------------------------------------------------------------------------------------------------


def bound_retries(grid: Any, seconds: float) -> None:
    """Let a ServerApp's request fail after so many seconds without the SuperLink.

    Flower would try for ever. Seen: `HttpGrid._retry_invoker`, a RetryInvoker with `max_time`. Other grids have none.
    """
    retries = getattr(grid, "_retry_invoker", None)
    if retries is not None:
        retries.max_time = seconds


def log_sentences(errors: tuple[type[BaseException], ...]) -> None:
    """Let the log have one sentence, and no traceback, where one of these errors ends a ServerApp.

    Seen: `run_serverapp` logs "ServerApp raised an exception" with `exc_info`, and `flwr_exit` logs a text that begins
    with "Exit Code: ", both to the logger "flwr".
    """
    told = False

    def keep(record: logging.LogRecord) -> bool:
        nonlocal told
        error = record.exc_info[1] if isinstance(record.exc_info, tuple) else None
        if isinstance(error, errors):
            record.msg, record.args, record.exc_info, told = str(error), (), None, True
        return not (told and record.getMessage().startswith("Exit Code: "))

    logging.getLogger("flwr").addFilter(keep)


def failure(details: str) -> str:
    """Return the sentence in what a SuperLink says of a failed run.

    Seen: `run_serverapp` reports "ServerApp failed with exception: " and the exception's text.

    >>> failure("ServerApp failed with exception: the disk is full")
    'the disk is full'
    """
    return details.removeprefix("ServerApp failed with exception: ")


def reason(text: str | None) -> str:
    """Return a client's sentence from the reason of an error message.

    Seen: `run_clientapp` writes the exception's class and text as below.

    >>> reason("<class 'ValueError'>:<'train failed'>")
    'train failed'
    """
    text = text or "it failed and did not say why"
    _, found, sentence = text.partition(":<'")
    return sentence.removesuffix("'>") if found else " ".join(text.split())[:300]


# --- runs as the command line tells of them --------------------------------------------------------------------------


def started_run(said: str) -> str:
    """Return the number of the run that `flwr run` says that it has started, or nothing. Seen: `run`.

    >>> started_run("Successfully started run 77 in federation x"), started_run("Failed to start run")
    ('77', '')
    """
    found = re.search(r"started run (\d+)", said)
    return found[1] if found else ""


class Listed(NamedTuple):
    """How a run stands."""

    ended: bool
    completed: bool
    """Whether it has ended as it should."""
    why: str
    """What its end was, in a sentence."""


def listed_runs(said: str) -> list[Listed]:
    """Return the runs that `flwr list --format json` tells of; ValueError with what it says in their place.

    Seen: `_to_json` in `flwr.cli.ls`, "finished:completed" of `Status` and `SubStatus`, and `failure`.

    >>> listed_runs('Loading {"success": true, "runs": [{"status": "finished:stopped", "status-details": "by you"}]}')
    [Listed(ended=True, completed=False, why='by you')]
    """
    try:
        found, _ = json.JSONDecoder().raw_decode(said, max(said.find("{"), 0))  # words may stand around it
    except ValueError:
        found = {}
    if not found.get("success"):
        raise ValueError(plain(str(found.get("error-message", said))))
    runs = [(each["status"], each["status-details"]) for each in found["runs"]]
    return [Listed(how.startswith("finished"), how == "finished:completed", failure(why)) for how, why in runs]


def plain(said: str) -> str:
    """Return the end of what a command said, in one line and without the frame that rich draws around an error.

    >>> plain("╭─ Error ──╮ │ no such app │")
    'Error no such app'
    """
    return " ".join(re.sub(r"[│╭╮╰╯─]", " ", said).split())[-300:]


# --- executors: who starts the processes of apps ---------------------------------------------------------------------


def run_executor(executor: Any, address: str, *, parent: int, authority: str) -> None:
    """Give the tasks of a SuperLink or SuperNode to an executor of our own, until its process is gone.

    Seen: `run_superexec` calls the global `get_executor`, and of what that returns `reconcile`,
    `get_eligible_capacity`, `wait_for_capacity`, `launch` and `close`.
    """
    from flwr.supercore.superexec import run_superexec as module  # noqa: PLC0415

    vars(module).update(get_executor=lambda *_, **__: executor)
    module.run_superexec(
        runtime_api_address=address, insecure=not authority, root_certificates_path=authority or None, parent_pid=parent
    )


def launched() -> Any:
    """Return what an executor answers when it has started a task. Seen: `LaunchResult.accepted`."""
    from flwr.supercore.superexec.executor import LaunchResult  # noqa: PLC0415

    return LaunchResult.accepted()


def is_server_task(spec: Any) -> bool:
    """Return whether a task is a ServerApp's. Seen: `ExecutionSpec.task_type`, `TaskType.SERVER_APP`."""
    from flwr.supercore.constant import TaskType  # noqa: PLC0415

    return bool(spec.task_type == TaskType.SERVER_APP)


def load_task(*, server: bool) -> None:
    """Import what `run_task` needs for a ServerApp or a ClientApp, so that a fork finds it there. Seen: as below."""
    for name in ("supercore.tls", "superlink.runtime.run_serverapp" if server else "supernode.runtime.run_clientapp"):
        import_module(f"flwr.{name}")


def run_task(spec: Any, parent: int, client_app: Any, server_app: Any, is_ours: Callable[[bytes], bool]) -> None:
    """Do a task in this process: carry out a run, or answer one message with the given ClientApp.

    Code that comes over the network is neither unpacked nor run for a message; for a run it is where `is_ours` says
    that the app is not metavd's own, and raises nothing. Seen: `run_serverapp` and `run_clientapp` with the arguments
    below, and their globals `install_from_fab`, `run_` (with `server_app_attr` or `loaded_server_app`) and
    `get_load_client_app_fn`.
    """
    from flwr.supercore.tls import validate_and_resolve_root_certificates  # noqa: PLC0415

    how = {
        "runtime_api_address": spec.runtime_api_address, "token": spec.token, "insecure": spec.insecure,
        "certificates": validate_and_resolve_root_certificates(spec.root_certificates_path, spec.insecure),
        "parent_pid": parent,
    }  # fmt: skip
    if is_server_task(spec):
        from queue import Queue  # noqa: PLC0415

        from flwr.supercore.logger import mirror_output_to_queue  # noqa: PLC0415

        serving = import_module("flwr.superlink.runtime.run_serverapp")
        install, carry_out, own = serving.install_from_fab, serving.run_, False

        def installed(fab: bytes, **kwargs: Any) -> Any:
            nonlocal own
            own = is_ours(fab)
            return install(fab, **kwargs)

        def run(server_app_attr: str, **kwargs: Any) -> Any:
            which = {"loaded_server_app": server_app} if own else {"server_app_attr": server_app_attr}
            return carry_out(**which, **kwargs)

        vars(serving).update(install_from_fab=installed, run_=run)
        lines: Queue[str | None] = Queue()
        mirror_output_to_queue(lines)
        serving.run_serverapp(log_queue=lines, **how)
        return
    from flwr.supernode.runtime import run_clientapp as module  # noqa: PLC0415

    vars(module).update(
        install_from_fab=lambda *_, **__: None, get_load_client_app_fn=lambda **_: lambda *__: client_app
    )
    module.run_clientapp(**how)


def app_hash(app: Path | bytes) -> str:
    """Return the hash by which Flower knows an app, a folder or its bundle.

    Seen: `build_fab_from_disk`, and SHA-256 of what it returns.
    """
    from flwr.cli.build import build_fab_from_disk  # noqa: PLC0415

    return hashlib.sha256(build_fab_from_disk(app) if isinstance(app, Path) else app).hexdigest()


def app_parts(fab: bytes) -> tuple[set[str], str]:
    """Return the files of an app's bundle beside its config, and the ServerApp that the config names.

    Seen: `build_fab_from_files` writes a zip file with pyproject.toml, then the app's files, then .info/CONTENT.
    """
    with zipfile.ZipFile(io.BytesIO(fab)) as files:
        parts = tomllib.loads(files.read("pyproject.toml").decode())["tool"]["flwr"]["app"]["components"]
        return {*files.namelist()} - {"pyproject.toml", ".info/CONTENT"}, str(parts["serverapp"])


# --- SuperLink and SuperNode -----------------------------------------------------------------------------------------


def write_log(database: Path) -> Path:
    """Return the file that holds what was written to a SuperLink's database and is not yet copied into that.

    Seen: the database is SQLite's, with `journal_mode` WAL in `SQLITE_PRAGMAS`; deleted rows stay in both files until
    the one is written anew and the other cut.
    """
    return database.with_name(f"{database.name}-wal")


def run_superlink(arguments: list[str], middleware: Any, protocol: Any) -> None:
    """Run flower-superlink in this process, with an ASGI middleware before its own, and no executor of its own.

    Connections are uvicorn's `protocol`, and no websockets. Seen: `flwr.superlink.main` calls its global
    `_get_middleware`; `--isolation process` starts no executor; `flower_superlink` calls `uvicorn.run`.
    """
    from flwr.superlink import main as module  # noqa: PLC0415
    from flwr.superlink.cli import flower_superlink  # noqa: PLC0415
    from starlette.middleware import Middleware  # noqa: PLC0415

    serving = import_module("flwr.superlink.cli.flower_superlink")
    serve = serving.uvicorn.run
    vars(serving).update(uvicorn=SimpleNamespace(run=lambda **how: serve(**how, http=protocol, ws="none")))
    inner = module._get_middleware
    module._get_middleware = lambda: [Middleware(middleware), *inner()]
    sys.argv = ["flower-superlink", *arguments, "--isolation", "process"]
    flower_superlink()


def watched_protocol(
    enter: Callable[[Any, Any], dict[str, Any] | None], leave: Callable[[Any, dict[str, Any]], None], patience: float
) -> Any:
    """Return uvicorn's HTTP protocol, with a say in who connects and no patience with those who then say nothing.

    `enter` (client, server) returns what all requests of a connection have in their state, or None to cut it; a
    connection on which no request began for so many seconds is cut. h11 bounds the length of headers, which httptools
    does not. Seen in uvicorn 0.49: `H11Protocol.client`, `server`, `app_state`, `cycle.response_complete`, `loop`.
    """
    from uvicorn.protocols.http.h11_impl import H11Protocol  # noqa: PLC0415

    class Watched(H11Protocol):
        carried: dict[str, Any] | None = None

        def connection_made(self, transport: Any) -> None:
            super().connection_made(transport)
            self.carried = enter(self.client, self.server)
            if self.carried is None:
                transport.abort()
                return
            self.app_state = {**self.app_state, **self.carried}
            self.loop.call_later(patience, self.look, None)

        def connection_lost(self, exc: Exception | None) -> None:
            super().connection_lost(exc)
            if self.carried is not None:
                leave(self.client, self.carried)

        def look(self, last: Any) -> None:
            if self.transport.is_closing():
                return
            if self.cycle is last and (last is None or last.response_complete):
                self.transport.abort()
            else:
                self.loop.call_later(patience, self.look, self.cycle)

    return Watched


def refused_status(path: str) -> int:
    """Return the status with which a node's request is refused; a node that is told 401 ends at once.

    That is right for one whose key was revoked in the middle of a run, and not for one that asks to be let in. Seen:
    `make_simple_http_retry_invoker`.
    """
    return 400 if path == _ACTIVATE else 401


def refusal_body(why: str) -> bytes:
    """Return the body of an answer whose sentence a node shows. Seen: `FlowerError.from_json`."""
    return json.dumps({"code": _NOT_ACTIVATED, "detail": why}).encode()


def refusal(error: Any) -> str:
    """Return the sentence with which a SuperLink refuses a request, or nothing. Seen: `FlowerError.to_json`."""
    try:
        return str(error.response.json()["detail"])
    except (AttributeError, ValueError, KeyError, TypeError):
        return ""


def refused() -> type[Exception]:
    """Return the error of a node's request that was answered and refused. Seen: `fleet_http_connection`, of httpx."""
    from httpx import HTTPStatusError  # noqa: PLC0415

    return HTTPStatusError


def stranger(scope: Any) -> str:
    """Return why the headers of a request do not show a node that may speak to the fleet's interface; or nothing.

    Flower asks the same, but after it has read the whole request. Seen: `authenticate_node`, with the names below in
    its module; without `enable_supernode_auth` every key will do.
    """
    seen = import_module("flwr.superlink.routers.fleet.node_auth")
    request = seen.Request(scope)
    try:
        key, signature = (
            seen.b64decode(request.headers[name], validate=True)
            for name in (seen.FLEET_HTTP_PUBLIC_KEY_HEADER, seen.FLEET_HTTP_SIGNATURE_HEADER)
        )
        stamp = request.headers[seen.TIMESTAMP_HEADER]
        if (
            request.app.state.enable_supernode_auth
            and seen.get_linkstate(request).get_node_id_by_public_key(key) is None
        ):
            return "its key is not registered"
        if not seen.verify_signature(seen.bytes_to_public_key(key), stamp.encode("ascii"), signature):
            return "its signature is wrong"
        ahead = (seen.datetime.datetime.fromisoformat(stamp) - seen.now()).total_seconds()
    except (KeyError, ValueError, TypeError):
        return "it shows no key, or none that can be read"
    if ahead >= seen.SYSTEM_TIME_TOLERANCE or -ahead >= seen.TIMESTAMP_TOLERANCE:
        word = "ahead of" if ahead > 0 else "behind"
        return f"its clock is {abs(ahead):.0f} s {word} the server's; set both by the same time server (NTP)"
    return ""


def run_supernode(
    arguments: list[str],
    *,
    poll: float,
    retries: Callable[[], Any],
    activated: Callable[[Callable[..., Any]], Callable[..., Any]],
) -> None:
    """Run flower-supernode in this process, with no executor of its own.

    Heartbeats are as often as may be, pauses between two looks for messages at most `poll` seconds; `retries` makes
    the RetryInvoker of its requests, `activated` wraps the request to be let in. Seen: `HEARTBEAT_DEFAULT_INTERVAL` in
    `heartbeat` and `fleet_http_connection`, `time.sleep` in `start_client_internal`, `make_simple_http_retry_invoker`
    in `fleet_http_connection`, `FleetHttpClient.ActivateNode`.
    """
    from flwr.supercore import heartbeat as beating  # noqa: PLC0415
    from flwr.supernode import fleet_http_connection as connection  # noqa: PLC0415
    from flwr.supernode import start_client_internal as internal  # noqa: PLC0415
    from flwr.supernode.cli import flower_supernode  # noqa: PLC0415
    from flwr.supernode.fleet_http_client import FleetHttpClient  # noqa: PLC0415

    for module in (beating, connection):
        vars(module).update(HEARTBEAT_DEFAULT_INTERVAL=HEARTBEAT)
    FleetHttpClient.ActivateNode = activated(FleetHttpClient.ActivateNode)  # type: ignore[method-assign]
    vars(internal).update(time=SimpleNamespace(sleep=lambda seconds: time.sleep(min(seconds, poll))))
    vars(connection).update(make_simple_http_retry_invoker=retries)
    sys.argv = ["flower-supernode", *arguments, "--isolation", "process", "--host", "127.0.0.1"]
    flower_supernode()


def retry_invoker(*, longest: float, goes_on: Callable[[Exception], bool]) -> Any:
    """Return how a node's request is tried again: after `longest` seconds at most, and always where `goes_on` is true.

    Flower takes every error that speaks of TLS for a wrong certificate and gives up, and pauses up to 20 s. Seen:
    `make_simple_http_retry_invoker`, `RetryInvoker.wait_gen_factory` and `should_giveup`, `exponential(max_delay)`.
    """
    from flwr.supercore.retry import exponential, make_simple_http_retry_invoker  # noqa: PLC0415

    invoker = make_simple_http_retry_invoker()
    invoker.wait_gen_factory = lambda: exponential(max_delay=longest)  # type: ignore[arg-type]
    gives_up = invoker.should_giveup or (lambda _: False)
    invoker.should_giveup = lambda error: not goes_on(error) and gives_up(error)
    return invoker


def register_nodes(address: str, authority: Path | None, public_keys: Mapping[str, Path]) -> None:
    """Register nodes' public keys by name, as `flwr supernode register` does with one process per key.

    Seen: `try_load_public_key`, `SuperLinkConnection`, `init_http_client_from_connection`, `RegisterNodeRequest`.
    """
    from flwr.cli.supernode.register import try_load_public_key  # noqa: PLC0415
    from flwr.cli.typing import SuperLinkConnection  # noqa: PLC0415
    from flwr.cli.utils import init_http_client_from_connection  # noqa: PLC0415
    from flwr.proto.control_pb2 import RegisterNodeRequest  # noqa: PLC0415

    root = None if authority is None else str(authority)
    link = SuperLinkConnection("here", address, root, insecure=authority is None)
    with contextlib.redirect_stdout(io.StringIO()):  # it tells what it connects to
        client = init_http_client_from_connection(link)
    try:
        for name, path in public_keys.items():
            client.RegisterNode(RegisterNodeRequest(public_key=try_load_public_key(path), name=name))
    finally:
        client.close()


# --- a rehearsal in one process --------------------------------------------------------------------------------------


def be_server() -> None:
    """Let this process make messages as a run's server does.

    Seen: `Message` takes the sender from the class `TaskIdentity`, which the runtime fills in.
    """
    from flwr.supercore.task_identity import TaskIdentity  # noqa: PLC0415

    TaskIdentity.run_id, TaskIdentity.node_id, TaskIdentity.task_id = 1, 1, 1


def numbered(message: Any, sender: int | None = None) -> str:
    """Give a message its id, or an answer its sender, as the SuperLink does; return the id.

    Seen: `Metadata._message_id` and `_src_node_id`, and `Message.object_id`.
    """
    inside = message.metadata.__dict__
    if sender is None:
        inside["_message_id"] = message.object_id
    else:
        inside["_src_node_id"] = sender
    return str(message.metadata.message_id)
