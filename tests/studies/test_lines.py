"""The file of finished runs: what names a run, what comes back, and what a crash or a second process may do to it."""

from __future__ import annotations

import json
import math
import multiprocessing
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from metavd import methods
from metavd.errors import SpecError
from metavd.runs.settings import RUNTIME, SETTINGS
from metavd.runs.store import StoreError
from metavd.schema import Option
from metavd.studies.lines import append, complete, identity, read

MAML = {"method": "maml", "data": "digits", "seed": 777}


def line(seed: int, scope: str = "", **content: Any) -> dict[str, Any]:
    return {"scope": scope, "settings": {"data": "digits", "seed": seed}, **(content or {"result": {}})}


def names(*seeds: int, scope: str = "") -> list[str]:
    return [identity({"data": "digits", "seed": seed}, scope) for seed in seeds]


def test_a_run_is_named_by_what_it_computes() -> None:
    """Law: the same settings are the same run, in whatever order; a seed, a scope or an option makes another."""
    first = identity(MAML)
    assert first == identity(dict(reversed(MAML.items())))
    others = [identity(MAML | {"seed": 778}), identity(MAML, "smoke"), identity(MAML | {"lr": 0.03})]
    assert len({first, *others}) == 4


def other(setting: Option) -> Any:
    """Return a value that a setting may have and does not have by default."""
    some = [*(setting.allowed or ()), 0.25, 0.5, 2, "false", "true", "median", "sign-flip:0.5", "mlp"]
    for value in some:
        with suppress(SpecError):
            if (found := setting.check(value)) != setting.default:
                return found
    raise AssertionError(f"no other value of {setting.name}")


def test_every_setting_and_option_is_part_of_the_name() -> None:
    """Law: two runs that differ in one field that decides what is computed, or in one option, are two runs."""
    fields = [each for name, each in SETTINGS.items() if name not in RUNTIME | {"method"}]
    changed = [MAML | {each.name: other(each)} for each in (*fields, *methods.options_of("maml").values())]
    assert len({identity(MAML), *map(identity, changed)}) == 1 + len(changed)


def test_a_default_said_aloud_is_the_same_run() -> None:
    """Law: options count by their values, not by whether or in what type they were given."""
    assert identity(MAML | {"lr": str(methods.options_of("maml")["lr"].default)}) == identity(MAML)


def test_complete_settings_hold_every_option() -> None:
    assert complete(MAML) == MAML | methods.resolve("maml", {})
    assert complete({"data": "digits"}) == {"data": "digits"}


def test_lines_come_back_and_the_latest_counts(tmp_path: Path) -> None:
    store = tmp_path / "new" / "store.jsonl"
    assert read(store) == {}
    append(store, line(1, result={"x": 1}))
    append(store, line(2, failed="diverged"))
    append(store, line(1, result={"x": 2}))
    found = read(store)
    assert list(found) == names(1, 2)
    assert found[names(1)[0]]["result"] == {"x": 2}


def test_a_changed_default_is_another_run_and_a_new_option_is_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Law: a stored line keeps the values it was run with; an option that came later counts at its default."""
    store = tmp_path / "store.jsonl"
    whole = complete(MAML)
    append(store, {"scope": "", "settings": whole, "result": {}})
    assert list(read(store)) == [identity(MAML)]
    older = {key: value for key, value in whole.items() if key != "clip"}
    assert len(older) == len(whole) - 1
    append(store, {"scope": "", "settings": older, "result": {}})
    assert list(read(store)) == [identity(MAML)]

    def other_default(method: str, given: dict[str, Any]) -> dict[str, Any]:
        return whole_resolve(method, {"lr": 0.123} | given)

    whole_resolve = methods.resolve
    monkeypatch.setattr(methods, "resolve", other_default)
    assert identity(MAML) not in read(store)


def test_an_option_that_is_gone_is_noted(tmp_path: Path) -> None:
    store = tmp_path / "store.jsonl"
    append(store, {"scope": "", "settings": MAML | {"method": "nobody"}, "result": {}})
    notes: list[str] = []
    assert read(store, note=notes.append) == {}
    assert notes == [f"line 1 of {store} is not a whole result and is left out"]


@pytest.mark.parametrize(
    "cut", [b'{"id":"b","sc', b"[]", b"null", b"7", b'{"id":"b"}', b"\xff\xfe", b'{"id":"b","scope":"full"}']
)
def test_a_broken_last_line_is_noted_and_stays_alone(tmp_path: Path, cut: bytes) -> None:
    """Law: what a crash leaves behind costs neither the lines before it nor the one after it."""
    store = tmp_path / "store.jsonl"
    append(store, line(1, "full"))
    with store.open("ab") as file:
        file.write(cut)
    notes: list[str] = []
    assert list(read(store, "full", notes.append)) == names(1, scope="full")
    assert notes == [f"line 2 of {store} is not a whole result of scope full and is left out"]
    append(store, line(3, "full"))
    assert list(read(store, "full")) == names(1, 3, scope="full")


def test_another_scope_is_not_read(tmp_path: Path) -> None:
    """Law: a result that was taken under other rules is not taken for this one's."""
    append(tmp_path / "store.jsonl", line(1, "smoke"))
    assert read(tmp_path / "store.jsonl", "full") == {}
    assert list(read(tmp_path / "store.jsonl", "smoke")) == names(1, scope="smoke")


def test_what_is_no_number_cannot_be_stored(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="JSON"):
        append(tmp_path / "store.jsonl", line(1, result={"x": math.nan}))
    assert read(tmp_path / "store.jsonl") == {}


def append_many(store: Path, name: str) -> None:
    for i in range(100):
        append(store, {"scope": "", "settings": {"data": name, "seed": i, "x": "y" * 5000}, "result": {}})


@pytest.mark.processes
def test_two_processes_append_at_once(tmp_path: Path) -> None:
    """Law: no line is lost or torn when two processes write, even with a broken line before them."""
    store = tmp_path / "store.jsonl"
    store.write_text('{"id":')
    fork = multiprocessing.get_context("fork")
    both = [fork.Process(target=append_many, args=(store, name)) for name in "ab"]
    for process in both:
        process.start()
    for process in both:
        process.join(600)
    assert [process.exitcode for process in both] == [0, 0]
    notes: list[str] = []
    assert len(read(store, note=notes.append)) == 200
    assert len(notes) == 1


def test_places_that_cannot_be_used_are_said(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(StoreError, match="cannot write to the store"):
        append(tmp_path / "file" / "store.jsonl", line(1))
    with pytest.raises(StoreError, match="cannot read the store"):
        read(tmp_path)


ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize("name", ["paper", "perfedavg", "precision"])
def test_the_stores_in_the_repository_are_whole(name: str) -> None:
    """Law: every line of a store that pages are written from can be read, and no two are of one run."""
    rows = (ROOT / "results" / f"{name}.jsonl").read_text().splitlines()
    scopes = {json.loads(row)["scope"] for row in rows}
    assert len(scopes) == 1
    notes: list[str] = []
    found = read(ROOT / "results" / f"{name}.jsonl", scopes.pop(), notes.append)
    assert notes == []
    assert len(found) == len(rows)


def test_another_file_is_no_store(tmp_path: Path) -> None:
    """A table named by mistake is refused before anything is added to it; half a line of ours is no other file."""
    (tmp_path / "table.csv").write_text("a,b\n1,2\n")
    with pytest.raises(StoreError, match="holds no JSON line; name stores of metavd"):
        read(tmp_path / "table.csv")
    (tmp_path / "half.jsonl").write_text('{"scope": ')
    assert read(tmp_path / "half.jsonl") == {}
