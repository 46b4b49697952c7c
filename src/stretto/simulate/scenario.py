"""A scenario: which cluster, costs and workload, and the schedules to compare. TOML in, a frozen tree out."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Annotated, Any, Literal, Self, TypeVar

from pydantic import Field, ValidationError, model_validator
from pydantic_core import ErrorDetails

from stretto.config import ScheduleConfig, idle
from stretto.config.base import Section
from stretto.config.keys import Key, shown
from stretto.errors import StrettoError, nearest

Place = Callable[[str], str]
SectionT = TypeVar("SectionT", bound=Section)
HEADER = re.compile(r"\s*(\[\[?)\s*([\w.\"'\s-]+?)\s*\]\]?\s*(?:#.*)?$")
STEPS, PLACES = 1_000_000, 1 << 22
SECONDS, SIGMA = 1e6, 20.0  # numbers beyond are slips: nothing would come of them
ASSIGNMENT = re.compile(r"""\s*([\w."'\s-]+?)\s*=""")


class RunSection(Section):
    """How long to simulate."""

    steps: int = Field(default=10, ge=1, le=STEPS)
    """Updates."""
    warmup: int = Field(default=1, ge=0)
    """Updates that the figures leave out: the first has no other before it."""
    seed: int = Field(default=0, ge=0, lt=2**63)
    """Of the workload."""


class ClusterSection(Section):
    """Where it runs."""

    workers: int = Field(default=8, ge=1, le=65536)
    """Engines."""
    slots: int = Field(default=64, ge=1, le=65536)
    """Responses at a time in each."""
    tp: int = Field(default=1, ge=1, le=65536)
    """GPUs of each."""
    trainer: Literal["separate", "colocated"] = "colocated"
    """colocated: the trainer uses the workers' GPUs, which do not generate meanwhile."""
    shared_workers: int | None = Field(default=None, ge=1)
    """colocated: so many workers, from 0, are on the trainer's GPUs; none: all."""
    trainer_gpus: int | None = Field(default=None, ge=1)
    """none: colocated: those of the shared workers; separate: as many as the workers have."""
    report_seconds: float | None = Field(default=None, ge=1e-3)
    """How often the lengths of running responses are told; none: when something happens to them."""
    arrivals: list[list[float]] = Field(default_factory=list)
    """[seconds, worker]: it comes, or comes back, then."""
    failures: list[list[float]] = Field(default_factory=list)
    """[seconds, worker]: it goes."""
    failure_every: float | None = Field(default=None, gt=0.0)
    """Mean seconds between failures of a worker, at random, for 30 days; none: no random failures."""
    repair_seconds: float = Field(default=300.0, gt=0.0)
    """After which it is back."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.workers * self.slots > PLACES:
            raise StrettoError(
                f"workers = {self.workers} with slots = {self.slots}: more than {PLACES:,} places; use fewer of either"
            )
        if self.shared_workers is not None and self.shared_workers > self.workers:
            raise StrettoError(
                f"shared_workers = {self.shared_workers}, but there are {self.workers} workers"
            )
        if self.shared_workers is not None and self.trainer == "separate":
            raise StrettoError('shared_workers: with trainer = "separate" there are none; use "colocated"')
        for name in ("arrivals", "failures"):
            _check_pairs(name, getattr(self, name), "seconds, worker")
            for _, worker in getattr(self, name):
                if worker not in range(self.workers):
                    raise StrettoError(
                        f"{name} name worker {worker:g}, but there are {self.workers} (from 0)"
                    )
        return self

    @property
    def training_gpus(self) -> int:
        """GPUs that the trainer uses."""
        return self.trainer_gpus or (self.shared or self.workers) * self.tp

    @property
    def shared(self) -> int:
        """Workers on the trainer's GPUs."""
        return 0 if self.trainer == "separate" else self.shared_workers or self.workers

    @property
    def gpus(self) -> int:
        """All together."""
        return self.workers * self.tp + max(0, self.training_gpus - self.shared * self.tp)


class CostSection(Section):
    """What things cost, in seconds: a preset, and numbers that replace parts of it."""

    preset: str | None = None
    """Model and GPU, such as "7b-h100"; none: all numbers are given."""
    base: float | None = Field(default=None, ge=1e-9, le=SECONDS)
    """Of an engine step."""
    per_token: float | None = Field(default=None, ge=0.0, le=SECONDS)
    """And for each token computed in it."""
    per_context: float | None = Field(default=None, ge=0.0, le=SECONDS)
    """And for each K/V entry read."""
    per_prefill: float | None = Field(default=None, ge=0.0, le=SECONDS)
    """And for each token prefilled."""
    train_base: float | None = Field(default=None, ge=0.0, le=SECONDS)
    """Of an update."""
    train_per_token: float | None = Field(default=None, ge=0.0, le=SECONDS)
    """And for each token trained on."""
    sync: float | None = Field(default=None, ge=0.0, le=SECONDS)
    """A worker takes new weights."""
    kv_tokens: int | None = Field(default=None, ge=1)
    """K/V entries that fit into a worker; none: the preset's, or all."""
    reward: float = Field(default=0.0, ge=0.0, le=SECONDS)
    """From a response's end to its reward, on average."""
    reward_sigma: float = Field(default=0.0, ge=0.0, le=SIGMA)
    """Of the logarithm of that time; 0: always the same."""
    agreement: float = Field(default=0.997, ge=0.0, le=1.0)
    """Share of a dropped response's tokens that is sampled again where all before were."""


class WorkloadSection(Section):
    """What is generated: exactly one of lognormal, histogram, trace, run says how long responses are."""

    lognormal: list[float] | None = None
    """[median, sigma of the logarithm]."""
    histogram: list[list[float]] | None = Field(default=None, min_length=1)
    """[tokens, weight] pairs."""
    trace: str | None = Field(default=None, min_length=1)
    """A file of lengths (.jsonl or .csv, may be gzipped), or "reasoning": the one that ships with the package."""
    run: str | None = Field(default=None, min_length=1)
    """The folder of a run, whose prompts and lengths are replayed."""
    scale: float = Field(default=1.0, gt=0.0, le=1e6)
    """Lengths are multiplied by it."""
    max_new_tokens: int = Field(default=16384, ge=1, le=2**30)
    """Longer ones are cut."""
    prompt_tokens: int = Field(default=256, ge=0, le=2**24)
    """Of every prompt."""
    rows: int = Field(default=4096, ge=1, le=2**22)
    """Prompts of an epoch."""
    prompt_share: float = Field(default=0.5, ge=0.0, le=1.0)
    """How much of the variation of (normal scores of) lengths belongs to the prompt."""
    stability: float = Field(default=1.0, ge=0.0, le=1.0)
    """How much of the prompt's part stays from visit to visit."""
    history: int = Field(default=0, ge=0, le=1000)
    """Earlier visits of every prompt, whose lengths are known and whose responses serve as drafts."""
    stuck: float = Field(default=0.0, ge=0.0, lt=1.0)
    """Share of responses that only the limit ends."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        _check_pairs("lognormal", [self.lognormal] if self.lognormal is not None else [], "median, sigma")
        _check_pairs("histogram", self.histogram or [], "tokens, weight")
        if self.lognormal is not None and self.lognormal[1] > SIGMA:
            raise StrettoError(f"lognormal: a sigma of {self.lognormal[1]:g} is above {SIGMA:g}")
        if self.histogram is not None and not sum(weight for _, weight in self.histogram) > 0:
            raise StrettoError("histogram: no lengths: all weights are 0; give one of them more")
        return self


def _check_pairs(name: str, pairs: Sequence[Sequence[float]], what: str) -> None:
    for pair in pairs:
        if len(pair) != 2 or min(pair) < 0:
            raise StrettoError(f"{name}: {list(pair)} should be [{what}], neither below 0")


class DraftsSection(Section):
    """What speculative decoding does, for schedules with `drafts = true`."""

    tokens_per_step: list[Annotated[float, Field(ge=1.0, le=1000.0)]] = Field(
        default_factory=lambda: [1.0], min_length=1
    )
    """By visit of the prompt; the last goes on."""
    nodes: float = Field(default=0.0, ge=0.0, le=1000.0)
    """Verified per response and step."""


@dataclass(frozen=True)
class Candidate:
    """A schedule to compare.

    `drafts`: speculative decoding as the scenario says. `redraw`: dropped tokens are generated again without being
    their request's draft. `cluster` and `steps` are its own where it needs others than the scenario's.
    """

    name: str
    config: ScheduleConfig
    cluster: ClusterSection
    steps: int
    drafts: bool = False
    redraw: bool = False


@dataclass(frozen=True)
class Scenario:
    """All of it; `folder` is what its relative paths are relative to."""

    run: RunSection
    cluster: ClusterSection
    cost: CostSection
    workload: WorkloadSection
    drafts: DraftsSection
    candidates: tuple[Candidate, ...]
    folder: Path


SECTIONS: dict[str, type[Section]] = {
    "run": RunSection,
    "cluster": ClusterSection,
    "cost": CostSection,
    "workload": WorkloadSection,
    "drafts": DraftsSection,
}
OWN_KEYS = {
    "name": "a text that is not empty",
    "drafts": "true or false",
    "redraw": "true or false",
    "steps": f"an integer of at least 1 and at most {STEPS}",
}
LENGTHS = ("lognormal", "histogram", "trace", "run")


def load_scenario(source: Path | None) -> Scenario:
    """The scenario in a TOML file; None: the one that ships with the package.

    Raises:
        StrettoError: everything that is wrong, a line each: file and line, key, value, what is expected.
    """
    name, folder = "the default scenario", Path.cwd()
    try:
        if source is None:
            text = (resources.files("stretto.simulate") / "scenarios" / "default.toml").read_text("utf-8")
        else:
            name, folder = str(source), source.resolve().parent
            text = source.read_text("utf-8-sig")
        tree = tomllib.loads(text)
    except (OSError, UnicodeDecodeError) as error:
        near = nearest(str(source), map(str, source.parent.glob("*.toml"))) if source is not None else ""
        raise StrettoError(f"{name}: cannot be read: {error}; {near}") from None
    except tomllib.TOMLDecodeError as error:
        raise StrettoError(f"{name}: not valid TOML: {error}") from None
    return parse_scenario(tree, folder, _places(text, name))


def parse_scenario(tree: Mapping[str, Any], folder: Path, place: Place = lambda key: "") -> Scenario:
    """A scenario from nested mappings. Raises StrettoError as `load_scenario` does."""
    problems: list[str] = []
    for name, table in tree.items():
        known = [*SECTIONS, "schedule"]
        if name not in known:
            problems.append(f"{place(name)}{name}: unknown section; {nearest(name, known)}")
        elif not isinstance(table, list if name == "schedule" else dict):
            kind = "tables, each under [[schedule]]" if name == "schedule" else "a section"
            problems.append(f"{place(name)}{name} = {shown(table)}: expected {kind}")
    if problems:
        raise StrettoError("\n".join(problems))
    found: dict[str, Any] = {
        name: _section(section, tree.get(name, {}), f"{name}.", place, problems)
        for name, section in SECTIONS.items()
    }
    run = found["run"] or RunSection()
    candidates = [
        _candidate(table, f"schedule[{i}].", tree.get("cluster", {}), run.steps, place, problems)
        for i, table in enumerate(tree.get("schedule", []))
    ]
    if not candidates:
        problems.append(f"{place('schedule')}no schedule to simulate: add a [[schedule]] table")
    names = [candidate.name for candidate in candidates if candidate is not None]
    problems += [f'schedule: two are called "{n}"' for n in dict.fromkeys(names) if names.count(n) > 1]
    given = [key for key in LENGTHS if tree.get("workload", {}).get(key) not in (None, "none")]
    if len(given) != 1:
        problems.append(
            f"{place('workload')}workload: exactly one of {', '.join(LENGTHS)} says how long responses are; given: "
            f"{' and '.join(given) or 'none'}"
        )
    fewest = min([run.steps, *(candidate.steps for candidate in candidates if candidate is not None)])
    if run.warmup >= fewest:
        problems.append(f"{place('run.warmup')}run.warmup = {run.warmup} leaves none of {fewest} steps")
    if problems:
        raise StrettoError("\n".join(dict.fromkeys(problems)))
    return Scenario(**found, candidates=tuple(c for c in candidates if c is not None), folder=folder)


def _section(
    section: type[SectionT], table: Mapping[str, Any], prefix: str, place: Place, problems: list[str]
) -> SectionT | None:
    try:
        return section.model_validate(table)
    except ValidationError as error:
        problems += [_explain(section, details, prefix, place) for details in error.errors()]
        return None


def _explain(section: type[Section], details: ErrorDetails, prefix: str, place: Place) -> str:
    if details["type"] == "value_error":  # a check of our own speaks for itself
        return f"{place(prefix)}{prefix}{details['ctx']['error']}"
    name, fields = str(details["loc"][0]), section.model_fields
    where = f"{place(prefix + name)}{prefix}{name}"
    if name not in fields:
        return f"{where}: unknown key; {nearest(name, fields)}"
    key = Key(name, fields[name])
    finite = ", all finite" if details["type"] == "finite_number" and key.list_branch else ""
    said = f"{where} = {shown(details['input'])}: expected {key.expects}{finite}"
    return (
        f"{said}; {nearest(details['input'], key.choices)}"
        if isinstance(details["input"], str) and key.choices
        else said
    )


def _candidate(
    table: Any, prefix: str, cluster: Mapping[str, Any], steps: int, place: Place, problems: list[str]
) -> Candidate | None:
    if not isinstance(table, dict):
        problems.append(f"{place('schedule')}schedule: expected tables, each under [[schedule]]")
        return None
    fields = ScheduleConfig.model_fields
    own = {key: value for key, value in table.items() if key in OWN_KEYS or key == "cluster"}
    unknown = [key for key in table if key not in own and key not in fields]
    problems += [
        f"{place(prefix + key)}{prefix}{key}: unknown key; {nearest(key, [*fields, *OWN_KEYS, 'cluster'])}"
        for key in unknown
    ]
    rest = {key: value for key, value in table.items() if key in fields}
    config = _section(ScheduleConfig, rest, prefix, place, problems)
    its = own.pop("cluster", {})
    if not isinstance(its, dict):
        problems.append(f"{place(prefix + 'cluster')}{prefix}cluster = {shown(its)}: expected a table")
        its = {}
    merged = _section(ClusterSection, {**cluster, **its}, f"{prefix}cluster.", place, problems if its else [])
    name = own.setdefault("name", config.kind if config is not None else "")
    good = {
        "name": isinstance(name, str) and (name != "" or config is None),
        "steps": type(own.setdefault("steps", steps)) is int and 1 <= own["steps"] <= STEPS,
    }
    good |= {key: isinstance(own.setdefault(key, False), bool) for key in ("drafts", "redraw")}
    wrong = [key for key, right in good.items() if not right]
    problems += [
        f"{place(prefix + key)}{prefix}{key} = {shown(own[key])}: expected {OWN_KEYS[key]}" for key in wrong
    ]
    if config is None or merged is None or wrong:
        return None
    if said := idle.too_many_workers(config, merged.workers, "cluster.workers"):
        problems.append(f"{place(prefix + said.split()[0])}{prefix}{said}")
    try:
        idle.section(config, "schedule")
    except StrettoError as error:
        problems.append(f"{place(prefix)}{prefix[:-1]}: {error}")
    return Candidate(config=config, cluster=merged, **own)


def _places(text: str, name: str) -> Place:
    """From a dotted key to "file:line: "; that of its section where the key is not there."""
    lines: dict[str, int] = {}
    prefix, tables = "", -1
    for number, line in enumerate(text.splitlines(), start=1):
        if header := HEADER.match(line):
            tables += header[1] == "[["
            prefix = f"{header[2]}[{tables}]." if header[1] == "[[" else f"{header[2]}."
            lines.setdefault(header[2], number)
            lines.setdefault(prefix, number)
        elif assignment := ASSIGNMENT.match(line):
            lines.setdefault(prefix + assignment[1].strip("\"'"), number)

    def place(key: str) -> str:
        section = key.partition(".")[0]
        line = next((lines[k] for k in (key, f"{section}.", section) if k in lines), None)
        return f"{name}:{line}: " if line else f"{name}: "

    return place
