"""Does a model know when it does not know: uncertainty of single answers, and what it tells apart.

Two kinds of uncertainty. `entropy` of the answer is all of it. The mutual information between label and weights
(`core.predict.mutual_information`) is the part that comes from not knowing the weights, and needs posterior draws.

Shape letters: N samples, K classes.
"""

from __future__ import annotations

import numpy as np

from .scores import checked


def entropy(probs: np.ndarray) -> np.ndarray:
    """Return (N,) H = -sum_k p_k log p_k in nats, where 0 log 0 = 0: from 0 for a sure answer to log K."""
    from scipy.special import entr  # noqa: PLC0415 (no round needs it, and a run begins sooner)

    total: np.ndarray = entr(checked(probs)).sum(1)
    return total


def auroc(score: np.ndarray, positive: np.ndarray) -> float | None:
    """Return the area under the ROC curve: the chance that a positive has a higher score than a negative.

        P(s+ > s-) + 1/2 P(s+ = s-) = sum_v n+_v (n-_{<v} + n-_v / 2) / (n+ n-),   v the different scores

    None where all samples are of one kind.
    """
    positive = np.asarray(positive, bool)
    if not positive.any() or positive.all():
        return None
    values, place = np.unique(np.asarray(score, np.float64), return_inverse=True)
    if np.isnan(values[-1]):
        return np.nan
    above, below = (np.bincount(place[kind], minlength=len(values)) for kind in (positive, ~positive))
    return float((above * (below.cumsum() - below / 2)).sum() / (above.sum() * below.sum()))


def fpr95(score: np.ndarray, positive: np.ndarray) -> float | None:
    """Return the share of positives (unknown) that pass for negatives (known) where 95 % of the negatives do.

        share of positives with s <= t,      t the k-th smallest score of the n negatives, k = ceil(0.95 n)

    A score is a doubt: what has no more than t passes. None where all samples are of one kind. It is the false-positive
    rate at a true-positive rate of 95 % for "known", as the literature on unknown inputs takes it.
    """
    positive, score = np.asarray(positive, bool), np.asarray(score, np.float64)
    if not positive.any() or positive.all():
        return None
    if np.isnan(score).any():
        return np.nan
    known = np.sort(score[~positive])
    return float((score[positive] <= known[-(-95 * len(known) // 100) - 1]).mean())
