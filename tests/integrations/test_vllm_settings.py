"""Settings of the drafter in vLLM: where they may be, and what is said of wrong ones. Without vLLM itself."""

from __future__ import annotations

import json
from typing import Any

import pytest

from stretto.errors import StrettoError
from stretto.integrations.vllm_settings import ENVIRONMENT, read_settings


def test_those_of_the_engine_go_before_those_of_the_environment() -> None:
    environment = {ENVIRONMENT: json.dumps({"window": 5, "max_gib": 1.5})}
    settings = read_settings({"stretto": {"window": 3}}, environment)
    assert (settings.window, settings.max_gib) == (3, 1.5)


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"budgt": "fixed"}, 'there is no setting "budgt"; did you mean "budget"?'),
        ({"budget": "none"}, "budget = 'none': .*'goodput'"),
        ({"window": 0}, "window = 0: .*1"),
        ({"sources": ["dropped"]}, "sources.0 = 'dropped': .*'prompt'"),
        ({"weight": "reward"}, 'weight = "reward" needs rewards'),
        ("window", "'window' is no table of settings"),
    ],
)
def test_a_wrong_one_is_named_with_its_place(wrong: Any, said: str) -> None:
    with pytest.raises(StrettoError, match=rf'^additional_config\["stretto"\]: {said}'):
        read_settings({"stretto": wrong}, {ENVIRONMENT: "{}"})
    with pytest.raises(StrettoError, match=f"^{ENVIRONMENT}: {said}"):
        read_settings({"stretto": {"max_gib": 1.0}}, {ENVIRONMENT: json.dumps(wrong)})


def test_an_environment_that_is_no_json_is_named() -> None:
    with pytest.raises(StrettoError, match=f"^{ENVIRONMENT}: not JSON: "):
        read_settings({}, {ENVIRONMENT: "{"})
