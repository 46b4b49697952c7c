from __future__ import annotations

from pathlib import Path

import pytest

from stretto.errors import StrettoError
from stretto.simulate.build import cluster_of, costs_of, world_of
from stretto.simulate.scenario import load_scenario, parse_scenario

MINIMAL = """
[run]
steps = 3
[cluster]
workers = 2
slots = 4
[cost]
preset = "7b-h100"
[workload]
lognormal = [100.0, 0.5]
[[schedule]]
kind = "synchronous"
prompts = 4
samples = 2
"""


def write(folder: Path, text: str) -> Path:
    path = folder / "s.toml"
    path.write_text(text, "utf-8")
    return path


def refused(folder: Path, old: str, new: str) -> str:
    with pytest.raises(StrettoError) as caught:
        load_scenario(write(folder, MINIMAL.replace(old, new)))
    return str(caught.value).removeprefix(str(folder / "s.toml"))


def test_the_shipped_scenario_loads_and_builds() -> None:
    scenario = load_scenario(None)
    for candidate in scenario.candidates:
        world_of(scenario, candidate)


def test_a_scenario_is_read_whole(tmp_path: Path) -> None:
    scenario = load_scenario(write(tmp_path, MINIMAL))
    (candidate,) = scenario.candidates
    assert (candidate.name, candidate.steps, candidate.config.prompts) == ("synchronous", 3, 4)
    assert (scenario.cluster.workers, scenario.workload.lognormal) == (2, [100.0, 0.5])
    assert not candidate.drafts
    assert not candidate.redraw


def test_a_schedule_may_have_its_own_cluster_and_steps(tmp_path: Path) -> None:
    own = 'kind = "synchronous"\nsteps = 5\nredraw = true\ncluster = { workers = 1, trainer_gpus = 2 }'
    scenario = load_scenario(write(tmp_path, MINIMAL.replace('kind = "synchronous"', own)))
    (candidate,) = scenario.candidates
    assert (candidate.cluster.workers, candidate.cluster.slots, candidate.cluster.training_gpus) == (1, 4, 2)
    assert (candidate.steps, candidate.redraw) == (5, True)
    assert scenario.cluster.workers == 2


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ("workers = 2", "wokers = 2", ':5: cluster.wokers: unknown key; did you mean "workers"?'),
        ("slots = 4", "slots = 0", ":6: cluster.slots = 0: expected an integer of at least 1"),
        ("[cluster]", "[clutser]", ':4: clutser: unknown section; did you mean "cluster"?'),
        ('kind = "synchronous"', 'kind = "synchronus"', 'did you mean "synchronous"?'),
        ("samples = 2", "smaples = 2", ':14: schedule[0].smaples: unknown key; did you mean "samples"?'),
        ("samples = 2", 'drafts = "yes"', ':14: schedule[0].drafts = "yes": expected true or false'),
        ("samples = 2", "steps = 0", ":14: schedule[0].steps = 0: expected an integer of at least 1"),
        ("samples = 2", "cluster = { tpp = 2 }", 'schedule[0].cluster.tpp: unknown key; did you mean "tp"?'),
        ("lognormal = [100.0, 0.5]", "rows = 3", "exactly one of lognormal, histogram, trace, run"),
        ("lognormal = [100.0, 0.5]", 'lognormal = [1.0, 1.0]\ntrace = "x"', "given: lognormal and trace"),
        ("steps = 3", "steps = 1", "run.warmup = 1 leaves none of 1 steps"),
        ("workers = 2", "workers = 2\nfailures = [[5.0, 2]]", ":4: cluster.failures name worker 2"),
        ("workers = 2", "workers = 2\narrivals = [[5.0]]", "[5.0] should be [seconds, worker]"),
        ("slots = 4", "slots = 4\nshared_workers = 3", "cluster.shared_workers = 3, but there are 2 workers"),
        ("slots = 4", 'slots = 4\ntrainer = "separate"\nshared_workers = 1', "there are none; use"),
        ("[100.0, 0.5]", "[100.0]", "[100.0] should be [median, sigma]"),
        ("[100.0, 0.5]", "100.0", "workload.lognormal = 100.0: expected a list of numbers"),
        ("[run]", "[run", "not valid TOML"),
        (
            "slots = 4",
            "slots = 4\nfailures = [[nan, 0]]",
            ":7: cluster.failures = nan: expected a list of lists",
        ),
        ("slots = 4", "slots = 4\narrivals = [[inf, 0]]", "expected a list of lists of numbers, all finite"),
        ("lognormal = [100.0, 0.5]", "histogram = [[5, nan]]", "workload.histogram = "),
        (
            "lognormal = [100.0, 0.5]",
            "histogram = [[5, 0.0]]",
            ":9: workload.histogram: no lengths: all weights",
        ),
        (
            "lognormal = [100.0, 0.5]",
            "lognormal = [1.0, 21]",
            ":9: workload.lognormal: a sigma of 21 is above 20",
        ),
        ("lognormal = [100.0, 0.5]", 'trace = ""', ":10: workload.trace = "),
        (
            "slots = 4",
            "slots = 100000",
            ":6: cluster.slots = 100000: expected an integer of at least 1 and at most",
        ),
        ("workers = 2", "workers = 2\nreport_seconds = 1e-12", "report_seconds = 1e-12"),
        (
            "workers = 2\nslots = 4",
            "workers = 60000\nslots = 60000",
            ":4: cluster.workers = 60000 with slots = 60000: more",
        ),
        ("[100.0, 0.5]", "[100.0, 0.5]\nrows = 100_000_000_000", "workload.rows = 100000000000: expected"),
        ("[100.0, 0.5]", "[100.0, 0.5]\nhistory = 1_000_000", "workload.history = 1000000: expected"),
        ('"7b-h100"', '"7b-h100"\nbase = 1e-320', "cost.base = 1e-320: expected a number of at least"),
        ("steps = 3", "steps = 99999999999999999999", "run.steps = 99999999999999999999: expected"),
        ("samples = 2", 'name = ""', ':14: schedule[0].name = "": expected a text that is not empty'),
        (
            '"synchronous"',
            '"stream"\nlong_workers = 3',
            ":13: schedule[0].long_workers = 3, but cluster.workers = 2",
        ),
        (
            '"synchronous"',
            '"elastic"\nlocal_workers = 5',
            "schedule[0].local_workers = 5, but cluster.workers = 2",
        ),
        (
            '"synchronous"',
            '"histopipe"\noutlier = "none"\noutlier_factor = 2.0',
            "outlier_factor = 2.0 does nothing",
        ),
    ],
)
def test_what_is_wrong_is_said_with_its_place(tmp_path: Path, old: str, new: str, said: str) -> None:
    assert said in refused(tmp_path, old, new)


def test_a_missing_file_names_its_neighbour(tmp_path: Path) -> None:
    write(tmp_path, MINIMAL)
    with pytest.raises(StrettoError, match=r"did you mean .*s\.toml"):
        load_scenario(tmp_path / "ss.toml")


def test_two_of_one_name_and_none_at_all_are_refused() -> None:
    workload = {"lognormal": [100.0, 1.0]}
    with pytest.raises(StrettoError, match="no schedule"):
        parse_scenario({"workload": workload}, Path())
    with pytest.raises(StrettoError, match='two are called "async"'):
        parse_scenario({"workload": workload, "schedule": [{"kind": "async"}, {"kind": "async"}]}, Path())


def test_numbers_replace_parts_of_a_preset_and_all_are_needed_without_one(tmp_path: Path) -> None:
    scenario = load_scenario(
        write(tmp_path, MINIMAL.replace('"7b-h100"', '"7b-h100"\nbase = 0.5\nsync = 0.0'))
    )
    costs = costs_of(scenario.cost, scenario.cluster)
    assert (costs.step.base, costs.sync) == (0.5, 0.0)
    assert costs.step.per_context > 0
    scenario = load_scenario(write(tmp_path, MINIMAL.replace('preset = "7b-h100"', "base = 0.5")))
    with pytest.raises(StrettoError, match=r"cost\.per_token.*cost\.sync must be given"):
        costs_of(scenario.cost, scenario.cluster)


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ('"7b-h100"', '"7b-h10"', 'did you mean "7b-h100"'),
        ('"7b-h100"', '"72b-h100"', "do not fit into cluster.tp = 1"),
        (
            "slots = 4",
            "slots = 4\nfailure_every = 0.01\nrepair_seconds = 0.1",
            "use at least failure_every = 6",
        ),
        ('"7b-h100"', '"7b-h100"\nkv_tokens = 1000', "workload.max_new_tokens and prompt_tokens make"),
    ],
)
def test_what_cannot_run_is_refused_before_it_runs(tmp_path: Path, old: str, new: str, said: str) -> None:
    scenario = load_scenario(write(tmp_path, MINIMAL.replace(old, new)))
    with pytest.raises(StrettoError, match=said.replace(".", r"\.")):
        world_of(scenario, scenario.candidates[0])


def test_random_failures_are_the_seeds_and_each_is_repaired(tmp_path: Path) -> None:
    text = MINIMAL.replace("slots = 4", "slots = 4\nfailure_every = 86400.0\nrepair_seconds = 60.0")
    scenario = load_scenario(write(tmp_path, text))
    cluster = cluster_of(scenario.cluster, scenario.cost, 0)
    assert len(cluster.failures) > 10
    assert sorted((when + 60.0, worker) for when, worker in cluster.failures) == sorted(cluster.arrivals)
    assert cluster == cluster_of(scenario.cluster, scenario.cost, 0)
    assert cluster != cluster_of(scenario.cluster, scenario.cost, 1)
