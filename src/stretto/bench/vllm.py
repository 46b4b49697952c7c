"""The history drafter inside vLLM (CPU build) against plain vLLM and vLLM's suffix decoding: seconds of a third visit.

Every pair has prompts of its own: each side answers them twice, and the third visit is timed, sides in turns. `useless`
draws at so high a temperature that nothing comes again, with as many tokens each: what drafting costs in vain. `silent`
is a proposer that never proposes: what vLLM itself does otherwise when one is there. Before, all sides must answer
greedily alike. One process, one thread, vLLM's engine in it.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import random
import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from stretto.bench.arctic import INSTALL, arctic
from stretto.bench.pairs import Ratio, count, require_idle, timed
from stretto.engine.vllm_arguments import check_version, reason
from stretto.errors import StrettoError
from stretto.tasks.knights import PEOPLE_WEIGHTS, draw_puzzle

SPECULATIVE = {
    "plain": None,
    "silent": {"method": "custom_class", "model": "stretto.bench.vllm.Silent"},
    "suffix": {"method": "suffix"},
    "history": {"method": "custom_class", "model": "stretto.integrations.vllm.HistoryDrafter"},
}
SIDES = tuple(SPECULATIVE)
LEARNERS = ("suffix", "history")  # from earlier visits
ENVIRONMENT = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "HF_HUB_OFFLINE": "1",
}
SCENARIOS = {"third visit": (1.0, {}), "useless": (2.0, {"ignore_eos": True})}  # temperature, and the rest
HOT_TOKENS = 128  # of each response where nothing comes again
VISITS = 3
BATCH_SPEC = ("drafts", "draft_tokens", "accepted_tokens")


class Silent:
    """A custom proposer without proposals."""

    def __init__(self, vllm_config: Any) -> None:
        del vllm_config

    def load_model(self, *args: Any, **kwargs: Any) -> None:
        """Nothing: vLLM calls it with its model."""

    def propose(self, sampled_token_ids: list[list[int]], *args: Any, **kwargs: Any) -> list[list[int]]:
        return [[] for _ in sampled_token_ids]


class Side:
    """One vLLM."""

    def __init__(self, name: str, options: argparse.Namespace) -> None:
        from vllm import LLM

        speculative = SPECULATIVE[name]
        if speculative is not None:
            speculative = speculative | {"num_speculative_tokens": options.drafts}
        self.name = name
        self.counts: dict[str, int] = {}  # of the last visit: drafts, drafted and accepted tokens
        try:
            self.llm = LLM(
                options.model,
                dtype="float32",
                enforce_eager=True,
                max_model_len=options.tokens + 256,
                max_num_seqs=options.slots,
                disable_log_stats=False,
                speculative_config=speculative,
            )
        except Exception as error:  # of any kind: vLLM checks in many places
            raise StrettoError(
                f"bench vllm: vLLM does not start with --model {options.model} (a checkpoint of a run, such as "
                f"RUN/checkpoints/step-000036) for the side {name}: {reason(error)}"
            ) from error

    def answer(
        self, prompts: Sequence[Sequence[int]], temperature: float, tokens: int, **how: Any
    ) -> list[list[int]]:
        from vllm import SamplingParams

        outputs = self.llm.generate(
            [{"prompt_token_ids": list(prompt)} for prompt in prompts],
            SamplingParams(temperature=temperature, max_tokens=tokens, detokenize=False, **how),
            use_tqdm=False,
        )
        return [list(output.outputs[0].token_ids) for output in outputs]

    def seconds_per_token(
        self, prompts: Sequence[Sequence[int]], temperature: float, tokens: int, **how: Any
    ) -> float:
        said: list[list[int]] = []
        before = self._counters()
        seconds = timed(lambda: said.extend(self.answer(prompts, temperature, tokens, **how)))
        after = self._counters()
        self.counts = {name: after[name] - before.get(name, 0) for name in after}
        return seconds / sum(map(len, said))

    def _counters(self) -> dict[str, int]:
        """vLLM's own, of drafting; those of all engines in this process."""
        names = {f"vllm:spec_decode_num_{name}": name for name in BATCH_SPEC}
        return {names[m.name]: int(m.value) for m in self.llm.get_metrics() if m.name in names}


def prompt_sets(side: Side, count: int, options: argparse.Namespace) -> list[list[list[int]]]:
    """Puzzles nobody has seen, `samples` times each, as token ids."""
    drawn, encode = random.Random(options.seed), side.llm.get_tokenizer().encode
    people, weights = list(PEOPLE_WEIGHTS), list(PEOPLE_WEIGHTS.values())

    def puzzle() -> list[int]:
        return list(encode(draw_puzzle(drawn, drawn.choices(people, weights)[0], "train").prompt))

    return [
        [ids for _ in range(options.prompts) for ids in [puzzle()] * options.samples] for _ in range(count)
    ]


def measure(sides: Sequence[Side], scenario: str, options: argparse.Namespace) -> dict[str, Any]:
    """Seconds per token of each side's last visit, pair by pair, and what was drafted in these."""
    temperature, how = SCENARIOS[scenario]
    tokens = min(HOT_TOKENS, options.tokens) if how else options.tokens
    pairs: list[dict[str, float]] = []
    counts = {side.name: Counter[str]() for side in sides}
    for pair, prompts in enumerate(prompt_sets(sides[0], options.pairs + 1, options)):
        times: dict[str, float] = {}
        for side in sides if pair % 2 == 0 else sides[::-1]:
            for _ in range(VISITS if side.name in LEARNERS else 1):
                times[side.name] = side.seconds_per_token(prompts, temperature, tokens, **how)
            if pair:
                counts[side.name].update(side.counts)
        if pair:  # the first one warms up
            pairs.append(times)
            rates = "  ".join(f"{name} {1 / seconds:,.0f} tokens/s" for name, seconds in times.items())
            print(f"{scenario}, pair {pair}: {rates}", file=sys.stderr, flush=True)
    faster = {
        f"{a} over {b}": asdict(Ratio.of([times[b] / times[a] for times in pairs]))
        for a, b in (
            ("history", "plain"),
            ("history", "suffix"),
            ("history", "silent"),
            ("suffix", "plain"),
            ("silent", "plain"),
        )
        if {a, b} <= counts.keys()
    }
    return {"faster": faster, "seconds_per_token": pairs, "counters": counts}


def main(argv: Sequence[str] = ()) -> int:
    """Prints ratios, or with --json one object; 1 where greedy responses differ."""
    parser = argparse.ArgumentParser(prog="stretto bench vllm", description=__doc__)
    parser.add_argument(
        "--model", required=True, help="a checkpoint of the demo: RUN/checkpoints/step-000036"
    )
    parser.add_argument("--pairs", type=count, default=12)
    parser.add_argument("--prompts", type=count, default=16, help="of a visit")
    parser.add_argument("--samples", type=count, default=8, help="of a prompt")
    parser.add_argument("--slots", type=count, default=32, help="responses at a time")
    parser.add_argument("--tokens", type=count, default=512, help="of a response at most")
    parser.add_argument("--drafts", type=count, default=16, help="num_speculative_tokens")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--sides", nargs="+", default=list(SIDES), choices=SIDES)
    parser.add_argument("--scenarios", nargs="+", default=list(SCENARIOS), choices=list(SCENARIOS))
    parser.add_argument("--busy", action="store_true", help="measure although others use the machine")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args(argv)
    if os.environ.get("OMP_NUM_THREADS") != "1":
        raise StrettoError(
            "bench vllm: set OMP_NUM_THREADS=1; with more threads vLLM's steps wait for each other"
        )
    os.environ.update(ENVIRONMENT)
    try:
        import vllm
    except ImportError as error:
        raise StrettoError(
            f"bench vllm needs vLLM: pip install '.[vllm]' in a clone, or make test-vllm ({error})"
        ) from error
    version = str(vllm.__version__)
    check_version(version)
    if "suffix" in options.sides and arctic() is None:
        raise StrettoError(
            f"bench vllm: vLLM's suffix decoding needs arctic-inference: {INSTALL}; or --sides plain history"
        )
    from stretto.integrations.vllm_fixes import install

    install()
    others = require_idle(limit=float("inf") if options.busy else 0.2)
    sides = [Side(name, options) for name in options.sides]
    prompts = prompt_sets(sides[0], 1, options)[0]
    greedy = [side.answer(prompts, 0.0, options.tokens) for side in sides for _ in range(2)]
    same = all(said == greedy[0] for said in greedy)
    machine = f"{platform.machine()}, vllm {version}, others {others:.0%}"
    rows = {scenario: measure(sides, scenario, options) for scenario in options.scenarios}
    if options.json:
        print(json.dumps({"machine": machine, "options": vars(options), "greedy_same": same, "rows": rows}))
        return 0 if same else 1
    print(f"{options.model}; {machine}; greedy responses {'alike' if same else 'DIFFER'}")
    for scenario, row in rows.items():
        for what, ratio in row["faster"].items():
            print(f"{scenario}: {what} {ratio['median']:.2f}x [{ratio['low']:.2f}, {ratio['high']:.2f}]")
        for name, counts in row["counters"].items():
            print(f"{scenario}: {name}: {dict(counts)}")
    return 0 if same else 1
