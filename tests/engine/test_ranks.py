"""One run over several processes: the bits of one process, whoever dies on the way."""

from __future__ import annotations

import contextlib
import json
import multiprocessing
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, TypeVar

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rank_script import SOME, VARIANTS, found, run_in
from torch import distributed as dist
from torch.distributed import HashStore

from metavd import methods
from metavd.cli import main
from metavd.engine.ranks import grain_of, numbered, shares
from metavd.flower.local import free_ports

SCRIPT = Path(__file__).with_name("rank_script.py")
T = TypeVar("T")
FORK = multiprocessing.get_context("fork")
"""Starts at once, with everything imported; torch has one thread here."""


def rank(number: int, size: int, port: int, do: Callable[[], object], sender: Connection) -> None:
    """Be one rank, with the environment that torchrun gives it; the first one sends what it found."""
    own = {"RANK": number, "LOCAL_RANK": number, "WORLD_SIZE": size, "LOCAL_WORLD_SIZE": size, "GROUP_RANK": 0}
    where = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "TORCHELASTIC_USE_AGENT_STORE": True}
    os.environ.update({key: str(value) for key, value in (own | where | {"TORCHELASTIC_RUN_ID": "x"}).items()})
    answer = do()
    dist.destroy_process_group()
    if number == 0:
        sender.send(answer)


def together(size: int, do: Callable[[], T]) -> T:
    """Return what so many ranks find, each a fork of this process, around a store that this process holds."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    receiver, sender = FORK.Pipe(duplex=False)
    ranks = [FORK.Process(target=rank, args=(each, size, store.port, do, sender)) for each in range(size)]
    for each in ranks:
        each.start()
    sender.close()
    answer: T = receiver.recv()
    for each in ranks:
        each.join(300)
    assert [each.exitcode for each in ranks] == [0] * size
    return answer


def torchrun(ranks: int, *words: str, hosts: int = 1, at: str = "localhost:0") -> subprocess.CompletedProcess[str]:
    """Start so many processes as torchrun does, as one of several hosts, which meet at an address."""
    start = [sys.executable, "-m", "torch.distributed.run", "--nnodes", str(hosts), "--nproc-per-node", str(ranks)]
    command = [*start, "--rdzv-backend", "c10d", "--rdzv-endpoint", at, "--local-addr", "127.0.0.1", *words]
    return subprocess.run(
        command, capture_output=True, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"}, check=False, timeout=300
    )


@pytest.mark.processes
def test_two_and_four_ranks_are_one_process_to_the_bit() -> None:
    """Law: every method, a robust rule, an attack, lost clients, early stopping; model, private rows and answers.

    Four ranks do one method of each kind: they differ from two in who has which client, which no method can see.
    """
    plain = found("loop", methods.NAMES)
    assert together(2, lambda: found("loop", methods.NAMES)) == plain
    four = together(4, lambda: found("loop"))
    assert len(four) == len(SOME) + len(VARIANTS)
    assert four.items() <= plain.items()


@pytest.mark.processes
def test_under_vmap_the_number_of_ranks_cannot_be_seen() -> None:
    """Law: groups that are computed together do not depend on the number of ranks, nor where a cohort has parts."""
    one = together(1, lambda: found("vmap"))
    assert len(one) == len(SOME) + len(VARIANTS)
    assert together(2, lambda: found("vmap")) == one
    four = together(4, lambda: found("vmap", only="part"))
    assert len(four) == 5
    assert four.items() <= one.items()


@pytest.fixture(scope="module")
def straight(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, object]]:
    """A run of one process that nothing happens to: its folder and its result."""
    folder = tmp_path_factory.mktemp("straight") / "run"
    return folder, run_in(str(folder), "straight")


def same(folder: Path, straight: tuple[Path, dict[str, object]]) -> bool:
    """Whether a run ended with the model, private rows, figures and files of the straight one."""
    result = json.loads((folder / "result.json").read_text())
    parts = all(result[part] == straight[1][part] for part in ("model_sha256", "kept_sha256", "test"))
    files = ("rounds.jsonl", "clients.csv")
    return parts and all((folder / file).read_bytes() == (straight[0] / file).read_bytes() for file in files)


@pytest.mark.processes
def test_a_rank_that_dies_is_started_again_and_another_number_goes_on(
    straight: tuple[Path, dict[str, object]], tmp_path: Path
) -> None:
    """Law: torchrun's restart goes on from the checkpoint, on two hosts of which one alone saw a rank die.

    So do two ranks where one process was killed.
    """
    killed = FORK.Process(target=run_in, args=(str(tmp_path / "by hand"), "dying"))
    killed.start()
    killed.join()
    assert killed.exitcode == -signal.SIGKILL
    assert not (tmp_path / "by hand" / "result.json").exists()
    at = f"127.0.0.1:{free_ports(1)[0]}"
    words = ["--max-restarts", "1", str(SCRIPT), "leaving", str(tmp_path / "elastic")]
    with ThreadPoolExecutor() as both:
        ended = [both.submit(torchrun, 1, *words, hosts=2, at=at) for _ in range(2)]
    assert [each.result().returncode for each in ended] == [0, 0], [each.result().stderr for each in ended]
    assert sum("exitcode: -9" in each.result().stderr for each in ended) == 1
    together(2, lambda: run_in(str(tmp_path / "by hand"), "resumed"))
    assert same(tmp_path / "elastic", straight)
    assert same(tmp_path / "by hand", straight)


def test_ranks_agree_on_an_attempt_whatever_an_earlier_one_left_in_the_store() -> None:
    """Law: every rank of an attempt has rank 0's number, and a later attempt a later one, also with fewer ranks."""
    store = HashStore()
    for number, size in ((1, 3), (2, 3), (3, 2)):
        with ThreadPoolExecutor(size) as ranks:
            # Rank 0 comes first, and finds the words of the attempt before.
            found = list(ranks.map(lambda rank, size=size: numbered(store, rank, size, 60.0), range(size)))
        assert found == [number] * size


LINK = "metavd0"


@pytest.fixture
def hosts() -> Iterator[tuple[str, str]]:
    """Two hosts with a link between them: network namespaces of this machine, 10.0.0.1 and 10.0.0.2."""
    names = (f"metavd-{os.getpid()}-a", f"metavd-{os.getpid()}-b")

    def ip(*words: str) -> bool:
        return not subprocess.run(["ip", *words], capture_output=True, check=False).returncode

    if not shutil.which("ip"):
        pytest.skip("there is no program ip here")
    try:
        if not all(ip("netns", "add", name) for name in names):
            pytest.skip("no network namespaces can be made here")
        assert ip("link", "add", LINK, "netns", names[0], "type", "veth", "peer", "name", LINK, "netns", names[1])
        for number, name in enumerate(names, 1):
            assert ip("-n", name, "address", "add", f"10.0.0.{number}/24", "dev", LINK)
            assert all(ip("-n", name, "link", "set", link, "up") for link in ("lo", LINK))
        yield names
    finally:
        for name in names:
            found = subprocess.run(["ip", "netns", "pids", name], capture_output=True, text=True, check=False)
            for pid in map(int, found.stdout.split()):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            ip("netns", "delete", name)


def over_hosts(names: tuple[str, str], folder: Path, *words: str) -> list[subprocess.Popen[bytes]]:
    """Start a rank on each host, as torchrun does; what host n says is in the file `host n` of the folder."""
    env = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": LINK}
    started = []
    for number, name in enumerate(names, 1):
        command = ["ip", "netns", "exec", name, sys.executable, "-m", "torch.distributed.run", "--nnodes", "2",
                   "--nproc-per-node", "1", "--rdzv-backend", "c10d", "--rdzv-endpoint", "10.0.0.1:29500",
                   "--rdzv-conf", f"is_host={number == 1}", "--local-addr", f"10.0.0.{number}"]  # fmt: skip
        with (folder / f"host {number}").open("w") as file:
            started.append(subprocess.Popen([*command, str(SCRIPT), *words], env=env, stdout=file, stderr=file))
    return started


@pytest.mark.processes
def test_hosts_that_are_cut_apart_say_so_and_one_of_them_goes_on_to_the_same_bits(
    hosts: tuple[str, str], straight: tuple[Path, dict[str, object]], tmp_path: Path
) -> None:
    """Law: two hosts whose link is cut in round 3 do not wait for ever; what they did is the straight run's."""
    first, other = over_hosts(hosts, tmp_path, "cut", str(tmp_path / "run"))
    assert first.wait(120) == 1, (tmp_path / "host 1").read_text()
    for number in (1, 2):
        said, until = tmp_path / f"host {number}", time.monotonic() + 60
        while "another rank of this run is gone" not in said.read_text():
            assert time.monotonic() < until, said.read_text()
            time.sleep(0.1)
    other.kill()  # torchrun itself waits longer for the host that it cannot reach
    other.wait()
    rounds = (tmp_path / "run" / "rounds.jsonl").read_text().splitlines()
    assert 0 < len(rounds) < 5
    run_in(str(tmp_path / "run"), "resumed")
    assert same(tmp_path / "run", straight)


@pytest.mark.processes
def test_the_command_line_speaks_once(tmp_path: Path) -> None:
    words = ["run", "fedavg", "--rounds", "1", "--set", "clients=4", "unseen=1", "cohort=3"]
    done = torchrun(2, "-m", "metavd", *words, "--out", str(tmp_path / "run"))
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("Files: ") == 1
    assert "2 ranks share every cohort of 3, vmap in groups of 1 (chunk=1)" in done.stderr


@pytest.mark.parametrize("rank", [0, 1])
def test_a_mistake_is_told_by_rank_0_alone(rank: int, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    """Exit status 2 on every rank; a command that is no run says what torchrun is for."""
    for key, value in {"TORCHELASTIC_RUN_ID": "x", "WORLD_SIZE": "2", "RANK": str(rank)}.items():
        monkeypatch.setenv(key, value)
    monkeypatch.setattr(sys, "stdout", sys.stdout)
    monkeypatch.setattr("metavd.cli._LEAVE", 0.0)
    for words, says in (
        (["run", "fedavgg"], "unknown method 'fedavgg'"),
        (["compare", "fedavg"], "torchrun shares one run among processes: metavd run; start compare without it"),
    ):
        with pytest.raises(SystemExit) as ended:
            main(words)
        assert ended.value.code == 2
        assert (says in capsys.readouterr().err) == (rank == 0)


@given(st.lists(st.integers(0, 50), min_size=1, max_size=30), st.integers(0, 7), st.integers(1, 6))
def test_every_place_is_dealt_once_and_groups_do_not_depend_on_ranks(sizes: list[int], grain: int, ranks: int) -> None:
    dealt = shares(sizes, grain, ranks)
    assert len(dealt) == ranks
    places = [place for groups in dealt for group in groups for place in group]
    assert sorted(places) == list(range(len(sizes)))
    if grain:
        assert sorted(group for groups in dealt for group in groups) == sorted(shares(sizes, grain, 1)[0])
    assert all(group == sorted(group) for groups in dealt for group in groups)


@given(st.lists(st.integers(1, 50), min_size=1, max_size=30), st.integers(1, 6))
def test_no_rank_has_more_than_its_share_and_one_client(sizes: list[int], ranks: int) -> None:
    """Law of the greedy rule: the fullest rank exceeds the mean by less than the largest client."""
    loads = [sum(sizes[place] for group in groups for place in group) for groups in shares(sizes, 0, ranks)]
    assert max(loads) < sum(sizes) / ranks + max(sizes)


@pytest.mark.parametrize(("backend", "chunk", "cohort", "wanted"), [
    ("loop", 0, 10, 0), ("threads", 5, 10, 0), ("vmap", 0, 10, 2), ("vmap", 5, 10, 5), ("vmap", 0, 3, 1),
])  # fmt: skip
def test_who_is_computed_together(backend: str, chunk: int, cohort: int, wanted: int) -> None:
    assert grain_of(backend, chunk, cohort) == wanted
