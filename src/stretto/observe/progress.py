"""What a person, or a program, sees of a run while it goes on.

A terminal gets a live view, anything else one line per step, `--json` one object per line.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from typing import Any, Protocol, TextIO

from stretto.config import Config
from stretto.metrics_file import plain

TIME_PARTS = ("rollout", "reward", "update", "sync")


class Reporter(Protocol):
    """Is told what happens, in this order: `start`, anything, `close`. Never changes the run."""

    def start(self, config: Config, total_steps: int, run: str = "") -> None:
        """The run folder `run` begins, or goes on, towards optimiser step `total_steps`."""

    def rollout(self, done: int, total: int, tokens: int) -> None:
        """Within a step: responses finished of those it needs, and tokens generated so far. Cheap to call often."""

    def step(self, metrics: Mapping[str, Any]) -> None:
        """An optimiser step is made; keys as in metrics.jsonl."""

    def evaluation(self, name: str, metrics: Mapping[str, Any]) -> None:
        """Held-out rows were evaluated; keys as in metrics.jsonl: `eval/` and what `evaluation_metrics` gives."""

    def message(self, text: str) -> None:
        """Something that a person should read."""

    def close(self) -> None:
        """The end, also after an error."""


def open_reporter(*, as_json: bool = False, stream: TextIO | None = None) -> Reporter:
    """The reporter that suits `stream` (None: standard output)."""
    stream = stream or sys.stdout
    if as_json:
        return JsonReporter(stream)
    if stream.isatty():
        from stretto.observe.live import LiveReporter

        return LiveReporter(stream)
    return PlainReporter(stream)


class SilentReporter:
    """Says nothing."""

    def start(self, config: Config, total_steps: int, run: str = "") -> None: ...

    def rollout(self, done: int, total: int, tokens: int) -> None: ...

    def step(self, metrics: Mapping[str, Any]) -> None: ...

    def evaluation(self, name: str, metrics: Mapping[str, Any]) -> None: ...

    def message(self, text: str) -> None: ...

    def close(self) -> None: ...


class JsonReporter:
    """One JSON object per line, each with its `event`: start, step, evaluation, message, end."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def start(self, config: Config, total_steps: int, run: str = "") -> None:
        self._line("start", {"run": run, "steps": total_steps, "config": config.model_dump(mode="json")})

    def rollout(self, done: int, total: int, tokens: int) -> None:
        """Left out: a program reads the steps."""

    def step(self, metrics: Mapping[str, Any]) -> None:
        self._line("step", metrics)

    def evaluation(self, name: str, metrics: Mapping[str, Any]) -> None:
        self._line("evaluation", {"name": name, **metrics})

    def message(self, text: str) -> None:
        self._line("message", {"text": text})

    def close(self) -> None:
        self._line("end", {})

    def _line(self, event: str, content: Mapping[str, Any]) -> None:
        print(json.dumps({"event": event, **plain(content)}), file=self._stream, flush=True)


class PlainReporter:
    """One tidy line per step, for files and pipes."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._total = 0
        self._eta = Eta()

    def start(self, config: Config, total_steps: int, run: str = "") -> None:
        self._total = total_steps
        self._say(headline(config, total_steps, run))

    def rollout(self, done: int, total: int, tokens: int) -> None:
        """Left out: a line per step is enough."""

    def step(self, metrics: Mapping[str, Any]) -> None:
        self._eta.add(metrics)
        step, total = metrics["step"], self._total
        drafted, failed = drafts(metrics), without_reward(metrics)
        split = "  ".join(f"{name} {share:.0%}" for name, share in time_split(metrics).items())
        self._say(
            f"step {step:>{len(str(total))}}/{total}  reward {number(metrics, 'reward/mean', '.3f')}  "
            f"{f'({failed} responses without)  ' if failed else ''}"
            f"length {number(metrics, 'response_length/mean', '.0f')} "
            f"(p99 {number(metrics, 'response_length/p99', '.0f')})  "
            f"{number(metrics, 'throughput/useful_tokens_per_s', ',.0f')} tokens/s  "
            f"{drafted and f'({drafted})  '}"
            f"{number(metrics, 'time/total', '.1f')} s ({split})  eta {duration(self._eta.seconds(total - step))}"
        )

    def evaluation(self, name: str, metrics: Mapping[str, Any]) -> None:
        self._say(f"evaluation {name}: {evaluation_text(metrics)}")

    def message(self, text: str) -> None:
        self._say(text)

    def close(self) -> None:
        """Everything is said already."""

    def _say(self, text: str) -> None:
        print(text, file=self._stream, flush=True)


class Eta:
    """Seconds that the remaining steps will take, from an exponential mean of the last ones."""

    WEIGHT = 0.3  # of the newest step

    def __init__(self) -> None:
        self._mean: float | None = None

    def add(self, metrics: Mapping[str, Any]) -> None:
        """A step was made."""
        total = metrics.get("time/total")
        if total is not None:
            self._mean = total if self._mean is None else self._mean + self.WEIGHT * (total - self._mean)

    def seconds(self, steps: int) -> float | None:
        """For that many more steps; None before the first."""
        return None if self._mean is None else max(0, steps) * self._mean


def headline(config: Config, total_steps: int, run: str) -> str:
    """What is about to happen, in one line."""
    source = config.data.task or config.data.path or config.data.dataset or "own data"
    batch = f"{config.schedule.prompts} prompts x {config.schedule.samples} samples"
    steps = "1 step" if total_steps == 1 else f"{total_steps} steps"
    return " · ".join(
        part for part in (run, config.model.path, source, f"{steps} of {batch}", config.schedule.kind) if part
    )


def evaluation_text(metrics: Mapping[str, Any]) -> str:
    """Accuracy with its interval, from keys that start with `eval/`, in one line."""
    failed = without_reward(metrics, "eval/")
    return (
        f"accuracy {percent(metrics.get('eval/accuracy'))} (95% interval {percent(metrics.get('eval/accuracy/low'))} "
        f"to {percent(metrics.get('eval/accuracy/high'))}, {metrics.get('eval/prompts', 0)} prompts)  "
        f"length {number(metrics, 'eval/response_length/mean', '.0f')} "
        f"(p99 {number(metrics, 'eval/response_length/p99', '.0f')})"
        + (f"  {failed} responses without a reward" if failed else "")
    )


def without_reward(metrics: Mapping[str, Any], where: str = "") -> int:
    """Responses of a step, or of an evaluation (`eval/`), that have no usable reward."""
    return sum(int(metrics.get(f"{where}reward/{kind}", 0)) for kind in ("errors", "timeouts"))


def time_split(metrics: Mapping[str, Any]) -> dict[str, float]:
    """Shares of a step's time by part; they add up to 1 also where parts overlap."""
    seconds = {name: float(metrics.get(f"time/{name}") or 0.0) for name in TIME_PARTS}
    total = sum(seconds.values())
    return {name: value / total for name, value in seconds.items()} if total > 0 else {}


def drafts(metrics: Mapping[str, Any]) -> str:
    """What drafts brought in a step; nothing where there were none."""
    if not metrics.get("spec/drafted"):
        return ""
    return f"{drafts_right(metrics)} of drafts right, {drafts_gave(metrics)}"


def drafts_right(metrics: Mapping[str, Any]) -> str:
    """The share of drafted tokens that was right in a step."""
    count = metrics.get("spec/drafted")
    return percent(metrics["spec/accepted"] / count if count else None)


def drafts_gave(metrics: Mapping[str, Any]) -> str:
    """Tokens of a request's step, and what drafting took."""
    length = number(metrics, "spec/mean_acceptance_length", ".2f")
    return f"{length} tokens at a time, drafting {number(metrics, 'spec/time_share', '.0%')} of the rollout"


def by_source(metrics: Mapping[str, Any]) -> dict[str, float]:
    """Shares of the sources in the drafted tokens that were right, the largest first; those without any left out."""
    prefix = "spec/accepted/"
    found = {
        key.removeprefix(prefix): float(value)
        for key, value in metrics.items()
        if key.startswith(prefix) and value
    }
    total = sum(found.values())
    return {name: found[name] / total for name in sorted(found, key=lambda name: -found[name])}


def number(metrics: Mapping[str, Any], key: str, spec: str) -> str:
    """A figure as `spec` formats it, or a dash where there is none."""
    value = metrics.get(key)
    return "–" if value is None or value != value else format(value, spec)


def percent(value: float | None) -> str:
    """0.4567 as 45.7%."""
    return "–" if value is None or value != value else f"{100 * value:.1f}%"


def duration(seconds: float | None) -> str:
    """Hours, minutes and seconds, as short as they allow: 2:05:09, 1:12, 0:07."""
    if seconds is None:
        return "–"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"
