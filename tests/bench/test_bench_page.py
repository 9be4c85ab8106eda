"""The page: rendered from stored figures alone, each device's part kept when the other's is new."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from metavd.bench.measure import OURS
from metavd.bench.page import merged, read, store_figures, table, write_page
from metavd.bench.scale import Point
from metavd.errors import UserError


def variant(name: str, seconds: float, **more: Any) -> dict[str, Any]:
    return {"name": name, "round_s": seconds, "median_s": 1.1 * seconds,
            "against_ours": seconds / 0.5, "images_s": 1000 / seconds, "tflops": 0.1,
            "share": 0.83, "memory_mb": 469.4, **more}  # fmt: skip


def found(device: str, **more: Any) -> dict[str, Any]:
    extra = {"cuda_mb": 2048.0} if device == "cuda" else {}
    point = {"round_s": 0.2, "images_s": 10.0, "tflops": 0.1, "memory_mb": 9.0, **extra}
    return {
        "device": device, "machine": f"a {device}", "threads": 2, "torch": "2.13", "python": "3.11", "version": "0.1",
        "commit": "c0ffee", "date": "2026-01-01", "quick": False, "command": f"metavd bench --device {device}",
        "peaks": {"float32": 1e11}, "whole": [],
        "curves": {"cohort": [{"value": value, **point} for value in (1, 1000)]},
        "workloads": [{
            "name": "tiny", "flops_image": 3e4, "images": 2000,
            "variants": [
                variant(OURS, 0.5, backend="vmap", precision="float32", **extra), variant("loop", 1.0, **extra),
                {"name": "pfl", "error": "RuntimeError: no"},
            ],
        }],
        **more,
    }  # fmt: skip


def stored(folder: Path, *devices: str, **more: Any) -> Path:
    folder.mkdir(exist_ok=True)
    for device in devices:
        (folder / f"bench-{device}.json").write_text(json.dumps(found(device, **more)))
    return folder


def test_a_table_has_a_cell_for_every_heading():
    for device in ("cpu", "cuda"):
        rows = table(found(device)["workloads"][0])
        assert len({len(row) for row in rows}) == 1
        assert rows[1][:3] == ["metavd (vmap, float32)", "0.500", "1.00"]
        assert rows[2][:3] == ["loop", "1.00", "2.00"]
        assert rows[3][1] == "failed"
        assert ("GPU MB" in rows[0]) == (device == "cuda")


def test_a_page_says_where_variants_differ_in_precision(tmp_path):
    """bf16 beside a float32 loop is told; products that are exact are as the loop's."""
    for precision, told in (("bf16", True), ("exact", False), ("float32", False)):
        figures = found("cuda")
        figures["workloads"][0]["variants"][0]["precision"] = precision
        store_figures(tmp_path / precision / "bench-cuda.json", figures)
        write_page(tmp_path / "page.md", tmp_path / precision)
        said = f"metavd's products are in {precision}, its default on this device; the other variants'"
        assert (said in (tmp_path / "page.md").read_text()) == told


def test_each_device_keeps_its_part(tmp_path):
    """Law: a new measurement on one device leaves the other's part to the letter."""
    page, folder = tmp_path / "docs" / "performance.md", tmp_path / "results"
    write_page(page, stored(folder, "cpu", "cuda"))
    first = page.read_text()
    write_page(page, stored(folder, "cuda", commit="beef"))
    second = page.read_text()
    assert first != second
    cut = "## On a GPU"
    assert first.partition(cut)[0] == second.partition(cut)[0]
    assert "beef" in second.partition(cut)[2]


def test_the_page_says_how_it_was_made(tmp_path):
    page = tmp_path / "performance.md"
    write_page(page, stored(tmp_path / "results", "cpu"))
    text = page.read_text()
    for word in (
        "metavd bench --device cpu",
        "c0ffee",
        "a cpu",
        "2026-01-01",
        "pfl failed: RuntimeError: no",
        "| loop |",
    ):
        assert word in text
    assert "## On a GPU" not in text
    picture = tmp_path / "performance_files" / "curves-cpu.svg"
    assert picture.name in text
    drawn = picture.read_text()
    assert drawn.lstrip().startswith("<?xml")
    assert "1,000" in drawn
    assert "mathdefault" not in drawn


def test_the_same_figures_give_the_same_files(tmp_path):
    page = tmp_path / "performance.md"
    folder = stored(tmp_path / "results", "cpu")
    made = []
    for _ in range(2):
        write_page(page, folder)
        made.append((page.read_bytes(), (tmp_path / "performance_files" / "curves-cpu.svg").read_bytes()))
    assert made[0] == made[1]


def test_without_curves_there_is_no_picture(tmp_path):
    page = tmp_path / "performance.md"
    write_page(page, stored(tmp_path / "results", "cpu", curves={}))
    assert "![" not in page.read_text()
    assert not (tmp_path / "performance_files").exists()


def test_whole_runs_have_a_table(tmp_path):
    page = tmp_path / "performance.md"
    run = {
        "method": "maml",
        "at_once": 1,
        "rounds": 1000,
        "seconds": 51.23,
        "start_s": 4.5,
        "cold_s": 21.04,
        "round_s": 0.05,
        "test": 0.8,
        "unseen": 0.7,
    }
    write_page(
        page, stored(tmp_path / "results", "cuda", whole=[run, {"method": "reptile", "at_once": 4, "error": "no"}])
    )
    text = page.read_text()
    assert "| maml | 1 | 1,000 | 51.2 | 4.5 | 21.0 | 50.0 | 80.00% | 70.00% |" in text
    assert "| reptile | 4 | failed |" in text


def test_pieces_of_one_machine_come_together():
    """Law: what was measured anew replaces its like, the rest stays and names its commit; another machine's goes."""
    old = found("cpu", commit="beef", curves={"cohort": [{"value": 1}], "width": [{"value": 16}]},
                whole=[{"method": "maml", "at_once": n, "seconds": 9} for n in (1, 4)])  # fmt: skip
    new = found("cpu", commit="cafe", curves={"cohort": [{"value": 2}]}, workloads=[{"name": "cifar"}],
                whole=[{"method": "maml", "at_once": 4, "seconds": 8}], command="metavd bench --only")  # fmt: skip
    both = merged(old, new)
    assert both["commit"] == "cafe"
    assert both["command"].split("\n") == ["metavd bench --device cpu", "metavd bench --only"]
    assert [(each["name"], each["commit"]) for each in both["workloads"]] == [("tiny", "beef"), ("cifar", "cafe")]
    assert both["curves"] == {"cohort": [{"commit": "cafe", "value": 2}], "width": [{"commit": "beef", "value": 16}]}
    assert [(each["seconds"], each["commit"]) for each in both["whole"]] == [(9, "beef"), (8, "cafe")]
    assert merged(both, new) == both
    assert merged(old | {"machine": "other"}, new) == merged({}, new)
    assert [each["name"] for each in merged({}, new)["workloads"]] == ["cifar"]


def test_a_piece_of_another_commit_says_so(tmp_path):
    page, folder = tmp_path / "page.md", stored(tmp_path, "cpu", commit="beef")
    store_figures(folder / "bench-cpu.json", found("cpu", commit="cafe", workloads=[]))
    write_page(page, folder)
    sections = page.read_text().split("\n### ")
    assert "at commit cafe" in sections[0]
    assert [title.split("\n")[0] for title in sections if "Measured at commit beef." in title] == ["tiny"]


def test_nothing_or_nonsense_is_one_sentence(tmp_path):
    with pytest.raises(UserError, match="there are no figures in"):
        write_page(tmp_path / "page.md", tmp_path)
    (tmp_path / "bench-cpu.json").write_text("{")
    with pytest.raises(UserError, match=r"bench-cpu\.json holds no figures of a benchmark"):
        read(tmp_path)


def test_starts_stand_beside_older_figures(tmp_path):
    """Law: to measure starts alone, on whatever machine, takes no other figure away; the page has a line of them."""
    start = {"command": "metavd --help", "seconds": 0.123, "machine": "another"}
    new = found("cpu", machine="another", workloads=[], curves={}, starts=[start])
    both = merged(found("cpu"), new)
    assert [each["name"] for each in both["workloads"]] == ["tiny"]
    (tmp_path / "bench-cpu.json").write_text(json.dumps(both))
    write_page(tmp_path / "page.md", tmp_path)
    assert "on another: `metavd --help` 0.12 s." in (tmp_path / "page.md").read_text()
    assert merged(both, found("cpu"))["starts"] == both["starts"]


def point(machine: str, **more: Any) -> dict[str, Any]:
    measured = {"start_s": 1.0, "round_s": 0.03, "evaluation_s": 0.1, "memory_mb": 400.0, "backend": "vmap",
                "start_cpu_s": 0.5, "round_cpu_s": 0.02, "evaluation_cpu_s": 0.05}  # fmt: skip
    return {**asdict(Point("fedavg", 1000)), **measured, "machine": machine, **more}


def test_how_runs_grow_stands_beside_older_figures(tmp_path):
    """Law: as starts do, these pieces name their machine and take no other figure away, wherever they were made."""
    pieces = {
        "many": [point("another"), {**asdict(Point("fedper", 10**6)), "machine": "another", "error": "no"}],
        "ranks": [point("another", ranks=2)],
    }
    new = found("cpu", machine="another", commit="cafe", workloads=[], curves={}, scale=pieces)
    both = merged(found("cpu"), new)
    assert [each["name"] for each in both["workloads"]] == ["tiny"]
    assert both["machine"] == "a cpu"
    again = merged(both, found("cpu", workloads=[], curves={}, scale={"ranks": [point("third", ranks=4)]}))
    assert [each["machine"] for each in again["scale"]["many"] + again["scale"]["ranks"]] == ["another"] * 2 + ["third"]
    (tmp_path / "bench-cpu.json").write_text(json.dumps(again))
    write_page(tmp_path / "page.md", tmp_path)
    text = (tmp_path / "page.md").read_text()
    assert "| fedavg | 1,000 | iid | 1.0 (0.5) | 30 (20) | 0.10 (0.05) | 400 |" in text
    assert "| fedper | 1,000,000 | iid | failed |" in text
    assert "On another. Measured at commit cafe." in text
    assert "| fedavg | 4 | vmap | 1.0 (0.5) |" in text


def test_a_gpu_has_its_own_large_cohorts(tmp_path):
    """The device's memory stands beside the host's, and the text says what was measured there."""
    failed = asdict(Point("fedavg", 10**4, device="cuda", part=0)) | {"machine": "a gpu", "error": "no"}
    pieces = {"large": [point("a gpu", device="cuda", cohort=10_000, cuda_mb=5000.0), failed]}
    write_page(tmp_path / "page.md", stored(tmp_path, "cuda", scale=pieces))
    text = (tmp_path / "page.md").read_text()
    assert "the paper's network (64 filters)" in text
    assert "| fedavg | 10,000 | 512 | 1.0 (0.5) | 30 (20) | 0.10 (0.05) | 400 | 5,000 |" in text
    assert "| fedavg | 10 | all | failed |  |  |  |  |" in text


def test_a_round_of_every_method_stands_beside_its_kernels(tmp_path):
    """Whoever reads sees whether a round waits for the host; a method that failed has no figure."""
    failed = asdict(Point("pfedgp", 100, device="cuda")) | {"machine": "a gpu", "error": "no"}
    pieces = {"methods": [point("a gpu", device="cuda", backend="vmap", kernels_s=0.02, cuda_mb=900.0), failed]}
    write_page(tmp_path / "page.md", stored(tmp_path, "cuda", scale=pieces))
    text = (tmp_path / "page.md").read_text()
    assert "### Every method" in text
    assert "| method | backend | start s | ms per round | kernels ms |" in text
    assert "| fedavg | vmap | 1.0 (0.5) | 30 (20) | 20 | 0.10 (0.05) | 400 | 900 |" in text
    assert "| pfedgp |  | failed |" in text


def test_a_workload_beside_a_load_stands_beside_the_other(tmp_path):
    """Law: neither takes the other's place, and the heading says which is which."""
    quiet = found("cpu")
    (work,) = quiet["workloads"]
    both = merged(quiet, {**quiet, "workloads": [{**work, "load": 2}]})
    assert [each.get("load") for each in both["workloads"]] == [None, 2]
    assert len(merged(both, quiet)["workloads"]) == 2
    (tmp_path / "bench-cpu.json").write_text(json.dumps(both))
    write_page(tmp_path / "page.md", tmp_path)
    assert "### tiny, the median round beside 2 busy loops" in (tmp_path / "page.md").read_text()
