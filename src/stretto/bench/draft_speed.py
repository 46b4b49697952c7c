"""How long drafting takes and how much memory history needs, beside arctic-inference where it is installed.

Both follow the same 64 responses through the same steps, turn by turn, so what one measures is not the machine's mood
and each finds its memory as cold as the other. Times per step are of proposing and of taking in the emitted tokens.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import asdict, replace
from itertools import cycle
from typing import Any, get_args

import numpy as np

from stretto.alternatives import Alternatives
from stretto.bench.arctic import ArcticDrafter, arctic
from stretto.bench.pairs import Ratio, timed
from stretto.bench.recorded import Recorded
from stretto.bench.replay import Texts, request_of
from stretto.draft.budget import Fixed
from stretto.draft.drafter import HistoryDrafter
from stretto.history.builds import Weight
from stretto.history.index import HistoryIndex
from stretto.records import FloatArray, IntArray, Prompt, Rollout, prompt_uid

LIVE = 64  # requests
SAMPLES = 16  # responses of each prompt in the history
GROUP = 8  # live requests of one prompt
NODES = 10  # of each draft
PACE = 3  # tokens that a request emits per step at most, as recorded rollouts do on average
REPLACED = 0.03  # tokens of a response that its variants have otherwise
BLOCKS = 20  # pairs
ALTERNATIVES = 8  # of each place, which is the default
TEXT_BYTES = 4  # of a stored token id, or probability

Seconds = tuple[float, float, float, float]


def synthesised(recorded: Recorded, tokens: int) -> tuple[list[Rollout], list[Rollout]]:
    """A history of about so many tokens, SAMPLES variants of recorded responses to each prompt, and LIVE targets.

    A prompt's variants come from its own responses, each token replaced by another one of the same response with
    probability REPLACED. Recorded prompts are used again with a number appended.
    """
    random, prompts = np.random.default_rng(0), []
    history: list[Rollout] = []
    targets: list[Rollout] = []
    known: dict[str, list[Rollout]] = {}
    for rollout in recorded.history + recorded.targets:
        known.setdefault(rollout.prompt.uid, []).append(rollout)
    made = 0
    for number, responses in enumerate(cycle(known.values())):
        if made >= tokens:
            break
        ids = np.append(responses[0].prompt.token_ids, number % 1_000)
        ids = np.append(ids, number // 1_000)
        prompts.append((Prompt(number, prompt_uid(ids), 0, ids, {}), responses))
        for _ in range(SAMPLES):
            history.append(_variant(*prompts[-1], len(history), 0, random))
            made += history[-1].token_ids.size
    while len(targets) < LIVE:
        prompt = prompts[len(targets) // GROUP % len(prompts)]
        targets.append(_variant(*prompt, len(targets), 1, random))
    return history, targets


def _variant(
    prompt: Prompt, responses: list[Rollout], number: int, visit: int, random: np.random.Generator
) -> Rollout:
    base = responses[int(random.integers(len(responses)))]
    tokens = base.token_ids.copy()
    places = random.random(tokens.size) < REPLACED
    tokens[places] = random.choice(base.token_ids, int(places.sum()))
    return replace(
        base,
        request_id=number,
        group_id=prompt.row,
        prompt=prompt,
        visit=visit,
        token_ids=tokens,
        logprobs=np.full(tokens.size, -0.1),
    )


def new_drafter(weight: Weight = "count") -> HistoryDrafter:
    """Ours, with drafts of NODES."""
    index = HistoryIndex(weight=weight)
    return HistoryDrafter(
        index, Fixed(NODES), slots=LIVE, max_nodes=NODES, noise_aware=False, probabilities=False
    )


def default_drafter() -> HistoryDrafter:
    """Ours as a run has it by default, with drafts of NODES: noise-aware, by probabilities and alternatives."""
    index = HistoryIndex(weight="probability", alternatives=True)
    return HistoryDrafter(index, Fixed(NODES), slots=LIVE, max_nodes=NODES)


def with_alternatives(history: list[Rollout]) -> list[Rollout]:
    """With ALTERNATIVES at every place: the token itself, of probability e^-0.1, and others of the same response, of
    which each takes half of what is left. That is between the demo's (fewer) and SmolLM2's at temperature 1 (more).
    """
    ranks = np.arange(1, ALTERNATIVES)
    logprobs = np.concatenate([[-0.1], np.log(-np.expm1(-0.1)) - ranks * np.log(2.0)]).astype(np.float32)
    return [
        replace(
            rollout,
            top=Alternatives(
                np.stack([np.roll(rollout.token_ids, 7 * k) for k in range(ALTERNATIVES)], axis=1).astype(
                    np.int32
                ),
                np.tile(logprobs, (rollout.token_ids.size, 1)),
            ),
        )
        for rollout in history
    ]


def fill(
    ours: HistoryDrafter, theirs: ArcticDrafter | None, history: list[Rollout]
) -> tuple[list[float], list[float]]:
    """Insert the history into both, block by block, changing who begins; tokens per second of each block."""

    def insert() -> None:
        ours.remember(block)
        ours.index.wait({r.prompt.uid for r in block})

    rates: tuple[list[float], list[float]] = ([], [])
    edges = np.linspace(0, len(history) // SAMPLES, BLOCKS + 1).astype(int) * SAMPLES
    for number, (begin, end) in enumerate(zip(edges[:-1], edges[1:], strict=True)):
        block = history[begin:end]
        if not block:
            continue
        sides: list[Callable[[], None]] = [insert]
        if theirs is not None:
            sides.append(lambda block=block: theirs.remember(block))  # type: ignore[misc]
        for which in range(len(sides))[:: 1 if number % 2 else -1]:
            seconds = timed(sides[which])
            rates[which].append(sum(r.token_ids.size for r in block) / seconds)
    return rates


class Race:
    """Live requests that both drafters follow, step by step; ours decides what is emitted."""

    def __init__(self, ours: HistoryDrafter, theirs: ArcticDrafter | None, targets: list[Rollout]) -> None:
        self.ours, self.theirs, self.targets = ours, theirs, targets
        self.texts = Texts(targets, LIVE)
        self.longest = 2 * max(t.token_ids.size for t in targets)
        self.proposed, self.begin_seconds, self.steps = [0, 0], [0.0, 0.0], 0
        self.begun = self.emitted = 0
        for slot in range(LIVE):
            self._begin(slot)

    def step(self) -> Seconds:
        """Seconds of one step of all requests: ours to propose and to take in what was emitted, then theirs."""
        slots = np.arange(LIVE)
        generated = self.texts.generated[slots]
        room = self.longest - generated - 1
        self.steps += 1
        first = self.steps % 2 == 0  # whose turn comes first, theirs or ours
        found, theirs = self._speculate(slots, room) if first else ([], 0.0)
        began = time.perf_counter()
        drafts = self.ours.propose(slots, generated, room, LIVE, LIVE * NODES)
        ours = time.perf_counter() - began
        if not first:
            found, theirs = self._speculate(slots, room)
        self.proposed[0] += drafts.token_ids.size
        self.proposed[1] += sum(len(draft.token_ids) for draft in found)
        verified, emitted = self.texts.verify(slots, drafts, PACE)
        self.emitted += emitted.size
        follow = timed(lambda: self.ours.observe(slots, drafts, verified, emitted))
        rival = self.theirs
        insert = timed(lambda: rival.observe(slots, drafts, verified, emitted)) if rival is not None else 0.0
        for slot in slots[self.texts.ended(slots)].tolist():
            length = int(self.texts.generated[slot])
            self.ours.end(slot, length)
            if rival is not None:
                rival.end(slot, length)
            self._begin(slot)
        return ours, follow, theirs, insert

    def _speculate(self, slots: IntArray, room: IntArray) -> tuple[list[Any], float]:
        """Their drafts, and the seconds they took."""
        if self.theirs is None:
            return [], 0.0
        began = time.perf_counter()
        found = self.theirs.speculate(slots, room)
        return found, time.perf_counter() - began

    def blocks(self, steps: int) -> FloatArray:
        """(BLOCKS, 4): `step`, means of blocks; a few steps before are not counted."""
        for _ in range(10):
            self.step()
        self.proposed, self.steps, self.emitted = [0, 0], 0, 0
        times = np.array([self.step() for _ in range(BLOCKS * max(1, steps // BLOCKS))])
        means: FloatArray = times.reshape(BLOCKS, -1, 4).mean(axis=1)
        return means

    def _begin(self, slot: int) -> None:
        target = self.begun % len(self.targets)
        self.begun += 1
        self.texts.put(slot, target)
        request = request_of(self.targets[target], self.longest)
        self.begin_seconds[0] += timed(lambda: self.ours.begin(slot, request))
        if self.theirs is not None:
            theirs = self.theirs
            self.begin_seconds[1] += timed(lambda: theirs.begin(slot, request))


def speed(recorded: Recorded, tokens: int, steps: int) -> dict[str, Any]:
    """One size of history: times, rates and bytes of ours by counts and by default, theirs, and the ratios."""
    history, targets = synthesised(recorded, tokens)
    tokens = sum(r.token_ids.size for r in history)
    ours = new_drafter()
    theirs = ArcticDrafter(nodes=NODES) if arctic() is not None else None
    rates = fill(ours, theirs, history)
    memory = ours.index.metrics()
    sizes = [memory["bytes_per_token"] + TEXT_BYTES, theirs.nbytes / tokens if theirs is not None else 0.0]
    race = Race(ours, theirs, targets)
    times = race.blocks(steps)
    found: dict[str, Any] = {
        "tokens": tokens,
        "prompts": memory["prompts"],
        "emitted_per_request": race.emitted / race.steps / LIVE,
    }
    for which, name in enumerate(("ours", "theirs") if theirs is not None else ("ours",)):
        found[name] = _side(race, which, times, rates[which], sizes[which])
    found["default"] = _by_default(history, targets, steps)
    if theirs is not None:
        per = race.proposed[1] / race.proposed[0]
        step, propose = (times[:, 2] + times[:, 3]) / (times[:, 0] + times[:, 1]), times[:, 2] / times[:, 0]
        insertion = [o / t for o, t in zip(*rates, strict=True)]
        ratios = {"step": step.tolist(), "proposed": (step / per).tolist(), "propose": propose.tolist()}
        for what, values in (ratios | {"insertion": insertion}).items():
            found[f"{what}_ratio"] = asdict(Ratio.of(values))
    return found


def _side(
    race: Race, which: int, times: FloatArray, rates: list[float], bytes_per_token: float
) -> dict[str, float]:
    """Figures of one side of a race, 0 ours or 1 theirs."""
    propose, observe = 1e6 * np.median(times[:, 2 * which : 2 * which + 2], axis=0) / LIVE
    proposed = race.proposed[which] / race.steps / LIVE
    return {
        "us_propose": float(propose),
        "us_observe": float(observe),
        "us_per_proposed": float(propose + observe) / proposed,
        "proposed_per_request": proposed,
        "us_per_begin": 1e6 * race.begin_seconds[which] / race.begun,
        "inserted_per_s": len(rates) / sum(1 / rate for rate in rates),
        "bytes_per_token": bytes_per_token,
    }


def _by_default(history: list[Rollout], targets: list[Rollout], steps: int) -> dict[str, float]:
    """Figures of the default drafter, on its own."""
    drafter = default_drafter()
    rates, _ = fill(drafter, None, with_alternatives(history))
    memory = drafter.index.metrics()  # before anything is in use
    race = Race(drafter, None, targets)
    return _side(race, 0, race.blocks(steps), rates, memory["bytes"] / memory["tokens"])


def growth(recorded: Recorded, few: int, many: int, steps: int) -> dict[str, Any]:
    """How much longer a step takes over a long history than over a short one, turn by turn."""
    races = []
    for tokens in (few, many):
        history, targets = synthesised(recorded, tokens)
        drafter = new_drafter()
        fill(drafter, None, history)
        races.append(Race(drafter, None, targets))
    for race in races:
        race.blocks(BLOCKS)  # warm
    means = []
    for _ in range(BLOCKS):
        times = np.array([[sum(race.step()[:2]) for race in races] for _ in range(max(1, steps // BLOCKS))])
        means.append(times.mean(axis=0))
    ratios = [float(many_s / few_s) for few_s, many_s in means]
    return {"few": few, "many": many, "ratio": asdict(Ratio.of(ratios))}


def weight_bytes(recorded: Recorded, tokens: int = 100_000) -> dict[str, float]:
    """Bytes per history token by weight: automata, token ids, and probabilities where they are the weight."""
    history, _ = synthesised(recorded, tokens)
    found = {}
    for weight in get_args(Weight):
        drafter = new_drafter(weight)
        fill(drafter, None, history)
        found[weight] = drafter.index.metrics()["bytes_per_token"] + TEXT_BYTES * (
            2 if weight == "probability" else 1
        )
    return found
