"""metavd methods, datasets, aggregations."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import click

from .. import methods as catalogue
from ..runs.settings import SETTINGS
from ..schema import Option
from . import later
from .terminal import console, print_table


@click.command("methods")
@click.option("--json", "as_json", is_flag=True, help="Everything, for programs.")
@click.argument("name", required=False)
def methods_command(name: str | None, as_json: bool) -> None:
    """List every method, or everything about NAME: options, defaults, what tune searches."""
    chosen = [catalogue.check(name)] if name else list(catalogue.NAMES)
    for sentence in catalogue.REGISTRY.broken:
        click.echo(f"metavd: {sentence}", err=True)
    described = [catalogue.describe(each) for each in chosen]
    if as_json:
        click.echo(json.dumps(described, indent=2))
        return
    if name:
        out = console()
        about = described[0]
        out.print(f"[bold]{about['name']}[/bold]: {about['text']}\n{about['paper']}")
        out.print(f"A client that never took part {about['newcomer']}.\n")
        options = (
            (each["name"], _text(each["default"]), each["help"], _allowed(each), _searched(each))
            for each in about["options"]
        )
        print_table(("option", "default", "meaning", "may be", "searched by tune"), options)
        settings = (
            (each.name, "the dataset's" if each.from_data is not None else _text(each.default), each.help)
            for each in SETTINGS.values()
        )
        print_table(("setting", "default", "of every run, for --set as well"), settings)
        return
    print_table(("method", "what it is", "paper"), ((each["name"], each["text"], each["paper"]) for each in described))
    parts = (
        (entry.sign, ", ".join(_brief(option) for option in entry.options.values()))
        for kind in ("base", "regulariser", "extra")
        for entry in catalogue.entries(kind).values()
    )
    print_table(("part of a method", "its options = defaults, and in braces what the paper searched"), parts)
    click.echo("metavd methods NAME explains a method's options; metavd methods --json shows everything.")


def _brief(option: Option) -> str:
    searched = option.search and f" {{{option.search[0]:g}..{option.search[-1]:g}}}"
    return f"{option.name}={_text(option.default)}{searched or ''}"


def _searched(option: Mapping[str, Any]) -> str:
    values = ", ".join(f"{value:g}" for value in option.get("search") or option.get("offered") or ())
    return f"if asked: {values}" if "offered" in option else values


def _text(value: object) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value)


def _allowed(option: Mapping[str, Any]) -> str:
    if "choices" in option:
        return " | ".join(option["choices"])
    low, high = option.get("low"), option.get("high")
    if low is None:
        return ""
    return f"{low:g} to {high:g}" if high is not None else f"{low:g} or more"


def _given(value: object) -> str:
    """Write a default as one would type it."""
    return str(value).lower() if value is None or isinstance(value, bool) else str(value)


@click.command("datasets")
@click.option("--json", "as_json", is_flag=True, help="For programs.")
def datasets_command(as_json: bool) -> None:
    """List the datasets, their options and the settings that each brings."""
    if as_json:
        rows = [
            {
                "name": info.name, "description": info.description, "defaults": info.defaults,
                "options": {key: {"default": each.default, "help": each.help} for key, each in info.options.items()},
            }
            for info in later.data_formats.FORMATS.values()
        ]  # fmt: skip
        click.echo(json.dumps(rows, indent=2))
        return
    lines = []
    for info in later.data_formats.FORMATS.values():
        brings = ", ".join(f"{key}={value}" for key, value in info.defaults.items()) or "what suits its content"
        options = ", ".join(f"{key}={_given(each.default)}" for key, each in info.options.items())
        lines.append((info.name, info.description, options, brings))
    print_table(("dataset", "what it is", "its options = defaults", "settings that it brings"), lines, show_lines=True)
    click.echo(
        "Files are looked for below --root DIR (METAVD_DATA, else data); npz, folder, table and text take a path:\n"
        "  --data cifar100   --data celeba:attribute=Male,size=64   --data npz:mine.npz   --data folder:photos\n"
        "  --data celeba+cifar100+mnist   several at once, see domains in metavd methods NAME\n"
        "metavd data fetch NAME downloads; metavd data check PATH says what a path holds; metavd data show draws the "
        "clients."
    )


@click.command("aggregations")
@click.option("--json", "as_json", is_flag=True, help="For programs.")
def aggregations_command(as_json: bool) -> None:
    """List the rules by which clients' answers become one."""
    rules = list(later.core_rules.RULES.values())
    for sentence in later.core_rules.RULES.broken:
        click.echo(f"metavd: {sentence}", err=True)
    if as_json:
        rows = [{"name": each.name, "text": each.text, "example": each.example} for each in rules]
        click.echo(json.dumps(rows, indent=2))
        return
    print_table(
        ("rule", "what it does", "for example"), ((each.name, each.text, f"aggregate={each.example}") for each in rules)
    )
    click.echo("Rules can follow each other: aggregate=clip+median. docs/aggregation.md says when to use which.")
