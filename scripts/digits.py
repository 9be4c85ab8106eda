"""Bring every page that shows figures of `digits` in line with docs/digits.md; `make digits` runs both.

    metavd compare all --seeds 3 --device cpu --jobs 2 --out runs/digits --page docs/digits.md
    python scripts/digits.py runs/digits

Written anew: the README's table and the number of methods, the caption of the picture and the table of the first run in
docs/start.md, what docs/results.md says of the page, docs/picture.png, and docs/report.png where there is a Chromium.
Sentences that judge the figures are left to a reader.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from PIL import Image

ROOT = Path(__file__).resolve().parent.parent
README, START, RESULTS, PAGE = "README.md", "docs/start.md", "docs/results.md", "docs/digits.md"
SHOWN = ("fedavg", "reptile", "maml", "reptile+dropout", "reptile+metavd", "maml+metavd")
"""Rows of the README's table, and methods of docs/report.png."""
CAPTION = ("fedavg", "reptile", "reptile+metavd")
"""Methods of docs/picture.png."""
NUMBERS = {6: "six"}
SCREEN = (1280, 1620)
"""Pixels of docs/report.png."""


def read(name: str) -> str:
    """Return a page of the repository."""
    return (ROOT / name).read_text(encoding="utf-8")


def changed(text: str, pattern: str, new: str) -> str:
    """Return the text with the first group of a pattern, which is there once, written anew."""
    found = list(re.finditer(pattern, text, re.DOTALL))
    if len(found) != 1:
        raise SystemExit(f"{pattern!r} is there {len(found)} times, but must be there once")
    start, end = found[0].span(1)
    return text[:start] + new + text[end:]


def following(page: str) -> dict[str, str]:
    """Return the pages whose figures follow from docs/digits.md alone, as they must be."""
    lines = page.splitlines()
    head = next(place for place, line in enumerate(lines) if line.startswith("| method |"))
    rows = {line.split(" | ")[0].strip("| "): line for line in lines[head + 2 :] if line.startswith("| ")}
    table = "\n".join([*lines[head : head + 2], *(rows[method] for method in SHOWN)])
    readme = changed(read(README), r"(\| method \| test accuracy.*?)\n\n", table)
    readme = changed(readme, rf"{NUMBERS[len(SHOWN)]} of the (\d+) methods", str(len(rows)))

    cells = {method: rows[method].split(" | ") for method in CAPTION}
    first, second, third = (cells[method][1] for method in CAPTION)
    unseen = [cells[method][2] for method in CAPTION]
    new = f"{unseen[0]}, {unseen[1]} and {unseen[2]}"
    said = f"fedavg {first}, reptile {second},\nreptile+metavd {third}; of unseen clients {new}"
    start = changed(read(START), r"interval over three seeds: (fedavg .*?)\. The intervals", said)

    results = changed(read(RESULTS), r"\[digits\.md\]\(digits\.md\): (\d+) methods", str(len(rows)))
    seconds, cores = re.search(r"(\d+) s of runs", page), re.search(r"(\d+) cores", page)
    if seconds is None or cores is None:
        raise SystemExit(f"{PAGE} does not say how long its runs took, and on how many cores")
    time = f"{int(seconds[1]) / 60:.0f} minutes of runs on a machine of {cores[1]} cores"
    results = changed(results, r"The first line is (.*? cores)", time)
    return {README: readme, START: start, RESULTS: results}


def first_run() -> str:
    """Return what `metavd run` prints, in a folder of its own."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "metavd", "run", "--device", "cpu"]
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=True, env=_here())
    return "\n".join(line.rstrip() for line in done.stdout.strip().splitlines())


def _here() -> dict[str, str]:
    """Return the environment with this checkout's package first."""
    path = os.pathsep.join(filter(None, [str(ROOT / "src"), os.environ.get("PYTHONPATH", "")]))
    return {**os.environ, "PYTHONPATH": path}


def screenshot(runs: Path) -> bool:
    """Draw docs/report.png, a report of the methods of the README's table; False where there is no Chromium."""
    browser = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
    if browser is None:
        return False
    with tempfile.TemporaryDirectory() as folder:
        page = Path(folder) / "report.html"
        report = ["-m", "metavd", "report", *(str(runs / method) for method in SHOWN), "--out", str(page)]
        subprocess.run([sys.executable, *report], check=True, capture_output=True, env=_here())
        flags = ["--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars"]
        flags += [f"--user-data-dir={folder}/profile", f"--window-size={SCREEN[0]},{SCREEN[1]}"]
        picture = Path(folder) / "report.png"
        subprocess.run([browser, *flags, f"--screenshot={picture}", page.as_uri()], check=True, capture_output=True)
        Image.open(picture).convert("RGB").quantize(64).save(ROOT / "docs" / "report.png", optimize=True)
    return True


def main(argv: Sequence[str] | None = None) -> int:
    """Write the pages; return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", type=Path, nargs="?", help="what compare wrote; without it only what the page says")
    given = parser.parse_args(argv)
    for name, text in following(read(PAGE)).items():
        (ROOT / name).write_text(text, encoding="utf-8")
        print(f"written: {name}")
    if given.runs is None:
        return 0
    start = changed(read(START), r"```text\n(digits, .*?)\n```", first_run())
    (ROOT / START).write_text(start, encoding="utf-8")
    picture = [ROOT / "scripts" / "picture.py", given.runs, ROOT / "docs" / "picture.png"]
    subprocess.run([sys.executable, *picture], check=True, env=_here())
    drawn = screenshot(given.runs)
    print(f"written: the first run in {START}, docs/picture.png" + (", docs/report.png" if drawn else ""))
    if not drawn:
        print("docs/report.png is as it was: there is no Chromium here (make chromium)")
    return 0


if __name__ == "__main__":
    sys.exit(main())
