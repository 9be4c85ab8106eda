"""What figures show is what the runs stored; and a figure inside a page keeps to itself."""

import re
import xml.etree.ElementTree as ET
from dataclasses import replace

import numpy as np
import pytest
from matplotlib.figure import Figure
from PIL import Image

from metavd.evaluate.calibration import Reliability, expected_error, plain, top1
from metavd.report import curves, gains, intervals, personal
from metavd.report.gains import table
from metavd.report.groups import gains as gains_over
from metavd.report.groups import group
from metavd.report.pictures import INK, Picture, inline, looking_alike, publish, save
from metavd.report.read import read_run, read_runs
from metavd.report.reliability import pooled_bins


def test_pooled_bins_are_the_bins_of_pooled_answers():
    """Two seeds' diagrams, put together, are the diagram of both seeds' rows, empty bins included."""
    source = np.random.default_rng(0)
    rows = [(source.dirichlet(np.full(4, 0.5), count), source.integers(0, 4, count)) for count in (7, 30)]
    each = [Reliability(**{name: np.array(value) for name, value in plain(top1(*part)).items()}) for part in rows]
    both = pooled_bins(each)
    assert both is not None
    expected = top1(np.concatenate([probs for probs, _ in rows]), np.concatenate([y for _, y in rows]))
    for name in ("edges", "count", "confidence", "accuracy"):
        np.testing.assert_allclose(getattr(both, name), getattr(expected, name), atol=1e-12)
    assert expected_error(both) == pytest.approx(expected_error(expected))
    assert pooled_bins([each[0], replace(each[1], edges=each[1].edges + 0.1)]) is None


def test_the_last_evaluation_of_a_curve_is_the_result(runs):
    """rounds.jsonl has the evaluations on the way, the result the last one; both are on the curve, once each."""
    run = read_run(runs / "reptile" / "seed-0")
    curve = curves.evaluated(run, "test", "accuracy")
    assert list(curve) == [2.0, 4.0]
    assert curve[4.0] == run.result["test"]["accuracy"]
    assert curve[2.0] == run.rounds[1]["test"]["accuracy"]
    best = replace(run, result={**run.result, "tested_round": 2, "test": {"accuracy": 0.123}})
    assert curves.evaluated(best, "test", "accuracy") == {2.0: 0.123}, "an early stop tests the state of its best round"


def test_traffic_of_rounds_sums_to_the_result(runs):
    """Bytes of all rounds, both directions, are the table's; long runs are averaged in blocks, not thinned."""
    run = read_run(runs / "reptile+metavd+drop" / "seed-0")
    assert sum(curves.recorded(run, "down", "up").values()) == run.number("bytes", "total")
    long = [{"round": place + 1, "loss": float(place)} for place in range(1500)]
    series = curves.recorded(replace(run, rounds=long), "loss")
    assert len(series) == 150
    assert np.mean(list(series.values())) == pytest.approx(749.5)


def test_principal_components_keep_distances_of_a_plane():
    """Points that lie on a plane in seven dimensions have the same distances on the map, all variance kept."""
    source = np.random.default_rng(1)
    flat = source.normal(size=(20, 2)) @ np.linalg.qr(source.normal(size=(7, 2)))[0].T + 5
    found, share = personal.plane(flat)
    wanted = np.linalg.norm(flat[:, None] - flat[None], axis=2)
    np.testing.assert_allclose(np.linalg.norm(found[:, None] - found[None], axis=2), wanted, atol=1e-9)
    assert share.sum() == pytest.approx(1)
    np.testing.assert_allclose(personal.plane(-flat)[1], share)
    assert personal.plane(np.ones((3, 1)))[0].tolist() == [[0, 0]] * 3


def test_the_table_of_clients_holds_the_lines_of_the_files(runs):
    """One set of clients a seed; every method's figures in the clients' order, in per cent."""
    groups, _ = group(read_runs([runs])[0])
    shown = table(groups)
    assert [each["name"] for each in shown["sets"]] == ["seed 0", "seed 1"]
    first = shown["sets"][0]
    assert len(first["clients"]) == 11
    assert first["left_out"] == 0
    for column, each in zip(first["methods"], groups, strict=True):
        expected = [round(100 * client.figures["accuracy"], 1) for client in each.runs[0].clients]
        assert column["accuracy"] == expected


def test_lines_that_lie_on_each_other_are_drawn_in_turns(named):
    """Two methods that train alike have the same loss: their dashes fill each other's gaps, their markers alternate."""
    groups, _ = group(read_runs([named])[0])
    loss = next(each for each in curves.learning(groups) if each.name == "curve-loss")
    one, other = loss.figure.axes[0].lines
    np.testing.assert_array_equal(one.get_ydata(), other.get_ydata())
    for line in (one, other):
        piece, gap = line._dash_pattern[1]
        assert piece == gap
    assert one._dash_pattern[0] == 0
    assert other._dash_pattern[0] == pytest.approx(one._dash_pattern[1][0]), "begins where the other's piece ends"
    places = [set(np.arange(line.get_markevery()[0], 4, line.get_markevery()[1])) for line in (one, other)]
    assert places == [{0, 2}, {1, 3}]
    groups = [replace(groups[0], index=index) for index in range(2)]
    apart = curves._alike([{1.0: 0.0, 2.0: 1.0, 3.0: 0.5}, {1.0: 0.0, 2.0: 0.9, 3.0: 0.4}])
    assert apart == [[0], [1]]
    assert curves._alike([{1.0: 0.0, 2.0: 1.0}, {1.0: 0.0, 2.0: 1.0}, {3.0: 0.5}]) == [[0, 1], [0, 1], [2]]


def test_clients_with_names_have_a_line_each(named):
    """Gains of a few named clients stand on lines with their names, at the difference of the two accuracies."""
    groups, _ = group(read_runs([named])[0])
    over, _ = gains_over(groups, "fedavg")
    axes = next(gains.pictures(over, "fedavg")).figure.axes[0]
    assert [label.get_text() for label in axes.get_yticklabels()] == ["north", "south", "west"]
    before, after = ([client.figures["accuracy"] for client in each.runs[0].clients] for each in groups)
    drawn = {int(line.get_ydata()[0]): line.get_xdata()[0] for line in axes.lines[1:]}
    assert drawn == pytest.approx({place: 100 * (after[place] - before[place]) for place in range(3)})


def test_axes_end_where_the_data_do(runs):
    """Every value and its interval is inside, unless it is wider than all values; what is empty is less than a half."""
    groups, _ = group(read_runs([runs])[0])
    for picture in intervals.pictures(groups):
        axes = picture.figure.axes[0]
        left, right = axes.get_xlim()
        shown = [x for line in axes.lines for x in np.atleast_1d(line.get_xdata()) if left <= x <= right]
        assert max(shown) - min(shown) > 0.5 * (right - left), picture.name
        assert all(left <= line.get_xdata()[0] <= right for line in axes.lines if len(line.get_xdata()) == 1)


def picture(name: str, text: str = "x") -> Picture:
    figure = Figure(figsize=(2, 2))
    axes = figure.subplots()
    axes.plot([0, 1], [0, 1], "o-", label=text)
    axes.set_title(text)
    axes.legend()
    return Picture(name, f"alt of {text}", figure)


def test_figures_in_one_page_share_no_ids(tmp_path):
    """Every id is unique over two equal figures, and every reference leads to an id of its own figure."""
    with looking_alike():
        both = [publish(picture(name), tmp_path) for name in ("one", "two")]
    ids = [set(re.findall(r'\bid="([^"]+)"', svg)) for svg in both]
    assert ids[0]
    assert not ids[0] & ids[1]
    for own, svg in zip(ids, both, strict=True):
        assert set(re.findall(r'(?:url\(|href=")#([^)"]+)', svg)) == own


@pytest.mark.parametrize("ending", ["png", "svg", "pdf"])
def test_the_same_picture_is_the_same_bytes(ending, tmp_path, monkeypatch):
    """Law: neither the day nor the version of matplotlib stands in a file."""
    written = []
    for day in ("0", "1700000000"):
        monkeypatch.setenv("SOURCE_DATE_EPOCH", day)
        path = tmp_path / f"{day}.{ending}"
        save(picture("one").figure, path, dpi=50)
        written.append(path.read_bytes())
    assert written[0] == written[1]
    assert b"Matplotlib" not in written[0]


def test_ink_follows_the_theme_inside_the_page_only(tmp_path):
    """In the page ink is a variable, so that dark pages are readable; the files stand alone and keep their colour."""
    with looking_alike():
        svg = publish(picture("one"), tmp_path)
    assert "var(--ink)" in svg
    assert INK not in svg
    assert INK in (tmp_path / "one.svg").read_text()
    assert "var(" not in (tmp_path / "one.svg").read_text()


@pytest.mark.parametrize(
    "text", ["<script>alert(1)</script>", "a & b", "$\\frac{$", '"quoted" id="x" url(#y)', "]]>", "日本"]
)
def test_names_are_text_in_figures(text, tmp_path):
    """Markup, formulas and quotes in a name are drawn as they are and make no element."""
    with looking_alike():
        svg = publish(picture("one", text), tmp_path)
    root = ET.fromstring(svg)
    assert text in [element.text for element in root.iter("{http://www.w3.org/2000/svg}text")]
    assert root.get("aria-label") == f"alt of {text}"
    assert not list(root.iter("{http://www.w3.org/2000/svg}script"))


def test_figures_are_the_same_bytes_each_time(tmp_path):
    """No dates, no random ids: the same runs give the same files."""
    with looking_alike():
        for name in ("a", "b"):
            (tmp_path / name).mkdir()
            publish(picture("one"), tmp_path / name)
    assert (tmp_path / "a" / "one.svg").read_bytes() == (tmp_path / "b" / "one.svg").read_bytes()


def test_every_figure_lies_beside_the_page_as_svg_and_png(page):
    """As many files of both kinds as the page has figures; a PNG shows something; an SVG is one."""
    folder = page.with_name("report_files")
    names = {path.stem for path in folder.glob("*.svg")}
    assert names == {path.stem for path in folder.glob("*.png")}
    assert len(names) == page.read_text().count('class="figure"')
    for kind in (
        "interval",
        "curve",
        "reliability-test",
        "reliability-unseen",
        "entropy",
        "gain",
        "rates",
        "embeddings",
        "cost-sparsity",
    ):
        assert any(name.startswith(kind) for name in names), kind
    for name in names:
        assert np.asarray(Image.open(folder / f"{name}.png").convert("L")).std() > 5, name
        assert ET.parse(folder / f"{name}.svg").getroot().tag.endswith("svg")


def test_inline_drops_what_would_leak_into_the_page():
    """A figure's own style sheet and metadata would apply to, or be shown by, the whole page."""
    svg = inline(
        b'<svg xmlns="http://www.w3.org/2000/svg" width="2pt"><style>*{x:y}</style><metadata>m</metadata></svg>',
        "n",
        "a",
    )
    assert "style>" not in svg
    assert "metadata" not in svg
    assert "width" not in svg


def test_one_evaluation_makes_no_curve_and_shares_end_at_100(runs):
    """A point for each method stands in the table; where there are curves, a panel of per cents shows none beyond."""
    found = read_runs([runs])[0]
    once = [replace(run, rounds=[{**row, "test": {}, "unseen": {}} for row in run.rounds]) for run in found]
    assert [picture.name for picture in curves.learning(group(once)[0])] == ["curve-loss"]
    right = [replace(run, result={**run.result, "test": {"accuracy": 1.0}}) for run in found]
    picture = next(curves.learning(group(right)[0]))
    assert picture.name == "curve-accuracy-test"
    low, high = picture.figure.axes[0].get_ylim()
    assert 100 < high <= 102
    assert low >= -2
