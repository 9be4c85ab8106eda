"""What commands work with: `later.runs_store` is `runs/store.py`, imported when a command first asks for it.

So every --help answers at once: torch alone takes seconds to load.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ..bench import measure as bench_measure
    from ..bench import page as bench_page
    from ..core import rules as core_rules
    from ..data import collection as data_collection
    from ..data import described as data_described
    from ..data import formats as data_formats
    from ..data import partition as data_partition
    from ..data import source as data_source
    from ..evaluate import conformal as evaluate_conformal
    from ..evaluate import figures as evaluate_figures
    from ..evaluate import metrics as evaluate_metrics
    from ..flower import apps as flower_apps
    from ..flower import audit as flower_audit
    from ..flower import config as flower_config
    from ..flower import follow as flower_follow
    from ..flower import link as flower_link
    from ..flower import local as flower_local
    from ..flower import policy as flower_policy
    from ..flower import registry as flower_registry
    from ..flower import security as flower_security
    from ..flower import site as flower_site
    from ..flower import warm as flower_warm
    from ..report import arena as report_arena
    from ..report import clients as report_clients
    from ..report import page as report_page
    from ..report import paper as report_paper
    from ..report import tuning as report_tuning
    from ..runs import run as runs_run
    from ..runs import setup as runs_setup
    from ..runs import store as runs_store
    from ..runs import track as runs_track
    from ..serve import export as serve_export
    from ..serve import personal as serve_personal
    from ..serve import samples as serve_samples
    from ..serve import sets as serve_sets
    from ..serve import trust as serve_trust
    from ..studies import arena as studies_arena
    from ..studies import compare as studies_compare
    from ..studies import halving as studies_halving
    from ..studies import leave_out as studies_leave_out
    from ..studies import many as studies_many
    from ..studies import markdown as studies_markdown
    from ..studies import merge as studies_merge
    from ..studies import side as studies_side
    from ..studies import tune as studies_tune
    from ..studies import tuned as studies_tuned
    from ..studies import which as studies_which
    from ..studies.paper import carry as paper_carry
    from ..studies.paper import claims as paper_claims
    from ..studies.paper import page as paper_page
    from ..studies.paper import plan as paper_plan
    from ..studies.paper import protocol as paper_protocol
    from ..studies.paper import statistics as paper_statistics
    from ..studies.paper import tables as paper_tables

if not TYPE_CHECKING:  # a type checker would take any name for a module

    def __getattr__(name: str) -> Any:
        """Import a module."""
        package, _, module = name.partition("_")
        try:
            if package and module:
                return import_module(f"...{'studies.paper' if package == 'paper' else package}.{module}", __name__)
        except ModuleNotFoundError as error:
            if not (error.name or "").startswith(f"metavd.{package}"):
                raise
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
