"""The mean: every answer counts as much as its votes."""

from __future__ import annotations

from .catalogue import MEAN, Rule, rule


@rule(MEAN, "every answer counts by its rows, or by its precision where the method has a posterior")
def mean() -> Rule:
    """Leave the ballot as it is.

    consensus = sum_i v_i x_i / sum_i v_i
    """
    return lambda ballot: ballot
