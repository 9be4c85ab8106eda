"""One run over several processes: the bits of one process, whoever dies on the way."""

from __future__ import annotations

import json
import multiprocessing
import os
import subprocess
import sys
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rank_script import found, run_in
from torch import distributed as dist

from metavd.cli import main
from metavd.engine.ranks import grain_of, shares

SCRIPT = Path(__file__).with_name("rank_script.py")
FORK = multiprocessing.get_context("fork")
"""Starts at once, with everything imported; torch has one thread here."""


def rank(number: int, size: int, port: int, backend: str, sender: Connection) -> None:
    """Be one rank, with the environment that torchrun gives it; the first one sends the hashes."""
    own = {"RANK": number, "LOCAL_RANK": number, "WORLD_SIZE": size, "LOCAL_WORLD_SIZE": size, "GROUP_RANK": 0}
    where = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "TORCHELASTIC_USE_AGENT_STORE": True}
    os.environ.update({key: str(value) for key, value in (own | where | {"TORCHELASTIC_RUN_ID": "x"}).items()})
    hashes = found(backend)
    dist.destroy_process_group()
    if number == 0:
        sender.send(hashes)


def together(size: int, backend: str) -> dict[str, list[str | None]]:
    """Return the hashes of so many ranks, each a fork of this process, around a store that this process holds."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    receiver, sender = FORK.Pipe(duplex=False)
    ranks = [FORK.Process(target=rank, args=(each, size, store.port, backend, sender)) for each in range(size)]
    for each in ranks:
        each.start()
    sender.close()
    hashes: dict[str, list[str | None]] = receiver.recv()
    for each in ranks:
        each.join(300)
    assert [each.exitcode for each in ranks] == [0] * size
    return hashes


def torchrun(ranks: int, *words: str, restarts: int = 0) -> subprocess.CompletedProcess[str]:
    """Start so many processes as torchrun does."""
    start = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    command = [*start, "--max-restarts", str(restarts), *words]
    return subprocess.run(
        command, capture_output=True, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"}, check=False, timeout=300
    )


def answered(*words: str, restarts: int = 0) -> dict[str, object]:
    """Return what the run of two ranks says in the end, as rank 0 prints it."""
    done = torchrun(2, str(SCRIPT), *words, restarts=restarts)
    assert done.returncode == 0, done.stderr
    result: dict[str, object] = json.loads(done.stdout.splitlines()[-1])
    return result


@pytest.mark.processes
def test_two_and_four_ranks_are_one_process_to_the_bit() -> None:
    """Law: every method, a robust rule, an attack, lost clients, early stopping; model, private rows and answers."""
    plain = found("loop")
    assert together(2, "loop") == plain
    assert together(4, "loop") == plain


@pytest.mark.processes
def test_under_vmap_the_number_of_ranks_cannot_be_seen() -> None:
    """Law: groups that are computed together do not depend on the number of ranks."""
    assert together(2, "vmap") == together(1, "vmap")


@pytest.mark.processes
def test_a_rank_that_dies_is_started_again_and_another_number_goes_on(tmp_path: Path) -> None:
    """Law: torchrun's restart goes on from the checkpoint; so do two ranks where one process was killed."""
    straight = run_in(str(tmp_path / "straight"), "straight")
    killed = FORK.Process(target=run_in, args=(str(tmp_path / "by hand"), "dying"))
    killed.start()
    killed.join()
    assert killed.exitcode == -9
    assert not (tmp_path / "by hand" / "result.json").exists()
    again = answered("dying", str(tmp_path / "elastic"), restarts=1)
    for folder, result in (("elastic", again), ("by hand", answered("resumed", str(tmp_path / "by hand")))):
        for part in ("model_sha256", "kept_sha256", "test"):
            assert result[part] == straight[part]
        for file in ("rounds.jsonl", "clients.csv"):
            assert (tmp_path / folder / file).read_bytes() == (tmp_path / "straight" / file).read_bytes()


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
