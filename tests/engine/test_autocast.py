"""Mixed precision around the engine, as a trainer that autocasts its float32 weights has it."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from stretto.engine import attention
from stretto.records import Request, SamplingParams
from tests.engine.runs import LENGTH, NOTHING, Run, make_engine
from tests.models import tiny_model


@pytest.mark.parametrize("kind", ["compiled", "torch"])
def test_float32_weights_under_autocast(kind: str) -> None:
    """Log-probs are the plain model's to bfloat16's precision; what is wrong would be far off, or raise."""
    model = tiny_model("llama", dtype=torch.float32)
    engine = make_engine(model, 4, 500)
    if kind == "torch":
        rows = attention.TorchKeyValues(2, 8, LENGTH, 2, 8, torch.float32, torch.device("cpu"))
        engine._key_values = rows
    how = SamplingParams(temperature=1.0, max_new_tokens=12)
    prompt = np.arange(1, 9)
    run = Run(engine)
    with torch.autocast("cpu", torch.bfloat16):
        run.submit(*(Request(i, 0, 0, prompt, NOTHING, 0, 1000 + i, how) for i in range(4)))
        run.finish()
    plain = tiny_model("llama", attention="sdpa", dtype=torch.float32)
    for i in range(4):
        with torch.inference_mode():
            logits = plain(torch.tensor([[*prompt.tolist(), *run.tokens[i]]])).logits[0, prompt.size - 1 : -1]
        expected = logits.log_softmax(-1).gather(-1, torch.tensor(run.tokens[i])[:, None])[:, 0]
        assert len(run.tokens[i]) == 12
        assert np.allclose(run.logprobs[i], expected.numpy(), atol=0.25)
