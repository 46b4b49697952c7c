"""What a user of vLLM may set: `additional_config={"stretto": {...}}`, or the same as JSON in STRETTO_VLLM."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from typing import Any, Literal

from pydantic import Field, ValidationError

from stretto.config.base import Section
from stretto.errors import StrettoError, nearest

ENVIRONMENT = "STRETTO_VLLM"
WHERE = 'additional_config["stretto"]'


class Settings(Section):
    """How the history drafter drafts, and what it keeps."""

    budget: Literal["goodput", "marginal", "fixed", "aimd", "length_class"] = "goodput"
    """Which guesses are verified; goodput: what makes the most expected tokens per second of measured step times."""
    sources: list[Literal["history", "siblings", "prompt"]] = Field(
        default=["history", "siblings", "prompt"], min_length=1
    )
    """Earlier responses to the prompt, those in flight, the prompt's own text."""
    window: int = Field(default=2, ge=1)
    """Visits of each prompt that are kept: of about a group, or eight, responses each."""
    weight: Literal["count", "reward", "recency"] = "count"
    """What makes a continuation likely: how often it was taken, by good responses (needs `rewards`), or lately."""
    max_gib: float = Field(default=2.0, ge=1e-3)
    """Memory of the history; prompts without new responses for longest are forgotten first."""
    history: str | None = Field(default=None, min_length=1)
    """A folder that the history is kept in; what is there is read first."""
    warm_from: str | None = Field(default=None, min_length=1)
    """The folder of a Stretto run over the same prompts, whose responses are read first."""
    rewards: str | None = Field(default=None, min_length=1)
    """A file that `stretto.integrations.vllm.reward` appends to."""


def read_settings(additional_config: Any, environment: Mapping[str, str] | None = None) -> Settings:
    """The settings in vLLM's `additional_config`, which go before those in the environment.

    Raises StrettoError for what is unknown, naming the nearest key, or has a wrong value.
    """
    environment = os.environ if environment is None else environment
    given = additional_config.get("stretto", {}) if isinstance(additional_config, Mapping) else {}
    tree: dict[str, Any] = {}
    place: dict[str, str] = {}  # where each setting is from
    for where, part in ((ENVIRONMENT, _parsed(environment.get(ENVIRONMENT, "{}"))), (WHERE, given)):
        if not isinstance(part, Mapping):
            raise StrettoError(f"{where}: {part!r} is no table of settings")
        for key in part:
            if key not in Settings.model_fields:
                raise StrettoError(
                    f'{where}: there is no setting "{key}"; {nearest(str(key), Settings.model_fields)}'
                )
        tree |= part
        place |= dict.fromkeys(part, where)
    try:
        settings = Settings.model_validate(tree)
    except ValidationError as error:
        first = error.errors()[0]
        key, where = ".".join(str(part) for part in first["loc"]), place[str(first["loc"][0])]
        raise StrettoError(f"{where}: {key} = {first['input']!r}: {first['msg']}") from error
    if settings.weight == "reward" and settings.rewards is None:
        raise StrettoError(
            f'{place["weight"]}: weight = "reward" needs rewards: the file that they are reported in'
        )
    return settings


def _parsed(text: str) -> Any:
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        raise StrettoError(f"{ENVIRONMENT}: not JSON: {error}") from error
