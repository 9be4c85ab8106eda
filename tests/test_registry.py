"""Tables that another package joins: found by entry point, imported when asked for, and honest about what is broken."""

from __future__ import annotations

import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from metavd.registry import Registry


class TableError(ValueError):
    """The table's own."""


@pytest.fixture
def package(tmp_path, monkeypatch):
    """Install a package: files, and entry points of the group `things`."""

    def install(points: dict[str, str], **modules: str) -> Path:
        about = tmp_path / "outside-1.0.dist-info"
        about.mkdir()
        (about / "METADATA").write_text("Metadata-Version: 2.1\nName: outside\nVersion: 1.0\n")
        (about / "entry_points.txt").write_text(
            "".join(f"[{group}]\n{line}\n" for group, line in points.items()).replace("; ", "\n")
        )
        for name, code in modules.items():
            (tmp_path / f"{name}.py").write_text(textwrap.dedent(code))
        monkeypatch.syspath_prepend(str(tmp_path))
        return tmp_path

    return install


def table() -> Registry[int]:
    return Registry("thing", "things", int, TableError)


def test_entries_come_from_other_packages(package):
    """An entry point names an entry or a module that adds one; only what is asked for is imported."""
    package({"things": "seven = outside_seven:seven; lazy = outside_lazy"}, outside_seven="seven = 7",
            outside_lazy="raise SystemExit('imported')")  # fmt: skip
    things = table()
    things.add("one", 1)
    assert list(things) == ["one", "seven", "lazy"]
    assert "seven" in things
    assert "eight" not in things
    assert things["seven"] == 7
    assert len(things) == 3
    assert "outside_lazy" not in sys.modules
    with pytest.raises(KeyError):
        things["eight"]


def test_broken_packages_are_named(package):
    """One sentence with the package: its module fails, or adds nothing."""
    package({"things": "bad = outside_bad; empty = outside_empty; text = outside_empty:text"},
            outside_bad="import nowhere_to_be_found", outside_empty="text = 'no number'")  # fmt: skip
    things = table()
    for name, says in (("bad", "nowhere_to_be_found"), ("empty", "adds no such thing"), ("text", "adds no such thing")):
        with pytest.raises(TableError, match="'outside'") as caught:
            things[name]
        assert says in str(caught.value)
        assert "\n" not in str(caught.value)
        assert str(caught.value).endswith(".")


def test_a_name_is_taken_once():
    """The second entry of a name is refused, whichever of a built-in and an added one is imported first."""
    things = Registry("thing", "things", int, TableError, {"built": "metavd.version"})
    things.add("one", 1)
    with pytest.raises(TableError, match="already a thing 'one'"):
        things.add("one", 2)


def test_a_dataset_and_a_partition_of_another_package(package):
    """Each is one file; the command line lists the dataset, and a run deals it by the partition."""
    place = package(
        {"metavd.datasets": "stripes = outside_stripes", "metavd.partitions": "turns = outside_turns:turns"},
        outside_stripes="""
            from pathlib import Path
            import numpy as np
            from metavd.data.formats import Plan, dataset
            from metavd.data.source import arrays

            @dataset("stripes", "stripes that lie or stand", options={"rows": "how many"}, files=False)
            def plan_stripes(root, *, rows: int = 60) -> Plan:
                y = np.arange(rows) % 2
                x = np.zeros((rows, 8, 8), np.uint8)
                x[y == 0, ::2], x[y == 1, :, ::2] = 255, 255
                return Plan("stripes", Path(root), (), lambda _: arrays(x, y, name="stripes"))
        """,
        outside_turns="""
            import numpy as np
            from metavd.data.partition import PartitionKind

            def by_turns(step: int, *, least: int = 1):
                return lambda y, num, rng, client_ids=None: [np.arange(k, len(y), num)[::step] for k in range(num)]

            turns = PartitionKind(by_turns, int, "turns:1")
        """,
    )
    code = """
        import json
        import metavd
        from metavd.data.formats import check, info, load
        assert info("stripes").options["rows"].default == 60
        result = metavd.run(data="stripes:rows=90", partition="turns:1", clients=3, unseen=0, rounds=1, cohort=2)
        assert result["test"]["samples"] == 18, result["test"]
        from metavd.data.partition import PartitionError, parse
        try:
            parse("turns:x")
        except PartitionError as error:
            assert "such as turns:1" in str(error)
    """
    run = [sys.executable, "-c", textwrap.dedent(code)]
    subprocess.run(run, check=True, timeout=300, env=_environment(place), cwd=place)
    answer = subprocess.run(
        [sys.executable, "-m", "metavd", "datasets", "--json"],
        check=True, timeout=300, env=_environment(place), capture_output=True, text=True,
    )  # fmt: skip
    assert '"stripes"' in answer.stdout


def _environment(place: Path) -> dict[str, str]:
    import os

    paths = [str(place), str(Path(__file__).parents[1] / "src"), os.environ.get("PYTHONPATH", "")]
    return os.environ | {"PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": "1"}
