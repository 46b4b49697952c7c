"""What is wrong with a run on vLLM is said before anything is loaded, whether vLLM is there or not."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest

from stretto.config import load_config
from stretto.config.checks import warnings
from stretto.config.vllm import FIXED, ONLY, OWNED
from stretto.engine.vllm_arguments import check_version
from stretto.errors import StrettoError
from stretto.trainer import Trainer


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"engine.vllm.max_num_seqs": 4}, r"engine\.vllm\.max_num_seqs: this is set by engine\.max_num_seqs"),
        ({"engine.vllm": {"model": "x"}}, r"engine\.vllm\.model: this is set by model\.path"),
        ({"engine.vllm.logprobs_mode": "raw_logits"}, "cannot be chosen"),
        ({"engine.vllm.distributed_executor_backend": "ray"}, "cannot be chosen"),
        ({"engine.vllm.tensor_parallel_size": 2, "fleet.kind": "ray"}, 'use fleet.kind = "processes", or 1'),
        (
            {"engine.vllm.tensor_parallel_size": "two"},
            r"engine\.vllm\.tensor_parallel_size = \'two\': expected a whole",
        ),
        ({"engine.vllm.tensor_parallel_size": 2.0}, "at least 1"),
        ({"engine.vllm.tensor_parallel_size": 0}, "at least 1"),
        ({"engine.vllm.tensor_parallel_size": True}, "at least 1"),
        (
            {"engine.vllm.gpu_memory_utilization": "half"},
            r"engine\.vllm\.gpu_memory_utilization = 'half': expected",
        ),
        ({"engine.vllm.gpu_memory_utilization": 40}, "above 0 and at most 1"),
        ({"engine.vllm.spec_tokens": 4}, r"spec_tokens: this is set by draft\.max_nodes"),
        ({"engine.vllm.model_weights": "x"}, r"model_weights: this is set by model\.path"),
        ({"engine.vllm.stream_interval": 4}, "cannot be chosen"),
        ({"engine.vllm.hf_overrides": {"vocab_size": 7}}, "cannot be chosen"),
        (
            {"engine.vllm.load_format": "dummy"},
            r"engine\.vllm\.load_format = \'dummy\': .* weights that vLLM loads.*; choose from: auto, fast",
        ),
        ({"engine.vllm.load_format": "sharded_state"}, "those of model.path"),
        ({"engine.vllm.load_format": "safetensor"}, 'did you mean "safetensors"'),
        ({"engine.vllm.load_format": ["dummy"]}, r"load_format = \['dummy'\].*use 'auto'"),
        (
            {"engine.vllm.runner": "pooling"},
            r"engine\.vllm\.runner = 'pooling': Stretto has vLLM generate; choose from: auto",
        ),
        (
            {"engine.vllm.convert": "embed"},
            r"engine\.vllm\.convert = 'embed': .* does not; choose from: auto, none",
        ),
        ({"model.dtype": "float64"}, 'use "float32"'),
        ({"fleet.weights": "shared"}, 'use "auto"'),
        ({"reuse.kind": "prefix"}, r'use "noise" or "none"'),
    ],
)
def test_what_does_not_go_together_is_refused(changes: dict[str, Any], said: str) -> None:
    with pytest.raises(StrettoError, match=said):
        load_config("demo", {"engine.kind": "vllm", **changes})


def test_arguments_go_through_by_their_names() -> None:
    config = load_config("demo", ["--engine.kind", "vllm", "--engine.vllm.tensor_parallel_size", "2"])
    assert config.engine.vllm == {"tensor_parallel_size": 2}
    assert not OWNED.keys() & set(FIXED)


@pytest.mark.parametrize(("name", "values"), [(name, values) for name, (values, _) in ONLY.items()])
def test_values_that_leave_vllm_what_it_is_go_through(name: str, values: tuple[str, ...]) -> None:
    for value in values:
        given = load_config("demo", {"engine.kind": "vllm", f"engine.vllm.{name}": value})
        assert given.engine.vllm == {name: value}


def test_what_is_not_promised_is_said() -> None:
    said = [text for text in warnings(load_config("demo", {"engine.kind": "vllm"})) if "vllm" in text]
    assert len(said) == 1
    assert not warnings(load_config("demo"))


@pytest.mark.parametrize("version", ["0.31.4", "0.33.0", "1.0", "unknown"])
def test_other_versions_are_refused(version: str) -> None:
    with pytest.raises(StrettoError, match=r'pip install "vllm>=0\.32,<0\.33"'):
        check_version(version)


@pytest.mark.parametrize("version", ["0.32.0", "0.32.1+cpu", "0.32.0rc1"])
def test_known_versions(version: str) -> None:
    check_version(version)


@pytest.mark.skipif(importlib.util.find_spec("vllm") is not None, reason="vLLM is installed")
def test_without_vllm_it_says_how_to_get_it(tmp_path: Path) -> None:
    config = load_config("demo", {"engine.kind": "vllm", "runs": str(tmp_path), "name": "none"})
    with pytest.raises(StrettoError, match=r"pip install '\.\[vllm\]' in a clone of Stretto"):
        Trainer(config).run()
    assert not list(tmp_path.iterdir())
