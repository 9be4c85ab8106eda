"""Figures in the docs are those that their commands print today, where that takes seconds; docs/results.md says which.

Rounding differs between machines and grows over rounds, so that each comparison has a tolerance: that of a mean over
seeds is 2 points of accuracy or calibration error and 0.05 nats, that of one run 3 points and 0.1 nats.
"""

import json
import re
import runpy
import shlex
import sys
from pathlib import Path

import pytest

import metavd
from metavd.cli import main

ROOT = Path(__file__).resolve().parent.parent
METHODS = ("fedavg", "reptile", "reptile+metavd")
RUN = ("fedavg", "reptile+metavd")
"""Those that are run here."""


def text(name: str) -> str:
    return (ROOT / name).read_text(encoding="utf-8")


def numbers(line: str) -> list[float]:
    """The numbers of a line, without those in words."""
    return [float(each) for each in re.findall(r"(?<![\w.])\d+(?:\.\d+)?(?![\w])", line)]


@pytest.fixture(scope="module")
def compared(tmp_path_factory) -> Path:
    """The comparison that README, docs/start.md and docs/digits.md show: its command with the same defaults."""
    out = tmp_path_factory.mktemp("picture")
    metavd.compare(RUN, seeds=3, out=out, device="cpu")
    return out


def test_the_table_of_the_readme(compared):
    """Two methods over three seeds as printed now; all rows are in docs/digits.md, which names its command."""
    fresh = (compared / "comparison.md").read_text().splitlines()
    head, rows = fresh[0], {line.split(" | ")[0].strip("| "): line for line in fresh[2:]}
    shown = [line for line in text("README.md").splitlines() if " ± " in line]
    assert head in text("README.md")
    assert len(shown) == 6
    assert all(line in text("docs/digits.md").splitlines() for line in shown)
    units = [0.05 if "NLL" in title else 0.01 if "MB" in title else 2.0 for title in head.strip("| ").split(" | ")[1:]]
    for method in RUN:
        line = next(line for line in shown if line.startswith(f"| {method} |"))
        pairs = zip(line.split(" | ")[1:], rows[method].split(" | ")[1:], units, strict=True)
        for said, found, within in pairs:
            (mean, half), (now, half_now) = numbers(said), numbers(found)
            assert now == pytest.approx(mean, abs=within), (method, said, found)
            # Student's quantile for three seeds, over the root of three, makes 2.5 of a deviation of 1.
            assert half_now == pytest.approx(half, abs=2.5 * within), (method, said, found)


def test_the_caption_of_the_picture():
    """It repeats the table."""
    caption = re.search(r"\*Accuracy of participating.*?\*", text("docs/start.md"), re.DOTALL)[0].replace("\n", " ")
    rows = [line for line in text("README.md").splitlines() if line.split(" | ")[0].strip("| ") in METHODS]
    test, unseen = ([row.split(" | ")[column] for row in rows] for column in (1, 2))
    assert re.findall(r"\d+\.\d ± \d+\.\d", caption) == [*test, *unseen]


def test_pages_follow_from_docs_digits():
    """What scripts/digits.py would write from the page is there: the README's rows, the caption, counts and minutes."""
    for name, expected in runpy.run_path(str(ROOT / "scripts" / "digits.py"))["following"](
        text("docs/digits.md")
    ).items():
        assert text(name) == expected, f"{name} is out of date: run python scripts/digits.py"


def test_the_table_of_the_first_run(compared):
    """docs/start.md: what `make run` prints, both methods with seed 0; seconds are the machine's."""
    results = [json.loads((compared / method / "seed-0" / "result.json").read_text()) for method in RUN[::-1]]
    part, seen = "", 0
    keys = {"accuracy": ("accuracy", 100, 3), "worst client": ("worst_client", 100, 12), "NLL": ("nll", 1, 0.1),
            "calibration error": ("ece_top1", 100, 3)}  # fmt: skip
    for line in text("docs/start.md").splitlines():
        title, *cells = [cell.strip() for cell in line.strip("│").split("│")]
        part = "test" if title.startswith("participating") else "unseen" if title.startswith("never seen") else part
        if title in keys and line.startswith("│"):
            key, factor, within = keys[title]
            said = [float(cell.rstrip(" %")) for cell in cells[:2]]
            assert [factor * each[part][key] for each in results] == pytest.approx(said, abs=within), (part, title)
            seen += 1
        if title == "traffic MB":
            sent = [(each["bytes"]["down"] + each["bytes"]["up"]) / 1e6 for each in results]
            assert sent == pytest.approx([float(cell) for cell in cells[:2]], abs=0.01)
            seen += 1
    assert seen == 9


def test_the_gotchas_of_momentum_and_of_test_rows():
    """docs/gotchas.md: four NLLs after 20 rounds, and the shares of rows with a label that their client never had."""
    page = " ".join(text("docs/gotchas.md").split())
    said = re.search(r"the test NLL of `fedavg` is ([\d.]+) at `lr=0.1` and below ([\d.]+) at `lr=1`, that of "
                     r"`reptile` ([\d.]+) and above ([\d.]+)\. ", page)  # fmt: skip
    small, below, small_too, above = map(float, said.groups())
    nll = {(method, lr): metavd.run(method=method, rounds=20, lr=lr)["test"]["nll"]
           for method in ("fedavg", "reptile") for lr in (0.1, 1.0)}  # fmt: skip
    assert [nll["fedavg", 0.1], nll["reptile", 0.1]] == pytest.approx([small, small_too], rel=0.15)
    assert nll["fedavg", 1.0] < below < above < nll["reptile", 1.0]
    shares = re.search(r"(\d+) % of the participating clients' test rows .*? with `independent`, (\d+) % with", page)
    for kind, share in zip(("independent", "consistent"), shares.groups(), strict=True):
        found = metavd.run(method="fedavg", rounds=1, test_rows=kind)["test"]["unknown_share"]
        assert 100 * found == pytest.approx(float(share), abs=0.6)


@pytest.mark.figures
def test_the_gotcha_of_speeds():
    """docs/gotchas.md: the mean dropout rate that each of four ways to learn spreads ends with after 40 rounds."""
    page = " ".join(text("docs/gotchas.md").split())
    said = re.search(r"a mean dropout rate .*? of ([\d.]+); with .*? it is still ([\d.]+) and ([\d.]+), .*? "
                     r"\(([\d.]+) in the same run\)", page)  # fmt: skip
    runs = [("reptile+metavd", {}), ("reptile+vd", {}), ("reptile+ensemblevd", {}),
            ("reptile+vd", {"spread_by": "hypernetwork"})]  # fmt: skip
    for (method, options), figure in zip(runs, said.groups(), strict=True):
        result = metavd.run(method=method, rounds=40, beta=10, clients=20, cohort=5, device="cpu", **options)
        found = result["diagnostics"]["rate_mean"]
        assert found == pytest.approx(float(figure), abs=0.03 if float(figure) > 0.5 else 0.006), (method, options)


def test_the_noise_of_the_privacy_tables(monkeypatch):
    """scripts/privacy_table.py gives runs their noise: the least that keeps to each epsilon, as the accountant says."""
    pytest.importorskip("dp_accounting")
    from metavd.core.accountant import Mechanism

    monkeypatch.syspath_prepend(ROOT / "scripts")
    made = runpy.run_path(str(ROOT / "scripts" / "privacy_table.py"))
    for name, setting in (("digits", made["DIGITS"]), ("cifar10", made["CIFAR10"])):
        counts = {key: setting[key] for key in ("clients", "cohort", "rounds")}
        for budget, noise in zip(made["EPSILONS"], made["NOISES"][name], strict=True):
            least = Mechanism(clip=1.0, noise=-1.0, epsilon=budget, delta=made["DELTA"], **counts).found()
            assert noise == pytest.approx(least, rel=1e-3), (name, budget)


def test_some_rules_of_aggregation():
    """docs/aggregation.md: two rules of the table under a sign flip, three seeds, rows dealt both ways."""
    for rule in ("mean", "multi-krum:4"):
        row = re.search(rf"^\| `{rule}` \| ([\d |]+) \|$", text("docs/aggregation.md"), re.MULTILINE)
        said = [float(cell) for cell in row[1].split(" | ")]
        for place, partition in ((1, "iid"), (4, "dirichlet:0.5")):
            settings = {
                "partition": partition,
                "attack": "sign-flip:0.3",
                "aggregate": rule,
                "cohort": 12,
                "rounds": 15,
            }
            runs = [metavd.run(method="fedavg", seed=seed, **settings) for seed in range(3)]
            found = 100 * sum(run["test"]["accuracy"] for run in runs) / 3
            assert found == pytest.approx(said[place], abs=2), (rule, partition)


def test_which_rule_of_aggregation_when():
    """docs/aggregation.md: what it advises follows from its tables, which are written from results/attacks.jsonl."""
    page = text("docs/aggregation.md")
    tables = []
    for block in re.findall(r"^\| rule \| .*(?:\n\|.*)+", page.split("<!-- attacks")[1], re.MULTILINE):
        head, _, *lines = [[cell.strip(" `") for cell in line[1:-1].split("|")] for line in block.splitlines()]
        rows = {row[0].split(":")[0]: [float(cell) for cell in row[1:]] for row in lines}
        tables.append({head[i]: {rule: row[i - 1] for rule, row in rows.items()} for i in range(1, len(head))})
    digits, fedavg, metavd, crude = tables
    columns = [(name, column) for table in tables for name, column in table.items()]

    def cost(rule):
        return max(column["mean"] - column[rule] for name, column in columns if "nobody lies" in name)

    robust = ("median", "trimmed", "multi-krum", "geometric-median", "clip")
    words = " ".join(page.split())
    assert f"`geometric-median` costs at most {cost('geometric-median'):.1f} points" in words
    assert f"`clip` costs at most {cost('clip'):.1f} points" in words
    assert f"costs most when nobody lies, up to {cost('multi-krum'):.0f} points" in words
    few = [column for name, column in columns if ":0.1" in name]
    many = [column for name, column in columns if ":0.3" in name and "nobody" not in name]
    assert len(few) == 3
    assert len(many) == 7
    below = max(max(column[rule] for rule in robust) - column["geometric-median"] for column in few)
    assert f"with one liar in ten it is the best rule or at most {below:.1f} points below it" in words
    assert all(column["multi-krum"] == max(column.values()) for column in many)
    assert all(column["multi-krum"] == min(column.values()) for name, column in columns if "nobody lies" in name), (
        "multi-krum costs most"
    )
    flipped = digits["dirichlet:0.5: `sign-flip:0.3"]
    assert all(abs(flipped[rule] - flipped["mean"]) <= 2 for rule in ("median", "trimmed"))
    for share in ("0.1", "0.3"):
        column = fedavg[f"sign-flip:{share}"]
        assert all(0 < column["mean"] - column[rule] < 2 for rule in ("median", "trimmed"))
    assert all(metavd["sign-flip:0.1"][rule] < metavd["sign-flip:0.1"]["mean"] for rule in ("median", "trimmed"))
    assert max(metavd["sign-flip:0.3"].values()) < metavd["nobody lies"]["mean"] / 2
    assert min(crude["scale:0.1:-20"][rule] for rule in robust) > 60 > 6 * crude["scale:0.1:-20"]["mean"]
    kept = {rule for rule in robust if crude["scale:0.3:-20"][rule] > 50}
    assert kept == {"multi-krum", "geometric-median"}


@pytest.mark.parametrize(
    ("page", "command"),
    [
        ("paper.md", "metavd paper report T7 T8 T9"),
        ("paper-tuned.md", "metavd paper report T7 A2 A3 A4 --tuned --seeds 3 --out docs/paper-tuned.md"),
        ("paper-100.md", "metavd paper report T7 T8 --rounds 100 --out docs/paper-100.md"),
        ("arena.md", "metavd arena --page docs/arena.md"),
        ("tuned.md", "metavd tune-all --page docs/tuned.md"),
        ("performance.md", "metavd bench --render --page docs/performance.md"),
    ],
)
def test_a_page_is_what_its_command_writes(page, command, tmp_path, monkeypatch):
    """From the runs in results/, to the letter: a figure that somebody changed by hand shows here."""
    (tmp_path / "docs").mkdir()
    (tmp_path / "results").symlink_to(ROOT / "results")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", shlex.split(command))
    main()
    assert (tmp_path / "docs" / page).read_text(encoding="utf-8") == text(f"docs/{page}")


@pytest.mark.parametrize(
    "command",
    [
        "mends.py --page mends.md",
        "newcomers.py --page newcomers.md",
        "perfedavg.py --render --page perfedavg.md",
        "precision.py --render --rounds 100 --seeds 3 --page precision.md",
        "shakespeare.py --page shakespeare.md",
        "attack_table.py --page aggregation.md",
        "privacy_table.py --page privacy.md",
        "repeat.py --page repeats.md",
    ],
)
def test_a_page_is_what_its_script_writes(command, tmp_path, monkeypatch):
    """From the runs in results/, to the letter."""
    script, *_, page = shlex.split(command)
    (tmp_path / "results").symlink_to(ROOT / "results")
    stale = re.sub(r"(?<=-->\n)\n.*?(?=<!-- end of)", "\n", text(f"docs/{page}"), flags=re.DOTALL)
    (tmp_path / page).write_text(stale, encoding="utf-8")  # of some pages a script writes a part
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(ROOT / "scripts")
    monkeypatch.setattr(sys, "argv", shlex.split(command))
    runpy.run_path(str(ROOT / "scripts" / script), run_name="__main__")
    assert Path(page).read_text(encoding="utf-8") == text(f"docs/{page}")


def rows_of(page: str, method: str) -> list[list[str]]:
    """The cells of a page's rows whose first cell is a method's name, alone or before how it was run."""
    found = [line.strip("| ").split(" | ") for line in text(page).splitlines() if line.startswith("| ")]
    return [[cell.strip() for cell in row] for row in found if re.match(rf"`?{re.escape(method)}( fp16)?`?$", row[0])]


@pytest.mark.parametrize(
    "method",
    [pytest.param("reptile+metavd", marks=pytest.mark.figures), "reptile+metavd+drop", "fedavg", "fedavg+snip"],
)
def test_bytes_of_a_federation(method, tmp_path):
    """docs/federation.md: what is dropped and what a client's message weighs, rehearsed with the page's settings.

    Masks depend on rounding, so that a message may differ by a hundredth. Flower's own counters take real processes:
    scripts/federation_traffic.py.
    """
    pytest.importorskip("flwr")
    from metavd.flower.rehearse import rehearse

    nodes = {f"client-{number}": {"partition-id": number, "num-partitions": 3} for number in range(3)}
    rows = rows_of("docs/federation.md", method)
    assert rows
    for number, (title, options, layer, model, down, up, *_) in enumerate(rows):
        how = f"unseen=0 model=mlp width=512 local_epochs=1 {options}".strip()
        out = tmp_path / str(number)
        result = rehearse(nodes, method=method, set=how, rounds=3, clients=3, data="digits", half="fp16" in title,
                          out=str(out))  # fmt: skip
        traffic = json.loads((out / "rounds.jsonl").read_text().splitlines()[-1])["traffic"].values()
        said = [float(each.rstrip("%")) for each in (layer, model, down, up)]
        found = [100 * result["sparsity"][part] for part in ("layer", "model")]
        found += [sum(each[side] for each in traffic) / 3e3 for side in (0, 1)]
        assert found == pytest.approx(said, rel=0.01, abs=0.06), (title, options)


@pytest.mark.figures
@pytest.mark.parametrize(
    "method", [line.split(" | ")[0].strip("| ") for line in text("docs/digits.md").splitlines() if " ± " in line]
)
def test_a_row_of_digits(method, tmp_path):
    """docs/digits.md, one row: three runs of 60 rounds. Unstable methods scatter by their own half width."""
    metavd.compare((method,), seeds=3, out=tmp_path, device="cpu")
    (row,) = rows_of("docs/digits.md", method)
    fresh = (tmp_path / "comparison.md").read_text().splitlines()[2].strip("| ").split(" | ")
    for said, found, within in zip(row[1:], fresh[1:], [2.0, 2.0, 0.05, 0.05, 2.0, 2.0, 0.3], strict=True):
        (mean, half), (now, _) = numbers(said), numbers(found)
        assert now == pytest.approx(mean, abs=max(within, half)), (method, said, found)


def test_what_flower_counts_beyond_ours():
    """docs/federation.md: the sentence below the table of bytes rounds the table's differences."""
    rows = [line for line in text("docs/federation.md").splitlines() if re.search(r"\d%.* MB|\d / \d", line)]
    pairs = [re.findall(r"([\d.]+) / ([\d.]+)", row) for row in rows]
    beyond = [[round(1000 * (float(flower[side]) - float(ours[side]))) for ours, flower in pairs] for side in (0, 1)]
    assert len(pairs) == 8
    said = "{} to {} kB down and {} to {} kB up per run".format(*(of(each) for each in beyond for of in (min, max)))
    assert said in " ".join(text("docs/federation.md").split())


@pytest.mark.figures
def test_what_results_says_of_pfedme():
    """docs/results.md: where pFedMe loses accuracy on digits; the default's figures are those of docs/digits.md."""
    words = " ".join(text("docs/results.md").split())
    said = re.search(
        r"([\d.]+) % with them, ([\d.]+) % without \(`tune_epochs=0`\), ([\d.]+) % with `lr=0.03`.*?"
        r"FedAvg does at `lr=0.005` \(([\d.]+) %\), and `outer_lr=0.02` has ([\d.]+) %, "
        r"FedAvg at its `lr=0.02` ([\d.]+) %",
        words,
    )
    default, alone, slower, slow, same, fedavg = said.groups()
    assert f"| pfedme | {default} ±" in text("docs/digits.md")
    assert f"| fedavg | {fedavg} ±" in text("docs/digits.md")
    runs = [
        ("pfedme", {"tune_epochs": 0}, alone),
        ("pfedme", {"lr": 0.03}, slower),
        ("fedavg", {"lr": 0.005}, slow),
        ("pfedme", {"tune_epochs": 0, "outer_lr": 0.02}, same),
    ]
    for method, options, figure in runs:
        results = [metavd.run(method=method, rounds=60, seed=seed, device="cpu", **options) for seed in range(3)]
        found = 100 * sum(each["test"]["accuracy"] for each in results) / 3
        assert found == pytest.approx(float(figure), abs=2), (method, options)


def cells(page: str, heading: str, row: str) -> list[str]:
    """Return the cells of a row below a heading, without footnotes and bold type."""
    below = text(page).split(f"\n### {heading}\n")[1].split("\n### ")[0]
    line = next(line for line in below.splitlines() if re.match(rf"\| {re.escape(row)}(\[| \|| \()", line))
    return [re.sub(r"\[\^.*?\]|\*", "", cell).strip() for cell in line.strip("| ").split("|")]


def test_what_readme_and_start_say_of_speed():
    """They round what docs/performance.md has."""
    said = {name: " ".join(text(name).split()) for name in ("README.md", "docs/start.md")}
    page = "docs/performance.md"
    seconds, times = float(cells(page, "paper", "metavd")[1]), float(cells(page, "paper", "loop")[2])
    for words in said.values():
        assert f"takes {1000 * seconds:.0f} ms in bfloat16, {times:.0f} times less than in the usual loop" in words
        assert "in the usual loop in float32" in words  # whose products are not those of bfloat16
    whole = [float(cells(page, "Whole runs", method)[3]) for method in ("fedavg", "maml")]
    tiny = [float(cells(page, "tiny", rival)[2]) for rival in ("pfl", "Flower simulation")]
    assert f"{float(cells(page, 'paper100', 'loop')[2]):.0f} times less with all 100 clients" in said["docs/start.md"]
    assert "take {:.0f} s (FedAvg) to {:.0f} s (MAML)".format(*whole) in said["docs/start.md"]
    assert "{:.0f} times as fast as pfl and {:.0f} times as fast as Flower".format(*tiny) in said["docs/start.md"]


def test_what_scale_says_of_a_million_clients():
    """docs/scale.md: its times and its memory are those of results/bench-cpu.json, rounded."""
    points = {
        (each["clients"], each["partition"]): each
        for each in json.loads(text("results/bench-cpu.json"))["scale"]["many"]
        if each["method"] == "reptile+metavd"
    }
    few, many = points[1_000, "iid"], points[1_000_000, "iid"]
    all_many = [points[1_000_000, partition] for partition in ("iid", "dirichlet:10", "natural")]
    words = " ".join(text("docs/scale.md").split())
    rounds = [1000 * each["round_s"] for each in (few, many)]
    assert "takes {:.0f} ms with a thousand clients and {:.0f} ms with a million".format(*rounds) in words
    assert few["tested"] == many["tested"] == 100
    tests = [each["evaluation_s"] for each in (few, many)]
    assert "an evaluation of 100 of them {:.2f} s and {:.2f} s".format(*tests) in words
    starts = [each["start_s"] for each in all_many]
    assert "a run starts after {:.0f}, {:.0f} and {:.0f} s".format(*starts) in words
    assert f"needs {max(each['memory_mb'] for each in all_many) / 1000:.1f} GB at most" in words
    for each in (few, many):  # a quiet machine: the process had a core nearly all the time
        assert each["round_s"] == pytest.approx(each["round_cpu_s"], rel=0.1)


def test_what_readme_and_results_say_of_the_paper():
    """They round what docs/paper.md has."""
    where = ("docs/paper.md", "cifar10, Dirichlet 0.5, cohort of 10 of 100")
    named = ["FedAvg", "FedAvg+FT", "FedProx", "Reptile", "MAML", "FedAvg+MetaVD"]
    words = " ".join(text("docs/results.md").split())
    assert f"{', '.join(named[:-1])} and {named[-1]} come within 1.5 points" in words
    assert all(abs(float(cells(*where, row)[4])) <= 1.5 for row in named)
    for row, said in (("Reptile+MetaVD", 2.6), ("MAML+MetaVD", 2.6), ("FedBE", 3.0), ("pFedGP", 15.3),
                      ("PerFedAvg", 1.9), ("PerFedAvg+MetaVD", 5.0)):  # fmt: skip
        assert f"{said:.1f}" in words
        assert -float(cells(*where, row)[4]) == pytest.approx(said, abs=0.1)
    ours = {row: [float(cells(*where, row)[column]) for column in (1, 5)] for row in ("Reptile", "Reptile+MetaVD")}
    test, unseen = (b - a for a, b in zip(*ours.values(), strict=True))
    assert f"by {test:.1f} points, and by {unseen:.1f} on unseen clients" in words


def test_what_readme_and_results_say_of_tuned_runs():
    """They round what docs/paper-tuned.md has: gains over the same bases, ours, the paper's and fixed dropout's."""
    heading, bases = "cifar100, Dirichlet 0.5, cohort of 10 of 100", ("FedAvg", "Reptile", "MAML", "PerFedAvg")

    def rows(table, end):
        part = next(part for part in text("docs/paper-tuned.md").split("\n## ") if part.startswith(table))
        lines = part.split(f"### {heading}")[1].split("\n### ")[0].splitlines()
        return {
            base: [cell.strip() for line in lines if line.startswith(f"| {base}{end}") for cell in line.split("|")[1:]]
            for base in bases
        }

    ours = {f"{base}{end}": row for end in ("", "+MetaVD") for base, row in rows("T7", end).items()}
    fixed = rows("A2", "+Dropout")

    def gains(with_it, without, column):
        found = [numbers(with_it[base][column])[0] - numbers(ours[base][without])[0] for base in fixed]
        return f"{min(found):.1f} to {max(found):.1f}"

    meta = {base: ours[f"{base}+MetaVD"] for base in fixed}
    results, readme = (" ".join(text(name).split()) for name in ("docs/results.md", "README.md"))
    assert f"by {gains(meta, 1, 1)} points on participating clients" in results
    assert f"by {gains(meta, 5, 5)} on unseen ones" in results
    assert f"the paper's gains are {gains(meta, 3, 3)} and {gains(meta, 7, 7)}" in results
    assert f"gains {gains(fixed, 1, 1)} and {gains(fixed, 5, 3)} on the same bases" in results
    assert f"MetaVD adds {gains(meta, 1, 1)} points to its bases, a fixed dropout rate {gains(fixed, 1, 1)}" in readme
    claims = {
        part.split("\n")[0]: [
            [float(line.split("|")[3]), int(line.split("|")[6])]
            for line in part.splitlines()
            if line.startswith(("| cifar100, Dirichlet 5 |", "| cifar100, Dirichlet 0.1 |"))
        ]
        for part in text("docs/claims.md").split("\n## ")[1:]
        if part.startswith(("accuracy", "dropout"))
    }
    (least, most), (worst, best) = ((min(some)[0], max(some)[0]) for some in claims.values())
    assert f"at Dirichlet 5 and 0.1 is between {least:.1f} and {most:.1f} points" in results
    assert [least] == [gain for gain, _ in claims["accuracy"] if gain < 0], "one alone is below 0"
    assert f"MetaVD is {-best:.1f} to {-worst:.1f} points below fixed dropout" in results
    assert {seeds for some in claims.values() for _, seeds in some} == {3}
    assert "three seeds" in results
