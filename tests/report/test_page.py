"""The page as a file: alone sufficient, escaped, small, and true about how to repeat what it shows."""

import base64
import hashlib
import html
import json
import re
import shlex
import shutil
import sys
import webbrowser
from pathlib import Path

import pytest
from click.testing import CliRunner

from metavd.cli import main
from metavd.cli.report import report_command
from metavd.report.page import write_report
from metavd.report.read import ReportError
from metavd.report.summary import NOTHING

EVIL = "<img src=x onerror=alert(1)></script><script>alert(2)</script>'\"&{{ 7*7 }}$x$"


def test_the_page_refers_to_nothing_outside(page):
    """No address but the names of XML, no file, no style sheet and no script of others."""
    text = page.read_text()
    assert set(re.findall(r"https?://[^\s\"'<)]+", text)) <= {
        "http://www.w3.org/2000/svg",
        "http://www.w3.org/1999/xlink",
    }
    assert not re.findall(r"<(?:iframe|object|embed|img|audio|video|base|form)\b", text)
    assert set(re.findall(r"<link [^>]*>", text)) == {'<link rel="icon" href="data:,">'}
    assert not re.findall(r"@import|url\((?!#)", text)


def test_only_the_pages_own_script_may_run(page):
    """The policy names the hash of the one script, so that a smuggled one is dead text."""
    text = page.read_text()
    scripts = re.findall(r"<script>(.*?)</script>", text, re.DOTALL)
    assert len(scripts) == 1
    digest = base64.b64encode(hashlib.sha256(scripts[0].encode()).digest()).decode()
    policy = html.unescape(re.search(r'Content-Security-Policy" content="([^"]*)"', text)[1])
    assert f"script-src 'sha256-{digest}'" in policy
    assert policy.startswith("default-src 'none'")


def test_a_page_is_small(page):
    """Two methods take half a megabyte; twelve then stay below five."""
    assert page.stat().st_size < 700_000


@pytest.mark.usefixtures("undrawn")
def test_what_files_say_is_text_on_the_page(one, edited, tmp_path):
    """Markup and template code in the names of data, layers, domains, settings and folders is shown, not obeyed."""

    def name_it(value):
        value |= {"data": EVIL, "machine": EVIL, "commit": EVIL, "domains": {EVIL: {"test": 0.5, "unseen": 0.5}}}

    edited(one / "result.json", name_it)
    edited(one / "details.json", lambda value: value["rates"].update({EVIL: value["rates"].pop("fc1")}))
    config = (one / "config.toml").read_text()
    (one / "config.toml").write_text(config.replace('data = "digits"', f"data = {json.dumps(EVIL)}"))
    place = one.with_name("<b>one<i>")
    one.rename(place)
    write_report([place], tmp_path / "page.html", command=EVIL)
    text = (tmp_path / "page.html").read_text()
    assert "<img" not in text
    assert "<script>alert" not in text
    assert "<b>" not in text
    assert "49" not in re.findall(r"<h1>(.*?)</h1>", text)[0]
    assert html.unescape(re.findall(r"<h1>(.*?)</h1>", text)[0]) == EVIL


def test_the_command_on_the_page_repeats_the_run(page, runs, tmp_path, monkeypatch):
    """The very line, run again, gives the same model to the bit."""
    lines = html.unescape(re.search(r'<pre id="commands">(.*?)</pre>', page.read_text(), re.DOTALL)[1]).split("\n")
    lines = [line for line in lines if line.strip()]
    assert len(lines) == 4
    program, *arguments = shlex.split(next(line for line in lines if "reptile+metavd+drop/seed-1" in line))
    assert program == "metavd"
    monkeypatch.chdir(tmp_path)
    main(arguments)
    again = json.loads((tmp_path / arguments[-1] / "result.json").read_text())
    before = json.loads((runs / "reptile+metavd+drop" / "seed-1" / "result.json").read_text())
    assert again["model_sha256"] == before["model_sha256"]


@pytest.mark.usefixtures("undrawn")
def test_runs_from_python_say_that_a_command_is_not_enough(one, edited, tmp_path):
    """Data that has no name on the command line, and one's own network, are named as such."""
    edited(one / "result.json", lambda value: value.update(data="my arrays"))
    write_report([one], tmp_path / "page.html")
    assert "its data was handed over in Python" in (tmp_path / "page.html").read_text()
    edited(one / "result.json", lambda value: value.update(data="digits"))
    config = (one / "config.toml").read_text()
    (one / "config.toml").write_text(re.sub(r'content = "(\w+)"', r'content = "\1/abc"', config))
    write_report([one], tmp_path / "page.html")
    assert "its network was handed over in Python" in (tmp_path / "page.html").read_text()


@pytest.mark.usefixtures("undrawn")
def test_a_page_without_a_baseline_says_so(runs, tmp_path):
    """Gains need something to be over; another method may be named for it."""
    write_report([runs / "reptile"], tmp_path / "page.html")
    assert "There is no run of fedavg" in (tmp_path / "page.html").read_text()
    write_report([runs], tmp_path / "page.html", baseline="reptile")
    text = (tmp_path / "page.html").read_text()
    assert "over reptile under the same seed" in text
    assert "gain-01-fedavg" in text
    assert "gain-02-reptile<" not in text


@pytest.mark.usefixtures("undrawn")
def test_settings_that_differ_come_first(runs, tmp_path):
    """Settings that methods have with different values, and those of adaptation that not all methods have."""
    write_report([runs], tmp_path / "page.html")
    text = (tmp_path / "page.html").read_text()
    first, every = text.split("What differs")[1].split("All settings")
    shown = set(re.findall(r'<td class="first">(\w+)</td>', first))
    assert shown == {"server_lr", "server_momentum", "adapt_steps", "newcomer"}
    assert re.findall(r"<td>(.*?)</td>", first.split("adapt_steps</td>")[1].split("</tr>")[0]) == [NOTHING, "1", "1"]
    assert {"lr", "beta", "clients", "server_lr"} <= set(re.findall(r'<td class="first">(\w+)</td>', every))


@pytest.mark.usefixtures("undrawn")
def test_nothing_is_said_of_unseen_clients_where_there_are_none(named, page, tmp_path):
    """No column, no section, no figure and no word; the page of runs with unseen clients has them all."""
    write_report([named], tmp_path / "page.html")
    text = (tmp_path / "page.html").read_text().split('<script type="application/json"')[0]
    assert "3 participating clients" in text
    assert not re.search(r"unseen clients|-unseen|Unseen", text)
    assert text.count('<th class="band starts"') == 2, "participating clients, and cost"
    assert "newcomer" not in text.split("What differs")[1].split("All settings")[0]
    both = page.read_text()
    assert "8 participating and 3 unseen clients" in both
    assert both.count('<th class="band starts"') == 3
    assert {"Reliability, unseen clients", "Unseen clients</th>"} <= set(
        re.findall(r"Rel.*unseen clients|Uns.*?</th>", both)
    )


@pytest.mark.usefixtures("undrawn")
def test_the_command_writes_where_it_is_told(runs, tmp_path, monkeypatch):
    """By default the page lies in the one folder, or here for several; figures lie beside it; --open shows it."""
    own = Path(shutil.copytree(runs, tmp_path / "own"))
    opened = []
    monkeypatch.setattr(webbrowser, "open", opened.append)
    monkeypatch.setattr(sys, "argv", ["metavd", "report", "own"])
    monkeypatch.chdir(tmp_path)

    def call(*arguments: str) -> str:
        result = CliRunner().invoke(report_command, arguments, catch_exceptions=False)
        assert result.exit_code == 0
        return result.output

    assert "Written: own/report.html" in call("own")
    assert (own / "report.html").is_file()
    assert (own / "report_files").is_dir()
    call("own/fedavg", "own/reptile")
    assert (tmp_path / "report.html").is_file()
    call("own", "--out", "there/page.html", "--figures", "pictures", "--open")
    assert (tmp_path / "there" / "page.html").is_file()
    assert (tmp_path / "pictures").is_dir()
    assert opened == [(tmp_path / "there" / "page.html").resolve().as_uri()]
    assert "Written: there/v1.2.html" in call("own", "--out", "there/v1.2", "--figures", "pictures")
    assert {path.name for path in (tmp_path / "there").iterdir()} == {"page.html", "v1.2.html"}
    (own / "fedavg" / "seed-0" / "details.json").unlink()
    assert "details.json is missing" in call("own")


def test_wrong_input_is_a_report_error(tmp_path):
    """A ValueError, which the command line turns into one sentence and exit status 2."""
    with pytest.raises(ReportError):
        CliRunner().invoke(report_command, [str(tmp_path / "nowhere")], catch_exceptions=False)
    assert issubclass(ReportError, ValueError)


@pytest.mark.usefixtures("undrawn")
def test_runs_of_different_tasks_are_not_passed_off_as_comparable(runs, one, tmp_path):
    """Another partition is another task: the page says so, and names of methods say which is which."""
    config = (one / "config.toml").read_text()
    (one / "config.toml").write_text(config.replace('partition = "dirichlet:0.5"', 'partition = "iid"'))
    notes = write_report([runs / "fedavg", one], tmp_path / "page.html")
    assert notes == ["These runs do not all have the same data and clients; compare only those that do."]
    text = (tmp_path / "page.html").read_text()
    assert "reptile+metavd+drop (partition=iid)" in text
    assert "No other method was run on the same clients as fedavg." in text


@pytest.mark.usefixtures("undrawn")
def test_what_was_spent_of_privacy_stands_in_the_table(one, edited, tmp_path):
    """A column beside the cost, where a run hides single clients; else none."""
    page = tmp_path / "page.html"
    write_report([one], page)
    assert ">epsilon</th>" not in page.read_text()
    edited(one / "result.json", lambda value: value.update({"privacy": {"epsilon": 7.987, "delta": 1e-5}}))
    write_report([one], page)
    text = page.read_text()
    assert ">epsilon</th>" in text
    assert ">7.99" in text
    assert 'colspan="3">Cost</th>' in text


@pytest.mark.usefixtures("undrawn")
def test_a_page_of_clients_left_out_in_turn(one, tmp_path):
    """One row for the method, accuracy on each client, who was left out in every run's line, and no warning."""
    for name in ("north", "south <b>"):
        folder = Path(shutil.copytree(one, tmp_path / "runs" / name))
        config = (folder / "config.toml").read_text()
        (folder / "config.toml").write_text(re.sub(r"(?m)^unseen = .*$", f'unseen = "client:{name}"', config))
    assert write_report([tmp_path / "runs"], tmp_path / "report.html") == []
    text = html.unescape((tmp_path / "report.html").read_text())
    assert "2 clients left out in turn" in text
    assert re.search(r'id="left-out">\s*<thead><tr><th class="first">method</th><th>north</th><th>south <b></th>', text)
    assert "<td>0, without north</td>" in text
    assert "seed-0-without-south-b" in text
    assert "Mean over runs" in text
