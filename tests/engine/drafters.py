"""A drafter that half knows the future, in trees of every shape."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from stretto.draft import MAX_NODES, Drafts, Verified, no_drafts
from stretto.records import IntArray, Request
from tests.models import VOCABULARY


class Oracle:
    """Draws trees at random; a node below the true path is the true next token with probability `knows`.

    `truth` has each request's whole response by id. Without `branches` trees are paths.
    Checks what it is told against what it was asked.
    """

    def __init__(
        self,
        truth: Mapping[int, Sequence[int]],
        seed: int,
        knows: float,
        nodes: int = 12,
        branches: bool = True,
    ) -> None:
        self.truth, self.knows, self.nodes, self.branches = truth, knows, nodes, branches
        self.random = np.random.default_rng(seed)
        self.requests: dict[int, tuple[int, int]] = {}  # slot -> id, tokens so far
        self.reusing: set[int] = set()  # ids of requests that emit tokens without drafts
        self.proposed: Drafts = no_drafts(0)
        self.accepted = 0

    def begin(self, slot: int, request: Request) -> None:
        assert slot not in self.requests
        self.requests[slot] = (request.id, request.token_ids.size)
        if request.reuse is not None:
            self.reusing.add(request.id)

    def end(self, slot: int, length: int | None) -> None:
        _, known = self.requests.pop(slot)
        assert length is None or length == known

    def propose(self, slots: IntArray, generated: IntArray, room: IntArray, tokens: int, most: int) -> Drafts:
        assert (room >= 0).all()
        trees = []
        for place, slot in enumerate(slots.tolist()):
            id, known = self.requests[slot]
            assert known == generated[place]
            size = min(int(self.random.integers(0, self.nodes + 1)), most, MAX_NODES)
            trees.append(self.tree(self.truth[id][known:], size, int(room[place])))
            most -= len(trees[-1])
        nodes = [node for tree in trees for node in tree]
        token_ids, parents, depth = np.array(nodes, np.int64).reshape(-1, 3).T
        self.proposed = Drafts(
            np.array([len(tree) for tree in trees]),
            token_ids,
            parents,
            depth,
            np.ones(len(nodes)),
            np.zeros(len(nodes), np.int8),
        )
        return self.proposed

    def tree(self, future: Sequence[int], size: int, room: int) -> list[tuple[int, int, int]]:
        """(token, parent, depth) of up to `size` nodes, no two children of one parent alike."""
        nodes: list[tuple[int, int, int]] = []
        true = {-1: 0}  # nodes on the true path, with their depth
        for _ in range(size):
            parent = int(self.random.integers(-1, len(nodes)))
            depth = 1 + (nodes[parent][2] if parent >= 0 else 0)
            if depth > room:
                continue
            knows = parent in true and depth <= len(future) and self.random.random() < self.knows
            token = int(future[depth - 1]) if knows else int(self.random.integers(VOCABULARY))
            if any(other[:2] == (token, parent) for other in nodes):
                continue
            if parent in true and depth <= len(future) and token == future[depth - 1]:
                true[len(nodes)] = depth
            nodes.append((token, parent, depth))
        return nodes if self.branches else self.path(nodes)

    @staticmethod
    def path(nodes: Sequence[tuple[int, int, int]]) -> list[tuple[int, int, int]]:
        """The nodes each of which has the one before for its parent, as a tree of their own."""
        kept: list[tuple[int, int, int]] = []
        here = -1
        for node, (token, parent, depth) in enumerate(nodes):
            if parent == here:
                kept.append((token, len(kept) - 1, depth))
                here = node
        return kept

    def observe(self, slots: IntArray, drafts: Drafts, verified: Verified, token_ids: IntArray) -> None:
        assert drafts.counts.size == slots.size == verified.emitted.size
        begins = np.cumsum(drafts.counts) - drafts.counts
        emitted = np.split(token_ids, np.cumsum(verified.emitted)[:-1])
        for place, slot in enumerate(slots.tolist()):
            id, known = self.requests[slot]
            tokens = emitted[place].tolist()
            assert tokens == list(self.truth[id][known : known + len(tokens)])
            self.requests[slot] = (id, known + len(tokens))
            here = range(int(begins[place]), int(begins[place] + drafts.counts[place]))
            self.check(drafts, verified, here, tokens)
            accepted = int(verified.accepted[here.start : here.stop].sum())
            assert len(tokens) <= 1 + accepted or id in self.reusing

    def check(self, drafts: Drafts, verified: Verified, here: range, tokens: Sequence[int]) -> None:
        """A node was reached if its parent was accepted and something was drawn there; accepted if that was it."""
        for node in here:
            parent, depth = int(drafts.parents[node]), int(drafts.depth[node])
            on_path = parent < 0 or bool(verified.accepted[here.start + parent])
            assert verified.reached[node] == (on_path and depth <= len(tokens))
            hit = bool(verified.reached[node]) and tokens[depth - 1] == drafts.token_ids[node]
            assert verified.accepted[node] == hit
            self.accepted += hit
