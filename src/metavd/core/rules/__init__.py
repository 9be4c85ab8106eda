"""Aggregation rules: how much each client's answer counts, one file each, in a registry that packages may join.

A rule takes a `Ballot` and returns one: it counts fewer votes, or shortens moves. What the votes then say is always

    consensus = sum_i v_i x_i / sum_i v_i        weight by weight

so that rules can follow each other (`clip+median`) and go with votes by precision. See docs/aggregation.md.
"""

from __future__ import annotations

from .catalogue import MEAN, RULES, Ballot, Rule, RuleEntry, check, check_cohort, consensus, parse, rule

__all__ = ["MEAN", "RULES", "Ballot", "Rule", "RuleEntry", "check", "check_cohort", "consensus", "parse", "rule"]
