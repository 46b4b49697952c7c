"""arctic-inference's suffix decoding as a drafter: what `stretto bench draft` compares with, where it is installed.

    pip install nanobind==2.9.2 && pip install --no-build-isolation --no-deps arctic-inference==0.3.0

Called as vLLM's method "suffix" calls it: one cache for everything, every emitted token inserted at once, the last
`max_tree_depth` tokens as context, and its default limits. (vLLM's wrapper is not part of what is timed.)
"""

from __future__ import annotations

import importlib
from collections.abc import Iterable
from types import ModuleType
from typing import Any

import numpy as np

from stretto.draft import Drafts, Verified
from stretto.errors import StrettoError
from stretto.history.automaton import TokenArray
from stretto.records import IntArray, Request, Rollout

DEPTH = 24  # vLLM's suffix_decoding_max_tree_depth: match and draft together
UNLIMITED = (64.0, 0.0)  # limits: as many tokens as asked for, however improbable
INSTALL = (
    "pip install --no-build-isolation --no-deps arctic-inference==0.3.0 (needs nanobind and a C++ compiler)"
)


def arctic() -> ModuleType | None:
    """`arctic_inference.suffix_decoding`, or None where it is not installed."""
    try:
        return importlib.import_module("arctic_inference.suffix_decoding")
    except ImportError:
        return None


class ArcticDrafter:
    """A `stretto.engine.Drafter` of SuffixDecodingCaches."""

    def __init__(
        self,
        *,
        nodes: int,
        per_prompt: bool = False,
        tree: bool = False,
        limits: tuple[float, float] = (1.0, 0.1),
        depth: int = DEPTH,
    ) -> None:
        """`nodes`: the longest draft; `per_prompt`: a cache for each prompt instead of one; `tree`: its tree mode.

        `limits`: drafted tokens per matched token at most, and the smallest estimate of a node; vLLM's by default.
        """
        module = arctic()
        if module is None:
            raise StrettoError(f"arctic_inference is not installed: {INSTALL}")
        self._cache: type[Any] = module.SuffixDecodingCache
        self._nodes, self._per_prompt, self._tree = nodes, per_prompt, tree
        self._factor, self._floor, self.depth = *limits, depth
        self._caches: dict[int | bytes, Any] = {}
        # By slot: cache, id there, the request's tokens with room for more, how many there are.
        self._request: dict[int, tuple[Any, int, TokenArray, int]] = {}
        self._next = 0

    def cache(self, prompt_ids: IntArray) -> Any:
        """The cache that answers for a prompt."""
        name = prompt_ids.tobytes() if self._per_prompt else b""
        if name not in self._caches:
            self._caches[name] = self._cache(max_tree_depth=self.depth)
        return self._caches[name]

    def remember(self, rollouts: Iterable[Rollout]) -> None:
        """Insert finished responses, as vLLM leaves them in the cache."""
        for rollout in rollouts:
            cache, name = self.cache(rollout.prompt.token_ids), self._new()
            cache.start_request(name, rollout.prompt.token_ids.astype(np.int32))
            cache.add_active_response(name, rollout.token_ids.astype(np.int32))
            cache.stop_request(name)

    @property
    def nbytes(self) -> int:
        """Its own estimate, of the global trees."""
        return sum(cache._global_tree.estimate_memory() for cache in self._caches.values())

    def begin(self, slot: int, request: Request) -> None:
        cache, name = self.cache(request.prompt_ids), self._new()
        known = np.concatenate((request.prompt_ids, request.token_ids)).astype(np.int32)
        tokens = np.zeros(known.size + request.sampling.max_new_tokens, np.int32)
        tokens[: known.size] = known
        cache.start_request(name, request.prompt_ids.astype(np.int32))
        self._request[slot] = cache, name, tokens, known.size

    def end(self, slot: int, length: int | None = None) -> None:
        del length
        cache, name, _, _ = self._request.pop(slot)
        cache.stop_request(name)

    def propose(self, slots: IntArray, generated: IntArray, room: IntArray, tokens: int, most: int) -> Drafts:
        found = self.speculate(slots, room)
        counts = np.array([len(draft.token_ids) for draft in found], np.int64)
        parents = np.array([p for draft in found for p in draft.parents], np.int64)
        return Drafts(
            counts,
            np.array([t for draft in found for t in draft.token_ids], np.int64),
            parents,
            _depth(counts, parents),
            np.array([p for draft in found for p in draft.probs], np.float64),
            np.zeros(parents.size, np.int8),
        )

    def speculate(self, slots: IntArray, room: IntArray) -> list[Any]:
        """Its drafts as they come, one for each of `slots`."""
        found = []
        for slot, left in zip(slots.tolist(), room.tolist(), strict=True):
            cache, name, text, size = self._request[slot]
            found.append(
                cache.speculate(
                    name,
                    text[max(0, size - self.depth) : size],
                    max_spec_tokens=min(self._nodes, left),
                    max_spec_factor=self._factor,
                    min_token_prob=self._floor,
                    use_tree_spec=self._tree,
                )
            )
        return found

    def observe(self, slots: IntArray, drafts: Drafts, verified: Verified, token_ids: IntArray) -> None:
        at = 0
        for slot, count in zip(slots.tolist(), verified.emitted.tolist(), strict=True):
            cache, name, text, size = self._request[slot]
            text[size : size + count] = token_ids[at : at + count]
            cache.add_active_response(name, text[size : size + count])
            self._request[slot] = cache, name, text, size + count
            at += count

    def _new(self) -> int:
        self._next += 1
        return self._next


def _depth(counts: IntArray, parents: IntArray) -> IntArray:
    depth = np.ones(parents.size, np.int64)
    begins = np.repeat(counts.cumsum() - counts, counts)
    for node in np.flatnonzero(parents >= 0).tolist():
        depth[node] = depth[begins[node] + parents[node]] + 1
    return depth
