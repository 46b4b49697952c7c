"""What it gains to know the noise that will decide: the same trees by counts, noise-aware, and with alternatives."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from stretto.bench.recorded import Recorded
from stretto.bench.replay import replay
from stretto.draft.budget import Fixed
from stretto.draft.drafter import HistoryDrafter
from stretto.history.builds import Weight
from stretto.history.index import HistoryIndex

NODES = (1, 4, 16)


@dataclass(frozen=True, slots=True)
class Knowledge:
    """What a drafter goes by."""

    name: str
    weight: Weight
    noise: bool
    alternatives: bool


KNOWLEDGE = (
    Knowledge("counts", "count", noise=False, alternatives=False),
    Knowledge("noise, without alternatives", "probability", noise=True, alternatives=False),
    Knowledge("noise, with alternatives", "probability", noise=True, alternatives=True),
)


def by_noise(recorded: Recorded, slots: int, sources: tuple[tuple[str, ...], ...]) -> list[dict[str, Any]]:
    """Tokens per step by what is known and by nodes of a tree, and `limit`, what drafts that are always right give."""
    lengths = np.array([r.token_ids.size for r in recorded.targets])
    rows = []
    for chosen in sources:
        for known in KNOWLEDGE:
            for nodes in NODES:
                found = replay(_drafter(recorded, known, nodes, slots, chosen), recorded.targets, slots)
                rows.append(
                    {
                        "sources": " + ".join(chosen),
                        "known": known.name,
                        "nodes": nodes,
                        "tokens_per_step": found.tokens_per_step,
                        "limit": float(lengths.sum() / np.ceil(lengths / (nodes + 1)).sum()),
                    }
                )
    return rows


def _drafter(
    recorded: Recorded, known: Knowledge, nodes: int, slots: int, sources: tuple[str, ...]
) -> HistoryDrafter:
    window = max(1, len({r.visit for r in recorded.history}))
    drafter = HistoryDrafter(
        HistoryIndex(window=window, weight=known.weight, alternatives=known.alternatives),
        Fixed(nodes),
        slots=slots,
        sources=sources,
        max_nodes=nodes,
        noise_aware=known.noise,
        probabilities=known.weight == "probability",
    )
    drafter.remember(recorded.history)
    return drafter


def show_noise(rows: list[dict[str, Any]]) -> None:
    print("\nTokens per step, and against counts, by nodes of a tree")
    names = dict.fromkeys((row["sources"], row["known"]) for row in rows)
    counts = {
        (r["sources"], r["nodes"]): r["tokens_per_step"] for r in rows if r["known"] == KNOWLEDGE[0].name
    }
    for sources, known in names:
        cells = [row for row in rows if (row["sources"], row["known"]) == (sources, known)]
        shown = "".join(
            f"{cell['nodes']:5d}: {cell['tokens_per_step']:6.3f} "
            f"({cell['tokens_per_step'] / counts[sources, cell['nodes']]:.3f}x)"
            for cell in cells
        )
        print(f"  {sources:30s}{known:29s}{shown}")
    limits = {row["nodes"]: row["limit"] for row in rows}
    print(
        f"  {'drafts that are always right':59s}"
        + "".join(f"{n:5d}: {x:6.3f}         " for n, x in limits.items())
    )
