"""The binary tree of a client's classes, whose inner nodes are pFedGP's classifiers; on a GPU in one kernel.

All nodes of one depth are split at once: their classes are disjoint, so that "the classes of my node" is one (K, K)
mask, and a sum over a node is a product with it. The reference does so for all clients; it asks the device after every
iteration whether anything is left to do, which a kernel of one program per client knows by itself.

Shape letters: C clients, K classes, J = K - 1 nodes, F features.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from . import device

_kernels = partial(device.kernels, "class_tree")


def class_tree(means: Tensor, present: Tensor, iterations: int = 10) -> tuple[Tensor, Tensor]:
    """Build the binary tree of the present classes (K,) from their mean features (K, F): left, right (J, K).

    Row j holds 1 for the classes that go left (right) at node j. The root comes first and parents before children;
    unused nodes are rows of zeros at the end. A node is split by 2-means from its farthest pair of classes (pFedGP
    starts scikit-learn's 2-means 50 times at random; here it is deterministic), and no side is ever empty. k present
    classes use k - 1 nodes. One class alone (K = 1) still gets one, unused, node, so that no tensor is empty.
    """
    left, right = _Tree.apply(means.detach(), (present > 0).to(means.dtype), iterations)
    return left, right


def _split(square: Tensor, same: Tensor, iterations: int) -> Tensor:
    """Split every node by 2-means: 1 for the classes (C, K) that go left, given squared distances (C, K, K).

    `same` (C, K, K) says which two classes are of one node. Lloyd's iterations need the distances alone:

        |x - mean(A)|^2 = mean_a |x - a|^2 - 1/2 mean_aa' |a - a'|^2
    """
    K = square.shape[-1]
    index = torch.arange(K, device=square.device)
    reach = torch.where(same & (index[:, None] < index), square, -1.0).amax(-1)  # to the later classes of the node
    most = torch.where(same, reach[:, None], -1.0).amax(-1, keepdim=True)
    # The first of the farthest pairs, in the order of a matrix's entries.
    first = torch.where(same & (reach[:, None] == most), index, K - 1).amin(-1, keepdim=True)
    to_first = square.gather(-1, first)
    later = same & (index > first) & (to_first.mT == most)
    second = torch.where(later, index, K - 1).amin(-1, keepdim=True)
    nearer = (to_first <= square.gather(-1, second))[..., 0]
    # The two seeds are placed by hand: where class means coincide, all classes are as near to one as to the other.
    left = ((nearer | (index == first[..., 0])) & (index != second[..., 0])).to(square)
    inside = same.to(square)
    near, size = inside * square, inside.sum(-1)
    count = (inside @ left[..., None])[..., 0]
    for _ in range(iterations):
        sides, counts = torch.stack([left, 1.0 - left], -1), torch.stack([count, size - count], -1).clamp(min=1.0)
        mean = near @ sides / counts
        to_left, to_right = (mean - 0.5 * (inside @ (sides * mean)) / counts).unbind(-1)
        wanted = (to_left <= to_right).to(left)
        many = (inside @ wanted[..., None])[..., 0]
        valid = (many > 0) & (many < size)
        moved, count = torch.where(valid, wanted, left), torch.where(valid, many, count)
        if torch.equal(moved, left):  # a fixed point, from which no iteration leads away
            break
        left = moved
    return left


def _by_depth(square: Tensor, present: Tensor, iterations: int) -> tuple[Tensor, Tensor]:
    """Trees (C, J, K) twice of all clients from squared distances (C, K, K), depth by depth."""
    clients, K = present.shape
    left = square.new_zeros(clients, max(K - 1, 1), K)
    right = torch.zeros_like(left)
    index = torch.arange(K, device=square.device)
    # The number of the node that a class is at, below 0 once it is alone.
    node = torch.where((present > 0) & (present.sum(-1, keepdim=True) >= 2), 0, -1)
    tail = torch.ones_like(node[:, :1])
    while (node >= 0).any():
        open_ = node >= 0
        goes = _split(square, (node[..., None] == node[:, None]) & open_[..., None], iterations)
        at = node.clamp(min=0)[:, None]
        left.scatter_add_(1, at, (open_ * goes)[:, None])
        right.scatter_add_(1, at, (open_ * (1.0 - goes))[:, None])
        # Children in the order of their parents, left before right; a class alone is a leaf and no node.
        side = 2 * node + (goes == 0)
        beside = (side[..., None] == side[:, None]) & open_[..., None]
        more = beside.sum(-1) >= 2
        speaks = more & (torch.where(beside, index, K).amin(-1) == index)  # one class of every child
        before = (speaks[:, None] & (side[:, None] < side[..., None])).sum(-1)
        node = torch.where(more, tail + before, -1)
        tail = tail + speaks.sum(-1, keepdim=True)
    return left, right


class _Tree(device.Constant):
    @staticmethod
    def batched(means: Tensor, present: Tensor, iterations: int) -> tuple[Tensor, Tensor]:
        means = torch.where(present[..., None] > 0, means, 0.0)
        # By differences, and not by products: equal means are at a distance of exactly 0. Means that are no numbers
        # count as equal, so that the tree ends all the same.
        square = torch.cdist(means, means, compute_mode="donot_use_mm_for_euclid_dist").square().nan_to_num(posinf=0.0)
        if device.has_float_kernels(square) and square.shape[-1] <= _kernels().MOST_CLASSES:
            left, right = _kernels().class_tree(square, present, iterations)
            return left, right
        return _by_depth(square, present, iterations)
