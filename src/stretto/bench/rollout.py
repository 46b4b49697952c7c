"""A run with drafts against the same run without: rollout seconds by visit, from the same seed to the same tokens.

Both runs are extended by one visit of the data at a time, in turns, so that a machine whose speed drifts does so for
both. A ratio is taken step by step: the same responses, from the same weights.
"""

from __future__ import annotations

import argparse
import json
import platform
import tempfile
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import AutoModelForCausalLM
from transformers.utils import logging as transformers_logging

from stretto.assemble import read_inputs
from stretto.bench.pairs import Ratio, alternate, require_idle, timed
from stretto.config import Config, load_config
from stretto.errors import StrettoError
from stretto.history.log import read_rollouts
from stretto.model import location
from stretto.observe.metrics import drafting_seconds
from stretto.run_folder import RunFolder
from stretto.trainer import Trainer

SIDES = ("plain", "drafted")


def extend(config: Config, folder: Path, steps: int) -> None:
    """Begin the run in `folder`, or go on with it, to `steps`."""
    if folder.exists():
        Trainer.resume(folder, {"steps": steps}).run()
    else:
        Trainer(config.model_copy(update={"steps": steps})).run()


def tokens(run: RunFolder, step: int) -> list[list[int]]:
    """What update `step` was made of."""
    return [rollout.token_ids.tolist() for rollout in read_rollouts(run.log_file("consumed", step))]


def compare(base: Config, visits: int, runs: Path) -> list[dict[str, Any]]:
    """Train with and without drafts; a row for each visit."""
    rows = len(read_inputs(base).train)
    per_visit, left = divmod(rows, base.schedule.prompts)
    if left:
        raise StrettoError(
            f"bench rollout: schedule.prompts = {base.schedule.prompts} does not divide the {rows} rows, so that steps "
            "and visits would drift apart"
        )
    folders = {side: runs / side for side in SIDES}
    for visit in range(visits):
        for side in SIDES if visit % 2 == 0 else SIDES[::-1]:
            config = base.model_copy(update={"name": side, "runs": str(runs)})
            if side == "plain":
                draft = base.draft.model_copy(update={"budget": "none"})
                config = config.model_copy(update={"draft": draft})
            extend(config, folders[side], (visit + 1) * per_visit)
    plain, drafted = (RunFolder.open(folders[side]) for side in SIDES)
    table = []
    for visit in range(visits):
        steps = range(visit * per_visit + 1, (visit + 1) * per_visit + 1)
        a, b = ([line for line in run.metrics() if line["step"] in steps] for run in (plain, drafted))
        table.append(
            {
                "visit": visit + 1,
                "same_responses": sum(
                    x == y for s in steps for x, y in zip(tokens(plain, s), tokens(drafted, s), strict=True)
                ),
                "responses": per_visit * base.schedule.prompts * base.schedule.samples,
                "seconds": [sum(line["time/rollout"] for line in lines) for lines in (a, b)],
                "ratio": asdict(
                    Ratio.of([x["time/rollout"] / y["time/rollout"] for x, y in zip(a, b, strict=True)])
                ),
                "acceptance_length": float(np.mean([line["spec/mean_acceptance_length"] for line in b])),
                "accepted_share": sum(line["spec/accepted"] for line in b)
                / max(1, sum(line["spec/drafted"] for line in b)),
                "draft_share": sum(draft_seconds(line) for line in b)
                / sum(line["time/rollout"] for line in b),
                "index_wait_ms": [1e3 * line["spec/longest_wait"] for line in b],
            }
        )
    return table


def draft_seconds(line: dict[str, Any]) -> float:
    """Drafting's in a step, and the building thread's."""
    return drafting_seconds(line) + float(line["spec/index/build_seconds"])


def prompt_lookup(config: Config, responses: int) -> Ratio:
    """transformers' prompt look-up decoding against its plain decoding, one sequence at a time, as it requires."""
    inputs = read_inputs(config)
    model: Any = AutoModelForCausalLM.from_pretrained(location(config.model.path), dtype=torch.float32).eval()

    def answer(**how: Any) -> float:
        made = 0

        def run() -> None:
            nonlocal made
            torch.manual_seed(0)
            for prompt in inputs.train[:responses]:
                ids = torch.from_numpy(prompt.token_ids)[None]
                with torch.inference_mode():
                    out = model.generate(
                        ids,
                        attention_mask=torch.ones_like(ids),
                        do_sample=True,
                        temperature=config.sampling.temperature,
                        top_k=0,
                        max_new_tokens=config.sampling.max_new_tokens,
                        pad_token_id=inputs.tokenizer.eos_token_id,
                        **how,
                    )
                made += out.shape[1] - ids.shape[1]

        return timed(run) / made

    a, b = alternate(lambda: answer(prompt_lookup_num_tokens=10), answer, 3)
    return Ratio.of([plain / drafted for drafted, plain in zip(a, b, strict=True)])


def main(argv: Sequence[str] = ()) -> int:
    """Prints a table, or with --json one object; 1 where the runs' tokens differ."""
    parser = argparse.ArgumentParser(prog="stretto bench rollout", description=__doc__)
    parser.add_argument("--config", default="demo", help="a TOML file or a preset")
    parser.add_argument("--visits", type=int, default=4)
    parser.add_argument(
        "--prompt-lookup", type=int, default=0, metavar="N", help="also transformers', N prompts"
    )
    parser.add_argument("--busy", action="store_true", help="measure although others use the machine")
    parser.add_argument("--json", action="store_true")
    options, keys = parser.parse_known_args(argv)
    base = load_config(options.config, ["--eval.enabled=false", "--checkpoint.every=1000000", *keys])
    transformers_logging.set_verbosity_error()
    others = require_idle(limit=float("inf") if options.busy else 0.2)
    with tempfile.TemporaryDirectory() as folder:
        table = compare(base, options.visits, Path(folder))
    machine = f"{platform.machine()}, torch {torch.__version__}, others {others:.0%}"
    lookup = prompt_lookup(base, options.prompt_lookup) if options.prompt_lookup else None
    if options.json:
        found = {"config": options.config, "machine": machine, "visits": table}
        print(json.dumps(found | ({"prompt_lookup": asdict(lookup)} if lookup else {})))
        return status(table)
    print(
        f"{options.config}, {' '.join(keys) or 'as it is'}; {machine}; rollout seconds without and with drafts"
    )
    for row in table:
        resumed, *others_ms = row[
            "index_wait_ms"
        ]  # histories are built anew from the log while the first one runs
        print(
            f"visit {row['visit']}  {row['seconds'][0]:6.1f}  {row['seconds'][1]:6.1f}  "
            f"{row['ratio']['median']:.2f}x [{row['ratio']['low']:.2f}, {row['ratio']['high']:.2f}]  "
            f"tokens per step {row['acceptance_length']:.2f}  accepted {row['accepted_share']:.0%}  "
            f"drafting and indexing {row['draft_share']:.1%} of the time  "
            f"waited for the index at most {max(others_ms, default=0.0):.2f} ms in an engine's step "
            f"({resumed:.2f} ms after the resume)  "
            f"same responses {row['same_responses']} of {row['responses']}"
        )
    if lookup:
        print(f"transformers' prompt look-up, one sequence at a time: {lookup} its plain decoding")
    return status(table)


def status(rows: Sequence[dict[str, Any]]) -> int:
    """1 where drafts changed a response."""
    return 0 if all(row["same_responses"] == row["responses"] for row in rows) else 1
