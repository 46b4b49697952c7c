"""What docs/published.md says about differences from the published figures, each explanation in a smaller cell.

Where ours is outside 0.7 to 1.5 times the published figure, or the order differs, the page names a cause. Here it
is taken away, or made larger, and the figure has to follow. Cells are a fraction of the published sizes, so that their
figures are near the page's and not the same.
"""

from __future__ import annotations

import copy
import tomllib
from typing import Any

import pytest

from studies import published

Tree = dict[str, Any]
SYNCHRONOUS = "synchronous (veRL)"


def scenario(name: str, variant: str = "", *, part: int, steps: int, warmup: int) -> Tree:
    """A published scenario, or a variant of it, with one `part`-th of the workers, GPUs, prompts and rows."""
    tree = tomllib.loads((published.SCENARIOS / f"{name}.toml").read_text("utf-8"))
    tree = copy.deepcopy(dict(published.variants(tree))[variant])
    tree["run"] |= {"steps": steps, "warmup": warmup}
    tree["workload"]["rows"] //= part
    for table in (tree, *tree["schedule"]):
        if "cluster" in table:
            sizes = {k: v // part for k, v in table["cluster"].items() if k in ("workers", "trainer_gpus")}
            table["cluster"] = table["cluster"] | sizes  # a new one: variants share theirs
        if "prompts" in table:
            table["prompts"] //= part
    return tree


def figures(tree: Tree, name: str) -> dict[str, Any]:
    """Of one of the scenario's schedules."""
    chosen = [table for table in tree["schedule"] if table["name"] == name]
    found = published.simulate_cell(
        {k: v for k, v in tree.items() if k != "published"} | {"schedule": chosen}
    )
    assert "missing" not in found, found
    return found


def speedups(tree: Tree, *names: str, baseline: str = SYNCHRONOUS) -> list[float]:
    """Of these schedules in useful tokens per second over the baseline."""
    base = figures(tree, baseline)
    found = [published.ratio_of(figures(tree, name), base) for name in names]
    return [ratio for ratio in found if ratio is not None]


class TestRhymeRL:
    EQUAL, TWO_TIER, DRAFTS = (
        f"HistoPipe, {form}" for form in ("equal bands", "two-tier linear", "two-tier, drafts")
    )
    FAST = "a trainer four times as fast"
    EXACT = "likewise, and lengths are known exactly, memory is plenty"

    def speedups(self, variant: str, *names: str) -> list[float]:
        return speedups(scenario("rhymerl", variant, part=4, steps=8, warmup=3), *names)

    def test_the_order_of_the_forms_and_that_the_trainer_holds_them_back(self) -> None:
        """Published: 1.43x, 1.56x, 2.34x."""
        slow, fast = (self.speedups(v, self.EQUAL, self.TWO_TIER, self.DRAFTS) for v in ("", self.FAST))
        for equal, two_tier, drafts in (slow, fast):
            assert equal < two_tier < drafts
        assert all(b > 1.1 * a for a, b in zip(slow, fast, strict=True))
        assert fast[2] > 1.5 * slow[2], "with drafts it waits for nothing else"

    def test_equal_bands_lose_by_reading_kv_by_memory_and_by_wrong_predictions(self) -> None:
        """Published: 1.43x, ours 0.88x."""
        (fast,), (exact,) = (self.speedups(variant, self.EQUAL) for variant in (self.FAST, self.EXACT))
        assert exact > 1.2 * fast
        assert exact > 1.0


class TestRollPacker:
    def test_it_gains_in_responses_and_with_the_share_of_rollout(self) -> None:
        """Published for 32b-32k, as ratios of step times: 2.21x; ours 1.43x in tokens, 1.70x in responses."""
        tokens: list[float] = []
        responses: list[float] = []
        for variant in ("", "no training: rollout is all of the step"):
            tree = scenario("rollpacker-32b-32k", variant, part=8, steps=10, warmup=2)
            base, found = (figures(tree, name) for name in (SYNCHRONOUS, "tail batching"))
            tokens += [published.ratio_of(found, base) or 0.0]
            responses += [published.responses_ratio(found, base)]
        assert responses[0] > tokens[0] > 1.0
        assert responses[1] > responses[0] + 0.1


class TestSeer:
    def test_dividing_costs_the_kv_that_is_computed_again_and_pays_where_memory_is_short(self) -> None:
        """Published: up to 1.62x; ours 0.82x, 1.17x with a pool for K/V, 1.39x with less memory too."""
        variants = (
            "",
            "K/V comes from a pool: nothing is computed again",
            "K/V comes from a pool; a third of the memory",
        )
        again, pool, short = (
            speedups(scenario("seer", variant, part=8, steps=3, warmup=1), "divided, longest group first")[0]
            for variant in variants
        )
        assert again < 1.0 < pool < short


class TestSortedRL:
    REDRAWN, REFRESH, PARTIAL = "sorted on-policy, redrawn", "sorted on-policy, refresh", "sorted partial"

    def scenario(self, variant: str = "") -> Tree:
        """An eighth of the slots, and of what a step does at once: the same share of each step is fixed cost."""
        tree = scenario("sortedrl", variant, part=8, steps=16, warmup=0)
        tree["cluster"] |= {"workers": 1, "slots": tree["cluster"]["slots"] // 8}
        for cost in ("per_token", "per_prefill"):
            tree["cost"][cost] *= 8
        return tree

    def speedups(self, variant: str, *names: str) -> list[float]:
        return speedups(self.scenario(variant), *names, baseline="synchronous")

    def test_order(self) -> None:
        """Required: partial over synchronous, refresh over redrawing."""
        redrawn, refresh, partial = self.speedups("", self.REDRAWN, self.REFRESH, self.PARTIAL)
        assert redrawn < refresh < 1.0 < partial

    def test_on_policy_gains_with_larger_updates(self) -> None:
        """Published: 1.08x; ours 0.76x with updates of 128, above synchronous with 512."""
        small, large = (self.speedups(v, self.REFRESH)[0] for v in ("", "an update takes 512 responses"))
        assert small < 1.076 < large

    def test_partial_gains_less_where_kv_is_computed_again(self) -> None:
        """Published: 1.39x; ours 2.60x, and 1.16x where it is."""
        free, paid = (
            self.speedups(v, self.PARTIAL)[0] for v in ("", "computing K/V anew costs as on one H100")
        )
        assert paid < 1.395 < free

    @pytest.mark.parametrize(("name", "most"), [(REDRAWN, 0.0581), (PARTIAL, 0.0337)])
    def test_what_is_idle_is_the_drain(self, name: str, most: float) -> None:
        """Published: 5.8 % and 3.4 %; ours 10 % and 12 %."""
        whole, without = (
            figures(self.scenario(v), name)["slot_idle"]
            for v in ("", "without the drain: the first 48 of 64 updates")
        )
        assert abs(without) < 0.001 < most < whole


class TestStreamRL:
    def test_it_is_the_asynchronous_form_that_gets_to_the_published_range(self) -> None:
        """Published: 1.30x to 2.66x; ours 1.15x, being synchronous, with a quarter of the GPUs for training."""
        tree = scenario("streamrl", part=1, steps=8, warmup=3)
        tree["cost"]["sync"] = 0.0
        for table in tree["schedule"]:
            if "cluster" in table:
                table["cluster"]["trainer_gpus"] = 32
        base, stream, asynchronous = (
            figures(tree, name) for name in (SYNCHRONOUS, "StreamRL", "async, eta 1")
        )
        assert 1.0 < published.responses_ratio(stream, base) < 1.30
        assert published.responses_ratio(asynchronous, base) > 1.30
