"""One test per lean on Flower's inside, with the name of its function in metavd.flower.compat; fails when it moves."""

from __future__ import annotations

import contextlib
import dataclasses
import importlib.metadata
import inspect
import io
import logging
import sqlite3
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace

import httpx
import pytest
from flwr.app import Message, RecordDict
from flwr.cli.build import build_fab_from_disk
from flwr.cli.run_utils import RunRow
from flwr.cli.supernode.register import try_load_public_key
from flwr.cli.typing import SuperLinkConnection
from flwr.cli.utils import init_http_client_from_connection
from flwr.common.constant import HEARTBEAT_MIN_INTERVAL, HEARTBEAT_PATIENCE, Status, SubStatus
from flwr.proto.control_pb2 import RegisterNodeRequest
from flwr.supercore import heartbeat, sql_mixin
from flwr.supercore.constant import SUPERLINK_UVICORN_DEFAULT_PORT, SUPERNODE_UVICORN_DEFAULT_PORT, TaskType
from flwr.supercore.error import ApiErrorCode, FlowerError
from flwr.supercore.exit import exit as leaving
from flwr.supercore.retry import http_retry
from flwr.supercore.superexec import run_superexec
from flwr.supercore.superexec.executor import types
from flwr.superlink import main as superlink
from flwr.superlink.grid import HttpGrid
from flwr.superlink.routers.fleet import node_auth
from flwr.superlink.runtime import run_serverapp
from flwr.supernode import fleet_http_connection, start_client_internal
from flwr.supernode.fleet_http_client import FleetHttpClient
from flwr.supernode.runtime import run_clientapp
from rich.console import Console
from rich.panel import Panel

from metavd.flower import compat
from metavd.flower.config import SERVER_APP, write_app
from metavd.flower.link import Door
from metavd.flower.warm import ForkExecutor

from .support.rehearsal import alarm


def code(thing: object) -> str:
    return inspect.getsource(thing)  # type: ignore[arg-type]


def test_the_version_is_the_one_that_was_read() -> None:
    """Another version has to be read first: the doc comments of compat say what was seen where."""
    assert importlib.metadata.version("flwr") == compat.SEEN


def test_bound_retries() -> None:
    """A SuperLink that is not there is asked for so many seconds, not for ever."""
    grid = HttpGrid("127.0.0.1:9", insecure=True, token="none")
    compat.bound_retries(grid, 0.2)
    with alarm(60), pytest.raises(httpx.TransportError):
        grid.get_nodes()
    compat.bound_retries(object(), 1)


def test_log_sentences(caplog: pytest.LogCaptureFixture) -> None:
    """An error that says all itself is logged as it is, another one with its traceback and Flower's words."""
    assert 'log(ERROR, "%s raised an exception", exc_entity, exc_info=ex)' in code(run_serverapp)
    assert 'exit_message = f"Exit Code: {code}\\n" if is_error else ""' in code(leaving)
    logger = logging.getLogger("flwr")
    before = list(logger.filters)
    try:
        compat.log_sentences((ValueError,))
        with caplog.at_level(logging.INFO, "flwr"):
            logger.error("ServerApp raised an exception", exc_info=KeyError("a"))
            logger.error("Exit Code: 201\nmore")
            logger.error("ServerApp raised an exception", exc_info=ValueError("the folder is not empty"))
            logger.error("Exit Code: 201\nmore")
    finally:
        logger.filters = before
    assert [record.getMessage() for record in caplog.records] == [
        "ServerApp raised an exception", "Exit Code: 201\nmore", "the folder is not empty",
    ]  # fmt: skip
    assert [bool(record.exc_info) for record in caplog.records] == [True, False, False]


def test_failure() -> None:
    assert 'details = f"ServerApp failed with exception: {str(ex)}"' in code(run_serverapp)


def test_started_run() -> None:
    assert 'message = f"Successfully started run {res.run_id}"' in code(import_module("flwr.cli.run.run"))


def test_listed_runs() -> None:
    """Flower's own words for runs that stand so, read again."""
    ls = import_module("flwr.cli.ls")
    ended = f"{Status.FINISHED}:{SubStatus.COMPLETED}", f"{Status.FINISHED}:{SubStatus.FAILED}", Status.RUNNING
    others = {field.name: 0 for field in dataclasses.fields(RunRow)}
    rows = [RunRow(**others | {"fab_id": "a/b", "status_text": each, "details": "why"}) for each in ended]
    found = compat.listed_runs("Loading project configuration...\n" + ls._to_json(rows))
    assert [(each.ended, each.completed, each.why) for each in found] == [
        (True, True, "why"), (True, False, "why"), (False, False, "why"),
    ]  # fmt: skip
    for said in ("no JSON", '{"success": false, "error-message": "│ no SuperLink │"}'):
        with pytest.raises(ValueError, match=r"no JSON|^no SuperLink$"):
            compat.listed_runs(said)


def test_plain() -> None:
    """Errors of its command line stand in a frame."""
    console = Console(file=(out := io.StringIO()), width=40)
    console.print(Panel("no such app", title="Error"))
    assert compat.plain(out.getvalue()) == "Error no such app"


def test_reason() -> None:
    assert """reason = str(type(ex)) + ":<'" + str(ex) + "'>\"""" in code(run_clientapp)
    assert compat.reason(None) == "it failed and did not say why"
    assert compat.reason("  much \n space ") == "much space"


def test_run_executor() -> None:
    """Our executor has every method that Flower asks for, and is what Flower gets."""
    wanted = {name for name, _ in inspect.getmembers(types.Executor, inspect.isfunction) if name[0] != "_"}
    assert wanted == {name for name, _ in inspect.getmembers(ForkExecutor, inspect.isfunction) if name[0] != "_"}
    assert "executor = get_executor(" in code(run_superexec)
    assert "time.sleep(task_poll_interval)" in code(run_superexec)
    asked = inspect.signature(run_superexec.run_superexec).parameters
    assert {"runtime_api_address", "insecure", "root_certificates_path", "parent_pid"} <= asked.keys()


def test_launched() -> None:
    assert compat.launched() == types.LaunchResult(types.LaunchResultStatus.ACCEPTED)


@pytest.mark.parametrize("kind", [TaskType.SERVER_APP, TaskType.CLIENT_APP])
def test_is_server_task(kind: TaskType) -> None:
    spec = types.ExecutionSpec(
        task_type=kind, runtime_api_address="a:1", token="t", insecure=True, root_certificates_path=None,
        runtime_dependency_install=False, parent_pid=1, suppress_output=False, task_id=1,
    )  # fmt: skip
    assert compat.is_server_task(spec) is (kind == TaskType.SERVER_APP)


def test_load_task(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is imported before a fork is what a task then asks for."""
    asked: list[str] = []
    monkeypatch.setattr(compat, "import_module", asked.append)
    compat.load_task(server=True)
    compat.load_task(server=False)
    assert [*dict.fromkeys(asked)] == ["flwr.supercore.tls", run_serverapp.__module__, run_clientapp.__name__]


def test_run_task() -> None:
    """Both take what they are given, and a message's app comes through the two functions that are replaced."""
    common = {"runtime_api_address", "token", "insecure", "certificates", "parent_pid"}
    assert common | {"log_queue"} <= inspect.signature(run_serverapp).parameters.keys()
    assert common <= inspect.signature(run_clientapp.run_clientapp).parameters.keys()
    text = code(run_clientapp.run_clientapp)
    assert "install_from_fab(" in text
    assert "get_load_client_app_fn(" in text
    text = code(import_module("flwr.superlink.runtime.run_serverapp").run_serverapp)
    assert "install_from_fab(fab.content, skip_prompt=True)" in text
    assert "run_(\n            grid=grid,\n            server_app_dir=app_path,\n            server_app_attr=" in text


def test_run_superlink(monkeypatch: pytest.MonkeyPatch) -> None:
    """The door is the outermost part of the server that Flower makes."""
    made = []
    monkeypatch.setattr(superlink, "_get_middleware", superlink._get_middleware)
    monkeypatch.setattr("flwr.superlink.cli.flower_superlink", lambda: made.append(superlink.create_app()))
    monkeypatch.setattr("sys.argv", [])
    serving = import_module("flwr.superlink.cli.flower_superlink")
    assert "uvicorn.run(\n" in code(serving)
    monkeypatch.setattr(serving, "uvicorn", serving.uvicorn)
    compat.run_superlink(["--insecure"], Door, None)
    assert made[0].user_middleware[0].cls is Door
    assert len(made[0].user_middleware) > 1


def test_watched_protocol() -> None:
    """test_door.py lets it serve; here that uvicorn still has what it leans on."""
    from uvicorn.protocols.http.h11_impl import H11Protocol, RequestResponseCycle

    text = code(H11Protocol) + code(RequestResponseCycle)
    for seen in ("self.client = ", "self.server = ", '"state": self.app_state.copy()', "self.response_complete = "):
        assert seen in text


def test_ports_heartbeats_and_intervals() -> None:
    assert (SUPERLINK_UVICORN_DEFAULT_PORT, SUPERNODE_UVICORN_DEFAULT_PORT) == (8000, 9094)
    assert (compat.LINK_PORT, compat.NODE_PORT) == ("8000", "9094")
    assert (HEARTBEAT_MIN_INTERVAL, HEARTBEAT_PATIENCE) == (compat.HEARTBEAT, 2)
    assert run_superexec._TASK_POLL_INTERVAL_ENV == compat.TASK_INTERVAL


def test_write_log(tmp_path: Path) -> None:
    """Flower opens its database so that what was written last lies in a file beside it."""
    database = tmp_path / "state.db"
    with contextlib.closing(sqlite3.connect(database)) as link:
        sql_mixin._set_sqlite_pragmas(link, None)
        link.execute("CREATE TABLE t (a)")
        link.commit()
        assert compat.write_log(database).stat().st_size
    assert "_set_sqlite_pragmas" in code(sql_mixin.SqlMixin)


def test_refused_status() -> None:
    """A node that is told 401 ends; one that is not let in is told so and tries again, as Flower does for neither."""
    assert "status_code == httpx.codes.UNAUTHORIZED" in code(http_retry)
    assert (compat.refused_status(f"{compat.FLEET}activate-node"), compat.refused_status(compat.FLEET)) == (400, 401)


def test_refusal_and_its_body() -> None:
    """What the door answers is an error to a node of Flower's, and what Flower answers one to a node of ours."""
    error = FlowerError.from_json(compat.refusal_body("stay out").decode())
    assert error is not None
    assert (error.code, error.message) == (ApiErrorCode.FLEET_NODE_ACTIVATION_FAILED, "stay out")
    response = httpx.Response(400, json=error.to_json("stay out"))
    assert compat.refusal(SimpleNamespace(response=response)) == "stay out"
    assert compat.refusal(SimpleNamespace(response=httpx.Response(502, text="no"))) == compat.refusal(None) == ""


def test_refused() -> None:
    assert "except httpx.HTTPStatusError as exc:" in code(fleet_http_connection)
    assert compat.refused() is httpx.HTTPStatusError


def test_stranger() -> None:
    """Flower still asks what the door asks before it; test_door.py asks a real SuperLink."""
    text = code(node_auth.authenticate_node)
    for seen in ("FLEET_HTTP_PUBLIC_KEY_HEADER", "FLEET_HTTP_SIGNATURE_HEADER", "TIMESTAMP_HEADER",
                 "get_node_id_by_public_key", "verify_signature", "-SYSTEM_TIME_TOLERANCE"):  # fmt: skip
        assert seen in text
    assert ApiErrorCode.FLEET_NODE_ACTIVATION_FAILED == compat._NOT_ACTIVATED


def test_app_parts(tmp_path: Path) -> None:
    """Of a bundle that Flower builds: of a config alone, and of one with code beside."""
    for code_of_its_own in (set(), {"own/server.py"}):
        folder = write_app(tmp_path / str(len(code_of_its_own)))
        for name in code_of_its_own:
            (folder / name).parent.mkdir()
            (folder / name).write_text("app = None\n")
        fab = build_fab_from_disk(folder)
        assert compat.app_parts(fab) == (code_of_its_own, SERVER_APP)
        assert compat.app_hash(folder) == compat.app_hash(fab)


def test_app_hash() -> None:
    assert "fab_hash = hashlib.sha256(fab_bytes).hexdigest()" in code(import_module("flwr.cli.build"))


def test_run_supernode() -> None:
    assert {"HEARTBEAT_DEFAULT_INTERVAL"} <= vars(heartbeat).keys() & vars(fleet_http_connection).keys()
    assert "make_simple_http_retry_invoker()" in code(fleet_http_connection)
    assert "time.sleep(3)" in code(start_client_internal)
    assert "ActivateNode" in vars(FleetHttpClient)


def test_retry_invoker() -> None:
    """Pauses are as short as was asked, and an error that goes on does so whatever Flower thinks of it."""
    invoker = compat.retry_invoker(longest=0.5, goes_on=lambda error: "cut" in str(error))
    pauses = invoker.wait_gen_factory()
    assert max(next(pauses) for _ in range(20)) <= 0.5
    assert invoker.should_giveup(httpx.ConnectError("ssl")) is True
    assert invoker.should_giveup(httpx.ConnectError("ssl was cut")) is False


def test_register_nodes() -> None:
    assert callable(try_load_public_key)
    assert callable(init_http_client_from_connection)
    assert SuperLinkConnection("here", "a:1", None, insecure=True).address == "a:1"
    assert RegisterNodeRequest(public_key=b"k", name="n").name == "n"


def test_be_server_and_numbered() -> None:
    """A message made here goes to its node under an id, and the answer names the node."""
    compat.be_server()
    order = Message(RecordDict(), dst_node_id=7, message_type="query")
    assert compat.numbered(order) == order.object_id == order.metadata.message_id
    reply = Message(RecordDict(), reply_to=order)
    compat.numbered(reply, 7)
    assert (reply.metadata.src_node_id, reply.metadata.reply_to_message_id) == (7, order.metadata.message_id)
