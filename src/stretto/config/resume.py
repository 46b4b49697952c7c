"""What a resumed run may change of its configuration, and what that means for it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from stretto.config.dump import difference, flat
from stretto.config.keys import shown
from stretto.config.paths import name_in_file
from stretto.config.sections import Config
from stretto.errors import StrettoError

MAY_CHANGE_ON_RESUME = (
    "steps",
    "checkpoint",
    "eval",
    "draft",
    "history",
    "fleet",
    "learner.shards",
    "learner.place",
    "track",
)
"""Keys and sections that a resumed run may set anew; any other would make it another run."""
MAY_MOVE = ("data.path", "data.task", "model.path", "model.tokenizer", "reward.functions")
"""Keys of files that a resumed run may find elsewhere; what is in them stays the same."""
COMPARED = ("eval.split", "eval.path", "eval.limit", "eval.samples", "eval.temperature")
"""Keys on which an evaluation's accuracy depends: with one changed, it cannot be compared with those before."""
EXACTLY = ("fleet.kind", "fleet.workers", "fleet.threads", "learner.shards")
"""Keys that decide what is computed together."""


def check_resumable(saved: Config, wanted: Config) -> None:
    """Whether a run begun with `saved` may go on with `wanted`.

    Raises:
        StrettoError: names every key that differs and may not.
    """
    before, after = flat(saved), flat(wanted)
    refused = [
        key
        for key in difference(saved, wanted)
        if key not in MAY_CHANGE_ON_RESUME
        and key.split(".")[0] not in MAY_CHANGE_ON_RESUME
        and not (key in MAY_MOVE and _moved(key, before.get(key), after.get(key)))
        and not (key == "threads" and not saved.deterministic)
    ]
    if not refused:
        return
    changed = [f"{key} = {shown(after.get(key))} (the run has {shown(before.get(key))})" for key in refused]
    why = " With deterministic = true threads stay, since the order of sums depends on them."
    raise StrettoError(
        f"a resumed run keeps its configuration: {', '.join(changed)}.{why if 'threads' in refused else ''} What may "
        f"change: {', '.join(MAY_CHANGE_ON_RESUME)}; and, where files were moved, {', '.join(MAY_MOVE)}. To train with "
        "another one, start a new run: stretto train"
    )


def _moved(key: str, before: Any, after: Any) -> bool:
    """Whether both values of a key of `MAY_MOVE` name a file, or a list of names differs in the places of files."""
    if key in ("data.path", "model.path", "model.tokenizer"):
        return before is not None and after is not None
    old, new = (value if isinstance(value, list) else [value] for value in (before, after))
    return len(old) == len(new) and all(
        a == b or (name_in_file(a) is not None and name_in_file(a) == name_in_file(b))
        for a, b in zip(old, new, strict=True)
    )


def resume_warnings(config: Config, changed: Sequence[str]) -> list[str]:
    """What it means for a resumed run that the keys `changed` have new values."""
    said = []
    if "steps" in changed and config.learner.lr_schedule != "constant":
        said.append(
            f'steps = {config.steps}: learner.lr_schedule = "{config.learner.lr_schedule}" now ends there, so the '
            "steps to come have other learning rates than they would have had"
        )
    fleet = [key for key in changed if key in EXACTLY]
    if fleet and config.deterministic:
        said.append(
            f"{', '.join(fleet)} changed: from here on it is not bit for bit the run that it would have been (a "
            "token's last bits depend on what is computed beside it)"
        )
    if "model.path" in changed and (config.learner.kl_coef > 0 or config.model.lora is not None):
        what = "what adapters are added to" if config.model.lora is not None else "what the KL is to"
        said.append(f"model.path changed: {what} is read from there, and is not compared with what it was")
    moved = [key for key in changed if key in ("reward.functions", "data.task", "data.path")]
    if moved:
        said.append(
            f"{', '.join(moved)} changed: prompts are compared with those that the run was begun with, but not the "
            "code of rewards and tasks, nor other columns of the data: if these are others, so is what it learns"
        )
    compared = [key for key in changed if key in COMPARED]
    if compared:
        said.append(
            f"{', '.join(compared)} changed: accuracies from now on cannot be compared with those before, "
            "and the best checkpoint is chosen anew"
        )
    return said
