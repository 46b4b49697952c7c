"""What a refresh costs: a response that was dropped is generated again under the next weights, its old tokens as draft.

    python -m studies.refresh [--models demo smollm2] [--seeds 3] [--results FOLDER]

Of each model and learning rate one optimiser step is made; then the first L tokens of the responses that it was made
of are generated again, with the same keys, under the new weights: drafted from the old tokens, and plainly. The tokens
must be equal; counted are engine steps per request. With an agreement a per token the draft holds for
(1 - a**L) / (1 - a) tokens, the first wrong one included, and what is left is decoded plainly.
Then the demo is trained with `sorted`, on-policy with refresh and partial, at a learning rate of 1e-6: useful tokens
per second of rollout, which mean something on an idle machine only. Writes `FOLDER/table.md`; goes on where it stopped.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
from safetensors.torch import load_file

from stretto.assemble import read_inputs, sampling_params, settle_process
from stretto.config import Config, load_config
from stretto.draft.budget import Fixed
from stretto.draft.drafter import HistoryDrafter
from stretto.engine.embedded import EmbeddedEngine
from stretto.engines import make_engine
from stretto.history.index import HistoryIndex
from stretto.history.log import read_rollouts
from stretto.model import copy_tensors, load_model
from stretto.records import Progress, Request, Rollout, SamplingParams
from studies.cells import Cell, run_cells, spread, steps_of

LENGTHS = (50, 100, 200, 500)
PATH = 32  # tokens of a draft at a time
RATES = (1e-6, 1e-5, 3e-4)  # the last is the demo's own
MODELS: dict[str, tuple[str, ...]] = {
    "demo": ("demo",),
    "smollm2": (
        "examples/gsm8k_smollm2.toml", "--schedule.prompts", "4", "--sampling.max_new_tokens", "640",
        "--sampling.temperature", "1.0",
    ),
}  # fmt: skip
ONE_STEP = ("--steps", "1", "--checkpoint.every", "1", "--eval.enabled", "false")
SORTED = (
    "--schedule.kind", "sorted", "--schedule.load_prompts", "4", "--learner.learning_rate", "1e-6",
    "--steps", "12", "--eval.enabled", "false",
)  # fmt: skip
THROUGHPUT = {
    "on-policy, refresh": (*SORTED, "--schedule.max_staleness", "0"),
    "partial": (*SORTED, "--schedule.max_staleness", "none"),
}


def one_step(run: Path, words: Sequence[str], rate: float) -> None:
    """Train one optimiser step into `run`, if it has not been."""
    if not (run / "latest").exists():
        where = ("--learner.learning_rate", str(rate), "--runs", str(run.parent), "--name", run.name)
        command = [sys.executable, "-m", "stretto", "train", *words, *ONE_STEP, *where]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)


def again(config: Config, rollouts: Sequence[Rollout], weights: Path) -> list[Cell]:
    """The first L tokens of `rollouts` under `weights`, for each L that some have."""
    settle_process(config)
    inputs, model = read_inputs(config), load_model(config.model)
    copy_tensors(load_file(weights), model, str(weights))
    slots, found = config.engine.max_num_seqs, []
    for length in LENGTHS:
        long = [rollout for rollout in rollouts if rollout.token_ids.size >= length]
        if not long:
            continue
        how = replace(sampling_params(config, inputs.ends), max_new_tokens=length)
        requests = [_request(i, rollout, how) for i, rollout in enumerate(long)]
        sides = []
        for drafter in (HistoryDrafter(HistoryIndex(), Fixed(PATH), slots=slots, sources=["dropped"]), None):
            engine = make_engine(config, model, inputs.tokenizer, inputs.max_model_len, lambda: 0.0, drafter)
            sides.append((_generate(engine, requests), engine.metrics()["decode_steps"]))
        (said, steps), (plain, plain_steps) = sides
        if said != plain:
            raise SystemExit(f"{weights}: tokens drafted from dropped ones are not those of plain decoding")
        agreed = [_common(r.token_ids[:length].tolist(), s) for r, s in zip(long, said, strict=True)]
        parted = sum(kept < length for kept in agreed)
        share = sum(agreed) / (sum(agreed) + parted)
        reach = length if share == 1.0 else (1 - share**length) / (1 - share)
        expected = (length - reach + reach / (PATH + 1)) / length
        found.append(
            {"length": length, "responses": len(long), "agreement": share, "reach": reach}
            | {"steps": steps / plain_steps, "expected": expected}
        )
    return found


def _request(id: int, rollout: Rollout, how: SamplingParams) -> Request:
    nothing = np.zeros(0, np.int64)
    dropped = rollout.token_ids[: how.max_new_tokens]
    return Request(id, 1, id, rollout.prompt.token_ids, nothing, 0, rollout.key, how, draft_ids=dropped)


def _generate(engine: EmbeddedEngine, requests: Sequence[Request]) -> list[list[int]]:
    """Token ids, by request id."""
    engine.submit(requests)
    said: list[list[int]] = [[] for _ in requests]
    while engine.has_work:
        for event in engine.step():
            if isinstance(event, Progress) and event.token_ids is not None:
                ends = np.cumsum(event.counts)
                for id, part in zip(event.ids, np.split(event.token_ids, ends[:-1]), strict=True):
                    said[id].extend(part.tolist())
    return said


def _common(a: Sequence[int], b: Sequence[int]) -> int:
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


def throughput(run: Path) -> Cell:
    """Tokens trained on per second of rollout, and how many had to be generated for each."""
    steps = steps_of(run)
    logs = [read_rollouts(run / f"consumed/step-{line['step']:06}.parquet") for line in steps]
    useful = sum(rollout.token_ids.size for rollouts in logs for rollout in rollouts)
    return {"tokens_per_second": useful / sum(line["time/rollout"] for line in steps)}


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument("--seeds", type=int, default=3, help="of the throughput's pairs")
    parser.add_argument("--results", type=Path, default=Path("studies/results/refresh"))
    options = parser.parse_args(arguments)
    options.results.mkdir(parents=True, exist_ok=True)
    text = (
        "| model | learning rate | dropped tokens | responses | agreement a | (1 - a^L) / (1 - a) "
        "| steps, of plain ones | expected |\n| --- | ---: | ---: | ---: | ---: | ---: | ---: | ---: |\n"
    )
    for name in options.models:
        for rate in RATES:
            file = options.results / f"{name}-{rate:g}.json"
            if not file.exists():
                run = options.results / "runs" / f"{name}-{rate:g}"
                one_step(run, MODELS[name], rate)
                config = load_config(run / "config.toml")
                rollouts = read_rollouts(run / "consumed/step-000001.parquet")
                file.write_text(json.dumps(again(config, rollouts, run / "latest/model.safetensors")))
            for row in json.loads(file.read_text()):
                text += (
                    f"| {name} | {rate:g} | {row['length']} | {row['responses']} | {row['agreement']:.4f} "
                    f"| {row['reach']:.0f} | {row['steps']:.1%} | {row['expected']:.1%} |\n"
                )
    cells = run_cells(options.results / "throughput", THROUGHPUT, options.seeds, (), throughput)
    if cells:
        speeds = {arm: [c["tokens_per_second"] for c in cells if c["arm"] == arm] for arm in THROUGHPUT}
        refresh, partial = speeds.values()
        ratios = spread([a / b for a, b in zip(refresh, partial, strict=True)], 3)
        text += f"\n`sorted` on-policy with refresh against partial, useful tokens per second of rollout: {ratios}.\n"
    (options.results / "table.md").write_text(text)
    print(text, end="")


if __name__ == "__main__":
    main()
