"""The live view on a terminal: where the run stands, how it is doing, and where its time goes."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import Any, TextIO

from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.live import Live
from rich.measure import Measurement
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from stretto.config import Config
from stretto.observe.progress import (
    Eta,
    by_source,
    drafts_gave,
    drafts_right,
    duration,
    evaluation_text,
    headline,
    number,
    time_split,
)

RECENT = 5  # steps in the table
CURVE = 400  # rewards kept for the curve
COLOURS = {"rollout": "cyan", "reward": "yellow", "update": "magenta", "sync": "blue"}
BLOCKS = "▁▂▃▄▅▆▇█"


class LiveReporter:
    """A view that is redrawn in place; messages and evaluations scroll above it. The last state stays."""

    def __init__(self, stream: TextIO, *, width: int | None = None) -> None:
        self.console = Console(file=stream, width=width, highlight=False)
        self._total = 0
        self._made = 0
        self._rollout = (0, 0, 0)
        self._eta = Eta()
        # Replaced, never changed: another thread draws them.
        self._steps: tuple[Mapping[str, Any], ...] = ()
        self._rewards: tuple[float, ...] = ()
        self._live = Live(
            console=self.console, get_renderable=self.render, refresh_per_second=4, transient=False
        )

    def start(self, config: Config, total_steps: int, run: str = "") -> None:
        self._total = total_steps
        self.console.print(Text(headline(config, total_steps, run), style="bold"))
        self._live.start()

    def rollout(self, done: int, total: int, tokens: int) -> None:
        self._rollout = (done, total, tokens)
        self._live.start()  # an evaluation by itself has no `start`

    def step(self, metrics: Mapping[str, Any]) -> None:
        self._made = int(metrics["step"])
        self._eta.add(metrics)
        self._rollout = (0, 0, 0)
        self._steps = (*self._steps, dict(metrics))[-RECENT:]
        reward = metrics.get("reward/mean")
        if reward is not None and reward == reward:
            self._rewards = (*self._rewards, float(reward))[-CURVE:]
        self._live.refresh()

    def evaluation(self, name: str, metrics: Mapping[str, Any]) -> None:
        self.console.print(Text.assemble((f"evaluation {name}  ", "green"), evaluation_text(metrics)))

    def message(self, text: str) -> None:
        self.console.print(Text(text, style="yellow"))

    def close(self) -> None:
        self._rollout = (0, 0, 0)
        self._live.stop()

    # ---- drawing ------------------------------------------------------------------------------------------

    def render(self) -> RenderableType:
        """The whole view, drawn for whatever width the terminal has by now."""
        parts: list[RenderableType] = [self._bars()]
        if self._steps:
            parts += [Text(), self._figures(), Text(), self._recent()]
        return Group(*parts)

    def _bars(self) -> Table:
        grid = Table.grid(padding=(0, 1))
        grid.add_column(style="dim", no_wrap=True, min_width=8)
        grid.add_column(no_wrap=True, justify="right", min_width=7)
        grid.add_column(ratio=1, max_width=40)
        grid.add_column(no_wrap=True, style="dim", overflow="ellipsis")
        if self._total:
            left = self._total - self._made
            eta = f"eta {duration(self._eta.seconds(left))}" if left > 0 else "done"
            bar = ProgressBar(total=self._total, completed=self._made)
            grid.add_row("step", f"{self._made}/{self._total}", bar, eta)
        done, total, tokens = self._rollout
        if total:
            bar = ProgressBar(total=total, completed=min(done, total), complete_style="cyan")
            grid.add_row("rollout", f"{done}/{total}", bar, f"{tokens:,} tokens")
        return grid

    def _figures(self) -> Table:
        last = self._steps[-1]
        grid = Table.grid(padding=(0, 1))
        grid.add_column(style="dim", no_wrap=True, min_width=8)
        grid.add_column(no_wrap=True, justify="right", min_width=7)
        grid.add_column(no_wrap=True, overflow="ellipsis")
        grid.add_row("reward", number(last, "reward/mean", ".3f"), Sparkline(self._rewards))
        grid.add_row("length", number(last, "response_length/mean", ".0f"), _lengths(last))
        grid.add_row(
            "tokens/s",
            number(last, "throughput/useful_tokens_per_s", ",.0f"),
            Text(f"slots idle {number(last, 'rollout/bubble_ratio', '.0%')}", style="dim"),
        )
        if last.get("spec/drafted"):
            grid.add_row("drafts", drafts_right(last), _drafts(last))
        grid.add_row("time", f"{number(last, 'time/total', '.1f')} s", TimeSplit(time_split(last)))
        return grid

    def _recent(self) -> Table:
        table = Table(box=None, padding=(0, 2, 0, 0), header_style="dim", pad_edge=False)
        columns = (
            ("step", "step", "d"),
            ("reward", "reward/mean", ".3f"),
            ("length", "response_length/mean", ".0f"),
            ("p99", "response_length/p99", ".0f"),
            ("tokens/s", "throughput/useful_tokens_per_s", ",.0f"),
            ("seconds", "time/total", ".1f"),
        )
        fitting = columns[: max(2, self.console.width // 11)]
        for title, _, _ in fitting:
            table.add_column(title, justify="right", no_wrap=True)
        for step in self._steps:
            table.add_row(*(number(step, key, spec) for _, key, spec in fitting))
        return table


def _lengths(metrics: Mapping[str, Any]) -> Text:
    shown = ((name, number(metrics, f"response_length/{name}", ".0f")) for name in ("p50", "p99", "max"))
    return Text("  ".join(f"{name} {value}" for name, value in shown), style="dim")


def _drafts(metrics: Mapping[str, Any]) -> Text:
    """Behind the share of drafted tokens that was right: what they gave, and which sources they came from."""
    sources = "  ".join(f"{name} {share:.0%}" for name, share in by_source(metrics).items())
    return Text(f"{drafts_gave(metrics)}  {sources}".rstrip(), style="dim")


class Sparkline:
    """A curve one line high, as wide as there is room; the newest value is at its right end."""

    MAX_WIDTH = 48

    def __init__(self, values: Sequence[float]) -> None:
        self.values = values

    def __rich_measure__(self, console: Console, options: ConsoleOptions) -> Measurement:
        return Measurement(1, min(options.max_width, self.MAX_WIDTH))

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        width = max(1, min(options.max_width, self.MAX_WIDTH))
        yield Text(sparkline(self.values, width), style="green", no_wrap=True)


def sparkline(values: Sequence[float], width: int) -> str:
    """The values as blocks, lowest to highest; neighbours are averaged where there are more than `width`."""
    if not values:
        return ""
    count = min(width, len(values))
    edges = [round(i * len(values) / count) for i in range(count + 1)]
    means = [sum(values[a:b]) / (b - a) for a, b in itertools.pairwise(edges)]
    low, high = min(means), max(means)
    if high == low:
        return BLOCKS[3] * count
    return "".join(BLOCKS[round((mean - low) / (high - low) * (len(BLOCKS) - 1))] for mean in means)


class TimeSplit:
    """Where a step's time went: a bar of coloured parts, and their shares in words."""

    BAR = 20  # cells
    WIDEST = 72  # cells, bar and words

    def __init__(self, shares: Mapping[str, float]) -> None:
        self.shares = shares

    def __rich_measure__(self, console: Console, options: ConsoleOptions) -> Measurement:
        return Measurement(1, min(options.max_width, self.WIDEST))

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        words = Text("  ").join(
            Text(f"{name} {share:.0%}", style=COLOURS[name]) for name, share in self.shares.items()
        )
        bar = Text()
        for name, cells in cells_of(self.shares, self.BAR).items():
            bar.append("━" * cells, style=COLOURS[name])
        line = Text.assemble(bar, " ", words) if options.max_width > self.BAR + 1 + len(words) else words
        line.no_wrap, line.overflow = True, "ellipsis"
        yield line


def cells_of(shares: Mapping[str, float], width: int) -> dict[str, int]:
    """Whole cells for each share, `width` in all: the largest remainders are rounded up."""
    cells = {name: int(share * width) for name, share in shares.items()}
    by_remainder = sorted(shares, key=lambda name: shares[name] * width - cells[name], reverse=True)
    for name in by_remainder[: max(0, width - sum(cells.values()))] if shares else []:
        cells[name] += 1
    return cells
