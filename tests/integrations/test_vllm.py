"""The history drafter inside vLLM (the CPU build, really run): exactness, history over lives, what it refuses."""

from __future__ import annotations

import gc
import json
import math
import os
import subprocess
import sys
import tomllib
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("vllm", reason="make test-vllm")

import torch
from scipy.stats import chi2
from transformers import AutoModelForCausalLM

from stretto.history.log import read_rollouts
from stretto.integrations import vllm_fixes
from stretto.integrations.vllm import reward
from tests.integrations.vllm_setup import answers, counters, drafter_of, make_llm, tiny_model

ERROR = 1e-4  # of each distribution test: how often it fails though everything is right
PROMPTS = [[1, 2, 3], [4, 5, 6, 7], [8, 9]]
ROOT = Path(__file__).parents[2]
SCRIPT = """
import json, sys
from vllm import LLM, SamplingParams

if __name__ == "__main__":
    llm = LLM(
        sys.argv[1],
        skip_tokenizer_init=True,
        dtype="float32",
        enforce_eager=True,
        max_model_len=96,
        max_num_seqs=8,
        speculative_config={
            "method": "custom_class",
            "model": "stretto.integrations.vllm.HistoryDrafter",
            "num_speculative_tokens": 4,
        },
    )
    assert "stretto.integrations.vllm_fixes" in sys.modules  # vLLM has found the entry point
    how = SamplingParams(temperature=1.0, max_tokens=20, detokenize=False)
    prompts = [{"prompt_token_ids": [i, 3]} for i in range(6)]
    outputs = llm.generate(prompts, how, use_tqdm=False)
    print(json.dumps([list(output.outputs[0].token_ids) for output in outputs]))
"""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("model"))


@pytest.fixture
def llms() -> Iterator[list[Any]]:
    """What is put in is let go of after the test: two engines' caches are too much at once."""
    held: list[Any] = []
    yield held
    for llm in held:
        if hasattr(runner := llm.llm_engine.model_executor.driver_worker.worker.model_runner, "drafter"):
            runner.drafter.close()
        llm.llm_engine.engine_core.shutdown()
    held.clear()
    gc.collect()


def processed(logits: torch.Tensor, temperature: float, top_p: float) -> torch.Tensor:
    """Probabilities after temperature and nucleus, as vLLM defines them: what reaches 1 - top_p from below goes."""
    p = torch.softmax(logits.double() / temperature, -1)
    ordered, order = p.sort(-1)
    ordered[ordered.cumsum(-1) <= 1.0 - top_p] = 0.0
    p = torch.zeros_like(p).scatter(-1, order, ordered)
    return p / p.sum(-1, keepdim=True)


def exact(
    model: Path, prompt: list[int], tokens: int, temperature: float, top_p: float
) -> dict[tuple[int, ...], float]:
    """The probability of every response of so many tokens."""
    reference = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float64)
    found: dict[tuple[int, ...], float] = {(): 1.0}
    with torch.inference_mode():
        for _ in range(tokens):
            longer: dict[tuple[int, ...], float] = {}
            said = list(found)
            logits = reference(torch.tensor([prompt + list(text) for text in said])).logits[:, -1]
            for text, row in zip(said, processed(logits, temperature, top_p).tolist(), strict=True):
                for token, p in enumerate(row):
                    if p > 0.0:
                        longer[*text, token] = found[text] * p
            found = longer
    return found


def assert_distributed(drawn: list[tuple[int, ...]], expected: dict[tuple[int, ...], float]) -> None:
    """Pearson's chi-square over responses, rare ones together, at the error rate ERROR."""
    counts = Counter(drawn)
    assert set(counts) <= set(expected)
    size = len(drawn)
    kept = [text for text, p in expected.items() if p * size >= 8.0]
    observed = np.array([*(counts[text] for text in kept), 0.0])
    wanted = np.array([*(expected[text] * size for text in kept), 0.0])
    observed[-1], wanted[-1] = size - observed.sum(), size - wanted.sum()
    cells = wanted > 0.0 if wanted[-1] >= 8.0 else np.arange(wanted.size) < wanted.size - 1
    statistic = float(((observed[cells] - wanted[cells]) ** 2 / wanted[cells]).sum())
    assert statistic < chi2.isf(ERROR, int(cells.sum()) - 1), (statistic, int(cells.sum()))


class TestExactness:
    @pytest.mark.parametrize(("temperature", "top_p"), [(1.0, 1.0), (0.7, 0.9)])
    def test_tokens_are_distributed_as_without_drafts(
        self, model: Path, llms: list[Any], temperature: float, top_p: float
    ) -> None:
        """All responses of three tokens to one prompt against the model's own probabilities.

        The first comes from the prompt's own pass, the others from verified drafts, which the responses before make:
        some tokens are likely, and drafted; many are drawn otherwise.
        """
        llm = make_llm(model, {"budget": "fixed"})
        llms.append(llm)
        prompt = PROMPTS[0]
        how = {"temperature": temperature, "top_p": top_p, "max_tokens": 3}
        answers(llm, [prompt] * 256, **how)  # history
        before = counters(llm)
        drawn = answers(llm, [prompt] * 8000, **how)
        after = counters(llm)
        drafted, accepted = (after[name] - before[name] for name in ("draft_tokens", "accepted_tokens"))
        assert accepted > 1000
        assert drafted - accepted > 1000
        assert_distributed(drawn, exact(model, prompt, 3, temperature, top_p))

    def test_the_test_sees_wrong_temperatures(self, model: Path, llms: list[Any]) -> None:
        """It fails if drafted tokens are verified at a temperature that happens to be in memory, here 1e-3.

        What the CPU build's own kernel finds there varies, so it is not run. Skipped where no kernel is replaced.
        """
        from vllm.utils import cpu_triton_utils
        from vllm.v1.sample import rejection_sampler

        llm = make_llm(model, {"budget": "fixed"})
        llms.append(llm)
        if cpu_triton_utils._expand_kernel_impl is not vllm_fixes.expand:
            assert vllm_fixes.expands(cpu_triton_utils._expand_kernel_impl)
            pytest.skip("this build's kernel is right")
        registered = rejection_sampler.expand_kernel

        def broken(output: torch.Tensor, *arguments: Any, **named: Any) -> None:
            output.fill_(1e-3)  # what the memory happens to hold

        registered._impl = broken
        try:
            drawn = answers(llm, [PROMPTS[0]] * 1500, temperature=0.7, top_p=0.9, max_tokens=3)
        finally:
            registered._impl = vllm_fixes.expand
        with pytest.raises(AssertionError):
            assert_distributed(drawn, exact(model, PROMPTS[0], 3, 0.7, 0.9))

    def test_greedy_is_the_same_with_and_without(self, model: Path, llms: list[Any]) -> None:
        """Second visits too, where all is drafted; some responses are longer, so rows move."""
        prompts = [[i, 12 - i, 3] for i in range(12)] * 2
        lengths = [5 + 3 * i for i in range(len(prompts))]

        def greedy(llm: Any) -> list[tuple[int, ...]]:
            from vllm import SamplingParams

            outputs = llm.generate(
                [{"prompt_token_ids": prompt} for prompt in prompts],
                [SamplingParams(temperature=0.0, max_tokens=n, detokenize=False) for n in lengths],
                use_tqdm=False,
            )
            return [tuple(output.outputs[0].token_ids) for output in outputs]

        plain = make_llm(model, max_num_seqs=8)
        llms.append(plain)
        expected = greedy(plain)
        ours = make_llm(model, {"budget": "fixed"}, max_num_seqs=8)
        llms.append(ours)
        assert greedy(ours) == expected
        before = counters(ours)
        assert greedy(ours) == expected
        after = counters(ours)
        said = sum(lengths) - len(lengths)
        assert after["accepted_tokens"] - before["accepted_tokens"] > said / 2
        assert drafter_of(ours).metrics()["spec/accepted/history"] > 0


class TestHistory:
    def test_of_a_script_is_there_after_it(self, model: Path, tmp_path: Path) -> None:
        """As users run it: found by its entry point, the engine in a process of its own, nobody calls `close`."""
        pyproject = tomllib.loads((ROOT / "pyproject.toml").read_text())
        installed = tmp_path / "site" / "stretto-0.dist-info"  # as `pip install` leaves it
        installed.mkdir(parents=True)
        (installed / "METADATA").write_text("Metadata-Version: 2.1\nName: stretto\nVersion: 0\n")
        (entry,) = pyproject["project"]["entry-points"]["vllm.general_plugins"].items()
        (installed / "entry_points.txt").write_text(f"[vllm.general_plugins]\n{entry[0]} = {entry[1]}\n")
        script, folder = tmp_path / "script.py", tmp_path / "history"
        script.write_text(SCRIPT)
        settings = json.dumps({"history": str(folder), "budget": "fixed"})
        environment = os.environ | {
            "VLLM_ENABLE_V1_MULTIPROCESSING": "1",
            "PYTHONPATH": os.pathsep.join([str(installed.parent), str(ROOT / "src")]),
            "STRETTO_VLLM": settings,
        }
        ran = subprocess.run(
            [sys.executable, script, model],
            check=False,
            env=environment,
            capture_output=True,
            text=True,
            timeout=400,
        )
        assert ran.returncode == 0, ran.stderr[-4000:]
        said = json.loads(ran.stdout.splitlines()[-1])
        (file,) = folder.glob("rank-0/*.parquet")
        kept = read_rollouts(file)
        assert sorted(r.token_ids[:20].tolist() for r in kept) == sorted(said)

    def test_is_kept_and_read(self, model: Path, llms: list[Any], tmp_path: Path) -> None:
        """A second engine drafts from its first step what the first one's responses were."""
        folder = tmp_path / "history"
        first = make_llm(model, {"budget": "fixed", "history": str(folder)})
        llms.append(first)
        said = answers(first, PROMPTS, temperature=0.0, max_tokens=20)
        drafter_of(first).close()
        (file,) = (folder / "rank-0").glob("*.parquet")
        kept = read_rollouts(file)
        # Accepted behind the limit of new tokens: in vLLM's rows, though in nobody's output.
        texts = {tuple(r.prompt.token_ids.tolist()): tuple(r.token_ids[:20].tolist()) for r in kept}
        assert texts == dict(zip(map(tuple, PROMPTS), said, strict=True))

        second = make_llm(model, {"budget": "fixed", "history": str(folder)})
        llms.append(second)
        assert answers(second, PROMPTS, temperature=0.0, max_tokens=20) == said
        assert counters(second)["accepted_tokens"] > 3 * 10

    def test_of_a_deleted_engine_is_kept(self, model: Path, llms: list[Any], tmp_path: Path) -> None:
        """As in a notebook: the second engine has what the first one said, and its place in the folder."""
        settings = {"budget": "fixed", "history": str(tmp_path / "history")}
        llm = make_llm(model, settings)
        said = answers(llm, PROMPTS, temperature=0.0, max_tokens=20)
        llm.llm_engine.engine_core.shutdown()
        del llm
        gc.collect()
        second = make_llm(model, settings)
        llms.append(second)
        assert answers(second, PROMPTS, temperature=0.0, max_tokens=20) == said
        assert counters(second)["accepted_tokens"] > 3 * 10
        assert not (tmp_path / "history" / "rank-1").exists()

    def test_of_a_damaged_file_nothing_is_taken(
        self, model: Path, llms: list[Any], tmp_path: Path, caplog: pytest.LogCaptureFixture
    ) -> None:
        folder = tmp_path / "history"
        first = make_llm(model, {"history": str(folder)})
        llms.append(first)
        answers(first, PROMPTS, temperature=0.0, max_tokens=8)
        drafter_of(first).close()
        (file,) = (folder / "rank-0").glob("*.parquet")
        file.write_bytes(file.read_bytes()[:-20])
        second = make_llm(model, {"history": str(folder)})
        llms.append(second)
        assert len(answers(second, PROMPTS, temperature=0.0, max_tokens=8)) == 3
        assert any(file.name in record.getMessage() for record in caplog.records)

    @pytest.mark.usefixtures("llms")
    def test_of_another_tokenizer_is_refused(self, model: Path, tmp_path: Path) -> None:
        folder = tmp_path / "history"
        folder.mkdir()
        (folder / "history.json").write_text(json.dumps({"format": 1, "vocabulary": 77, "tokenizer": None}))
        with pytest.raises(RuntimeError, match="another model"):
            make_llm(model, {"history": str(folder)})

    def test_rewards_are_heard_of(self, model: Path, llms: list[Any], tmp_path: Path) -> None:
        """Reported by whoever grades, they are with the responses once the prompt is visited again."""
        folder, file = tmp_path / "history", tmp_path / "rewards.jsonl"
        settings = {"history": str(folder), "rewards": str(file), "weight": "reward"}
        llm = make_llm(model, settings)
        llms.append(llm)
        said = answers(llm, [PROMPTS[0]] * 8, temperature=1.0, max_tokens=8)
        for i, tokens in enumerate(said):
            reward(file, PROMPTS[0], tokens, float(i))
        answers(llm, [PROMPTS[0]], temperature=1.0, max_tokens=8)
        drafter_of(llm).close()
        kept = [r for path in sorted((folder / "rank-0").glob("*.parquet")) for r in read_rollouts(path)]
        known = {tuple(r.token_ids[:8].tolist()): r.reward for r in kept if not math.isnan(r.reward)}
        assert known == {tokens: float(i) for i, tokens in enumerate(said)}

    def test_memory_is_bounded(self, model: Path, llms: list[Any]) -> None:
        llm = make_llm(model, {"max_gib": 1e-3})
        llms.append(llm)
        prompts = [[i % 13, i // 13 % 13, i // 169] for i in range(500)]
        answers(llm, prompts, temperature=1.0, max_tokens=80)
        answers(llm, prompts, temperature=1.0, max_tokens=2)  # what ended at no stop token is history now
        found = drafter_of(llm).metrics()
        assert found["spec/index/bytes"] <= 1.1 * 1e-3 * 2**30  # what is in use may exceed it
        assert found["spec/index/dropped_prompts"] > 0


@pytest.mark.usefixtures("llms")
def test_a_wrong_setting_is_refused_with_the_nearest(model: Path) -> None:
    with pytest.raises(RuntimeError, match='there is no setting "windw"; did you mean "window"'):
        make_llm(model, {"windw": 3})


def test_a_preempted_request_is_the_same_one_when_it_comes_back(model: Path, llms: list[Any]) -> None:
    """A cache with room for a third of the requests: preempted ones are found again, and nothing changes."""
    prompts = [[i % 13, 2, 3] for i in range(24)]
    plain = make_llm(model)
    llms.append(plain)
    expected = answers(plain, prompts, temperature=0.0, max_tokens=90)
    small = make_llm(model, {"budget": "fixed"}, num_gpu_blocks_override=20, block_size=32)
    llms.append(small)
    for _ in range(2):
        assert answers(small, prompts, temperature=0.0, max_tokens=90) == expected
    assert next(m.value for m in small.get_metrics() if m.name == "vllm:num_preemptions") > 0
    answers(small, [[12, 12]], temperature=0.0, max_tokens=1)
    index = drafter_of(small).metrics()
    assert index["spec/index/prompts"] <= 13 + 1  # no prompt that ends in the middle of a response
