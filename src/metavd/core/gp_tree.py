"""The binary tree of a client's classes, whose inner nodes are pFedGP's classifiers.

All nodes of one depth are split at once, for all clients: their classes are disjoint, so that "the classes of my node"
is one (K, K) mask, and a sum over a node is a product with it. The number of steps is the depth of the deepest tree,
and not the number of nodes; a GPU is asked once per step whether anything is left to do.

Shape letters: C clients, K classes, J = K - 1 nodes, F features.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..ops.device import Constant


def class_tree(means: Tensor, present: Tensor, iterations: int = 10) -> tuple[Tensor, Tensor]:
    """Build the binary tree of the present classes (K,) from their mean features (K, F): left, right (J, K).

    Row j holds 1 for the classes that go left (right) at node j. The root comes first and parents before children;
    unused nodes are rows of zeros at the end. A node is split by 2-means from its farthest pair of classes (pFedGP
    starts scikit-learn's 2-means 50 times at random; here it is deterministic), and no side is ever empty. k present
    classes use k - 1 nodes. One class alone (K = 1) still gets one, unused, node, so that no tensor is empty.
    """
    left, right = _Tree.apply(means.detach(), (present > 0).to(means.dtype), iterations)  # type: ignore[no-untyped-call]
    return left, right


def _split(square: Tensor, same: Tensor, iterations: int) -> Tensor:
    """Split every node by 2-means: 1 for the classes (C, K) that go left, given squared distances (C, K, K).

    `same` (C, K, K) is 1 for two classes of one node. Lloyd's iterations need the distances alone:

        |x - mean(A)|^2 = mean_a |x - a|^2 - 1/2 mean_aa' |a - a'|^2
    """
    K = square.shape[-1]
    index = torch.arange(K, device=square.device)
    pairs = (same > 0) & (index[:, None] < index)
    far = torch.where(pairs, square, -1.0)
    reach = far.amax(-1)  # of a class to the later ones of its node
    most = torch.where(same > 0, reach[:, None], -1.0).amax(-1)
    # The first of equals, as argmax finds it in a node's own matrix.
    first = torch.where((same > 0) & (reach[:, None] == most[..., None]), index, K - 1).amin(-1)
    from_first = square.gather(1, first[..., None].expand_as(square))
    later = (same > 0) & (index > first[..., None]) & (from_first == most[..., None])
    second = torch.where(later, index, K - 1).amin(-1)
    nearer = square.gather(-1, first[..., None]) <= square.gather(-1, second[..., None])
    # The two seeds are placed by hand: where class means coincide, all classes are as near to one as to the other.
    left = ((nearer[..., 0] | (index == first)) & (index != second)).to(square)
    near, size = same * square, same.sum(-1)
    count = (same @ left[..., None])[..., 0]
    for _ in range(iterations):
        sides, counts = torch.stack([left, 1.0 - left], -1), torch.stack([count, size - count], -1).clamp(min=1.0)
        mean = near @ sides / counts
        to_left, to_right = (mean - 0.5 * (same @ (sides * mean)) / counts).unbind(-1)
        nearer_left = (to_left <= to_right).to(left)
        wanted = (same @ nearer_left[..., None])[..., 0]
        valid = (wanted > 0) & (wanted < size)
        moved, count = torch.where(valid, nearer_left, left), torch.where(valid, wanted, count)
        if torch.equal(moved, left):  # a fixed point, from which no iteration leads away
            break
        left = moved
    return left


def _grown(means: Tensor, present: Tensor, iterations: int) -> tuple[Tensor, Tensor]:
    """Trees of all clients, (C, K, F), (C, K) -> (C, J, K) twice, depth by depth."""
    clients, K = present.shape
    means = torch.where(present[..., None] > 0, means, 0.0)
    # By differences, and not by products: equal means are at a distance of exactly 0.
    square = torch.cdist(means, means, compute_mode="donot_use_mm_for_euclid_dist").square()
    left = means.new_zeros(clients, max(K - 1, 1), K)
    right = torch.zeros_like(left)
    index = torch.arange(K, device=means.device)
    # The number of the node that a class is at, below 0 once it is alone.
    node = torch.where((present > 0) & (present.sum(-1, keepdim=True) >= 2), 0, -1)
    tail = torch.ones_like(node[:, :1])
    while (node >= 0).any():
        split = (node >= 0)[..., None]
        same = ((node[..., None] == node[:, None]) & split).to(square)
        goes = _split(square, same, iterations)
        at, inner = node.clamp(min=0)[:, None], split[..., 0].to(square)
        left.scatter_add_(1, at, (inner * goes)[:, None])
        right.scatter_add_(1, at, (inner * (1.0 - goes))[:, None])
        # Children in the order of their parents, left before right; a class alone is a leaf and no node.
        side = 2 * node + (goes == 0)
        beside = (side[..., None] == side[:, None]) & split
        more = beside.sum(-1) >= 2
        speaks = more & (torch.where(beside, index, K).amin(-1) == index)  # one class of every child
        before = (speaks[:, None] & (side[:, None] < side[..., None])).sum(-1)
        node = torch.where(more, tail + before, -1)
        tail = tail + speaks.sum(-1, keepdim=True)
    return left, right


class _Tree(Constant):
    @staticmethod
    def batched(means: Tensor, present: Tensor, iterations: int) -> Any:
        return _grown(means, present, iterations)
