"""Configuration in: files, presets and options, and what is refused."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from stretto.config import (
    Config,
    default_source,
    load_config,
    parse_options,
    preset_names,
    require_source,
    split_words,
    warnings,
)
from stretto.config.keys import KEYS, SECTIONS, sections_in_order
from stretto.config.load import key_lines
from stretto.errors import StrettoError


def refused(source: Any, overrides: Any = ()) -> str:
    with pytest.raises(StrettoError) as caught:
        load_config(source, overrides)
    return str(caught.value)


@pytest.fixture
def toml(tmp_path: Path) -> Any:
    def write(text: str, name: str = "run.toml") -> Path:
        path = tmp_path / name
        path.write_text(text, "utf-8")
        return path

    return write


# ---- what comes in --------------------------------------------------------------------------------------


def test_without_arguments_it_is_the_demo() -> None:
    config = load_config()
    assert config == load_config("demo")
    assert config.data.task == "knights"
    assert "demo" in preset_names()


@pytest.mark.parametrize(
    ("words", "source"),
    [
        ([], "demo"),
        (["--steps", "3", "--model.dtype", "float64", "--data.limit", "3"], "demo"),
        (["--data.path", "none"], "demo"),
        (["--model.path", "org/name"], {}),
        (["--data.path=rows.jsonl"], {}),
        (["--data.task", "knights"], {}),
        (["--data", '{dataset = "org/name"}'], {}),
    ],
)
def test_a_model_or_prompts_of_ones_own_do_not_lie_over_the_demo(words: Sequence[str], source: Any) -> None:
    assert default_source(words) == source


def test_every_preset_loads() -> None:
    for name in preset_names():
        require_source(load_config(name))


def test_options_lie_over_a_file(toml: Any) -> None:
    path = toml('steps = 7\n[data]\ntask = "knights"\n[learner]\nlearning_rate = 1e-5\n')
    config = load_config(path, ["--learner.learning-rate", "3e-5", "--seed=4"])
    assert (config.steps, config.learner.learning_rate, config.seed) == (7, 3e-5, 4)


@pytest.mark.parametrize(
    ("words", "key", "value"),
    [
        (["--learner.learning_rate", "1e-5"], "learner.learning_rate", 1e-5),
        (["--learner.learning-rate=1e-5"], "learner.learning_rate", 1e-5),
        (["--learner.entropy-coef", "-0.5"], "learner.entropy_coef", -0.5),
        (["--data.shuffle", "false"], "data.shuffle", False),
        (["--data.shuffle"], "data.shuffle", True),
        (["--data.shuffle", "True"], "data.shuffle", True),
        (["--data.shuffle", "--seed", "3"], "seed", 3),
        (["--data.limit", "none"], "data.limit", None),
        (["--learner.importance-cap", "None"], "learner.importance_cap", None),
        (["--name", "12"], "name", "12"),
        (["--data.path", "none"], "data.path", None),
        (["--sampling.stop", '["a", "b"]'], "sampling.stop", ["a", "b"]),
        (["--sampling.stop", "a", "--sampling.stop", "b"], "sampling.stop", ["a", "b"]),
        (["--sampling.stop", "[x"], "sampling.stop", ["[x"]),
        (["--sampling.stop=--"], "sampling.stop", ["--"]),
        (
            ["--sampling.stop-token-ids", "3", "--sampling.stop-token-ids", "4"],
            "sampling.stop_token_ids",
            [3, 4],
        ),
        (["--sampling.stop-token-ids", "[3, 4]"], "sampling.stop_token_ids", [3, 4]),
        (["--learner.betas", "[0.8, 0.9]"], "learner.betas", [0.8, 0.9]),
        (["--model.lora.target-modules", "all-linear"], "model.lora.target_modules", "all-linear"),
        (["--model.lora.target-modules", "q_proj"], "model.lora.target_modules", ["q_proj"]),
        (["--data.args.max-people", "3"], "data.args.max-people", 3),
        (["--data.args.kind", "hard"], "data.args.kind", "hard"),
        (["--data.args", "{a = 1}"], "data.args", {"a": 1}),
        (["--reward.weights", "1", "--reward.weights", "0.5"], "reward.weights", [1, 0.5]),
    ],
)
def test_options_take_the_type_of_their_key(words: Sequence[str], key: str, value: Any) -> None:
    found = parse_options(words)
    assert found[key] == value
    assert type(found[key]) is type(value)


def test_a_word_before_or_between_options_is_the_source() -> None:
    assert split_words(["a.toml", "--steps", "5"]) == (["a.toml"], ["--steps=5"])
    assert split_words(["--data.shuffle", "a.toml", "--steps=5"]) == (
        ["a.toml"],
        ["--data.shuffle=true", "--steps=5"],
    )


def test_lora_is_set_by_any_of_its_keys_and_unset_by_none(toml: Any) -> None:
    lora = load_config({}, ["--model.lora.rank", "8"]).model.lora
    assert lora is not None
    assert (lora.rank, lora.alpha) == (8, 32.0)
    path = toml("[model.lora]\nrank = 8\n")
    assert load_config(path, ["--model.lora", "none"]).model.lora is None
    assert load_config(toml('[model]\nlora = "none"\n')).model.lora is None


def test_overrides_may_be_values_nested_or_dotted() -> None:
    config = load_config(
        {"learner": {"learning_rate": 1e-5}}, {"learner": {"eps": 1e-6}, "learner.warmup_steps": 2}
    )
    assert (config.learner.learning_rate, config.learner.eps, config.learner.warmup_steps) == (1e-5, 1e-6, 2)


def test_the_given_mapping_is_left_as_it_is() -> None:
    given_mapping = {"data": {"path": "rows.jsonl"}}
    load_config(given_mapping, {"data.limit": 3})
    assert given_mapping == {"data": {"path": "rows.jsonl"}}


def test_paths_in_a_file_are_relative_to_it(
    toml: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "model").mkdir()
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    monkeypatch.chdir(elsewhere)
    path = toml(
        '[model]\npath = "model"\ntokenizer = "org/name"\n[data]\npath = "rows.jsonl"\n'
        '[reward]\nfunctions = ["exact", "mine.py:score", "package.module:score"]\n[eval]\npath = "/test.jsonl"\n'
    )
    config = load_config(path)
    assert config.model.path == str(tmp_path / "model")
    assert config.model.tokenizer == "org/name"
    assert config.data.path == str(tmp_path / "rows.jsonl")
    assert config.reward.functions == ["exact", f"{tmp_path / 'mine.py'}:score", "package.module:score"]
    assert config.eval.path == "/test.jsonl"
    assert load_config({}, ["--data.path", "rows.jsonl"]).data.path == str(elsewhere / "rows.jsonl")
    assert load_config({}, ["--model.path", "demo"]).model.path == "demo"
    assert load_config({}, ["--model.path", "./none-yet"]).model.path == str(elsewhere / "none-yet")


# ---- what is refused ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("steps = 3\nstepz = 4\n", 'run.toml:2: stepz: unknown key; did you mean "steps"?'),
        (
            "[learner]\nlearning-rate = 1\n",
            'run.toml:2: learner.learning-rate: unknown key; did you mean "learner.learning_rate"?',
        ),
        (
            "learning_rate = 1\n",
            'run.toml:1: learning_rate: unknown key; did you mean "learner.learning_rate"?',
        ),
        ("[lerner]\neps = 1\n", 'run.toml:2: lerner.eps: unknown key; did you mean "learner.eps"?'),
        (
            "[track]\nzzzz = 1\n",
            "run.toml:2: track.zzzz: unknown key; choose from: track.trackers, track.project",
        ),
        ("steps = 0\n", "run.toml:1: steps = 0: expected an integer of at least 1"),
        ("steps = 2.0\n", "run.toml:1: steps = 2.0: expected an integer of at least 1"),
        ('steps = "5"\n', 'run.toml:1: steps = "5": expected an integer of at least 1'),
        ("steps = true\n", "run.toml:1: steps = true: expected an integer of at least 1"),
        ("[data]\nshuffle = 1\n", "run.toml:2: data.shuffle = 1: expected true or false"),
        ("[data]\nlimit = -1\n", 'run.toml:2: data.limit = -1: expected an integer of at least 1, or "none"'),
        (
            "[sampling]\n\ntop_p = 1.5\n",
            "run.toml:3: sampling.top_p = 1.5: expected a number above 0 and at most 1",
        ),
        (
            "[sampling]\ntemperature = nan\n",
            "run.toml:2: sampling.temperature = nan: expected a number of at least 0",
        ),
        ('[sampling]\nstop = "a"\n', 'run.toml:2: sampling.stop = "a": expected a list of texts'),
        ("[sampling]\nstop = [\n  1,\n]\n", "run.toml:2: sampling.stop = 1: expected a list of texts"),
        ("[learner]\nbetas = [0.9]\n", "run.toml:2: learner.betas = [0.9]: expected a list of 2 numbers"),
        (
            '[model]\ndtype = "flaot32"\n',
            'run.toml:2: model.dtype = "flaot32": expected "float32" or "bfloat16" or "float64"; '
            'did you mean "float32"?',
        ),
        ("data = 3\n", "run.toml:1: data = 3: expected a section with keys such as data.task"),
        (
            'name = "a/b"\n',
            'run.toml:1: name = "a/b": expected a text of letters, digits and . _ + -, or "none"',
        ),
        ("steps = \n", "run.toml:1: not valid TOML: Invalid value"),
        ("[data\n", "run.toml:1: not valid TOML"),
        ('name = "a', "run.toml:1: not valid TOML: Unterminated string"),
        ("steps = 1\nsteps = 2\n", "run.toml:2: not valid TOML"),
    ],
)
def test_a_file_is_refused_with_its_line(toml: Any, text: str, message: str) -> None:
    path = toml(text)
    assert message in refused(path).replace(str(path), "run.toml")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            ["--learner.learning-rat", "1"],
            '--learner.learning_rat: unknown key; did you mean "learner.learning_rate"?',
        ),
        (["--every", "1"], '--every: unknown key; did you mean "checkpoint.every" or "eval.every"?'),
        (["--steps", "many"], '--steps = "many": expected an integer of at least 1'),
        (["--steps"], "--steps: expects a value: an integer of at least 1"),
        (
            ["--learner.betas", "[1.0, 0.9]"],
            "--learner.betas = 1.0: expected a list of 2 numbers of at least 0 and below 1",
        ),
        (["--sampling.stop", "", "--sampling.stop", "a"], "sampling.stop has an empty text"),
        (["--steps", "--seed", "1"], "--steps: expects a value: an integer of at least 1"),
        (["--steps", "3", "--steps", "4"], "--steps: given 2 times (3, 4); give it once"),
        (["12"], '"12": expected an option such as --steps 20'),
        (["--data", "x"], '--data = "x": expected a section with keys such as data.task'),
        (["--model.lora", "3"], "--model.lora = 3: expected a section with keys such as model.lora.rank"),
        (["--steps.x", "3"], "--steps.x: unknown key"),
        (
            ["--model.lora", "none", "--model.lora.rank", "3"],
            '--model.lora.rank: model.lora is set to "none" as well',
        ),
        (["--track.trackers", "wandbb"], 'did you mean "wandb"?'),
        (["--draft.sources", "[]"], "with a length of at least 1"),
        (["--draft.step_ms", "[1.0]"], "a list of numbers above 0 with a length of at least 2"),
        (["--draft.step_ms", "[0.0, 1.0]"], "--draft.step_ms = 0.0: expected a list of numbers above 0"),
    ],
)
def test_an_option_is_refused_by_its_name(words: Sequence[str], message: str) -> None:
    assert message in refused({}, words)


def test_everything_wrong_is_said_at_once() -> None:
    said = refused({}, ["--steps", "0", "--seed", "x", "--sampling.top_k", "-1"]).splitlines()
    assert len(said) == 3


@pytest.mark.parametrize(
    ("overrides", "messages"),
    [
        (
            {"data.task": "knights", "data.path": "x"},
            ["data.task and data.path are set", 'data.task = "none"'],
        ),
        ({"data.system_prompt": "x", "data.chat_template": False}, ["data.chat_template = false"]),
        (
            {"reward.functions": ["exact", "math"], "reward.weights": [1.0]},
            ["reward.weights has 1", "2 reward.functions"],
        ),
        ({"fleet.weights": "shared", "schedule.kind": "async"}, ["fleet.weights", "overlap", '"copy"']),
        ({"draft.budget": "fixed", "draft.nodes": 40}, ["draft.nodes = 40", "draft.max_nodes = 16"]),
        ({"draft.sources": ["prompt", "history", "prompt"]}, ['draft.sources names "prompt" more than once']),
        ({"draft.step_ms": [5.0, 6.0, 4.0]}, ["a step of 4 tokens takes 4.0 ms", "5.0 ms"]),
        ({"history.max_gib": 1e-12}, ["history.max_gib = 1e-12: expected a number of at least 0.001"]),
        ({"history.warm_from": ""}, ['history.warm_from = ""', "with a length of at least 1"]),
        ({"sampling.temperature": 0}, ["sampling.temperature = 0", "eval.temperature"]),
        ({"schedule.samples": 1}, ["schedule.samples = 1", "2 or more"]),
        ({"schedule.kind": "async", "schedule.max_concurrent": 7}, ["max_concurrent = 7", "at least 8"]),
        ({"learner.old_logprobs": "behaviour"}, ["deterministic = true", '"recompute"']),
        ({"sampling.max_new_tokens": 100, "engine.max_model_len": 100}, ["at most 99"]),
        (
            {"engine.max_model_len": 100, "sampling.max_new_tokens": 60, "data.max_prompt_tokens": 41},
            ["data.max_prompt_tokens = 41", "together exceed"],
        ),
    ],
)
def test_keys_that_contradict_each_other_are_refused(
    overrides: dict[str, Any], messages: Sequence[str]
) -> None:
    said = refused({}, overrides)
    for message in messages:
        assert message in said
    del overrides[list(overrides)[-1]]
    load_config({}, overrides)  # the others alone are legal


def test_another_source_of_prompts_takes_the_place_of_the_one_below(toml: Any) -> None:
    file = toml('[data]\ntask = "knights"\nargs = { train = 5 }\nlimit = 3\n')
    config = load_config(file, ["--data.path", "rows.jsonl"])
    assert (config.data.task, config.data.path, config.data.args) == (
        None,
        str(Path("rows.jsonl").absolute()),
        {},
    )
    assert config.data.limit == 3
    assert load_config(file, ["--data.task", "knights"]).data.args == {"train": 5}
    mine = toml('[data]\ntask = "/x/a.py:Task"\nargs = { size = 5 }\n')
    assert load_config(mine, ["--data.task", "/x/a.py:Task"]).data.args == {"size": 5}
    assert load_config(mine, ["--data.task", "/y/b.py:Task"]).data.args == {}  # another task of that name


def test_a_file_may_begin_with_a_byte_order_mark(tmp_path: Path) -> None:
    (tmp_path / "run.toml").write_bytes(b"\xef\xbb\xbfsteps = 7\n")
    assert load_config(tmp_path / "run.toml").steps == 7


def test_a_missing_file_names_the_nearest(toml: Any, tmp_path: Path) -> None:
    path = toml("steps = 1\n", "gsm8k.toml")
    assert refused(tmp_path / "gsm8.toml").endswith(f'no such file or preset; did you mean "{path}"?')
    assert 'did you mean "demo"?' in refused("demoo")
    assert "is a folder" in refused(tmp_path)


def test_a_file_that_is_no_text_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "run.toml"
    path.write_bytes(b"\xff\xfe")
    assert "cannot be read" in refused(path)


def test_a_run_needs_prompts() -> None:
    with pytest.raises(StrettoError, match=r"no prompts: set one of data\.task"):
        require_source(Config())


def test_what_may_surprise_is_said() -> None:
    assert warnings(load_config()) == []
    truncated = load_config({}, {"sampling.top_k": 5, "sampling.top_p": 0.9})
    assert "sampling.top_k = 5, sampling.top_p = 0.9" in warnings(truncated)[0]
    assert "which weights sample a token" in warnings(load_config({}, {"schedule.kind": "async"}))[0]
    assert (
        "the peak is never reached"
        in warnings(load_config({}, {"learner.lr_schedule": "linear", "learner.warmup_steps": 100}))[0]
    )


def test_lines_of_keys_are_found() -> None:
    text = "a = 1\n[x]\n# b = 2\nb = 2\n[ x . y ]\n'c' = 3\nd.e = 4\n"
    assert key_lines(text) == {"a": 1, "x": 2, "x.b": 4, "x.y": 5, "x.y.c": 6, "x.y.d.e": 7}


# ---- documentation --------------------------------------------------------------------------------------


def test_every_key_is_documented() -> None:
    for name, description, keys in sections_in_order():
        assert description, name
        for key in keys:
            assert key.field.description, key.name
            assert key.expects


def test_it_is_frozen() -> None:
    with pytest.raises(ValueError, match="frozen"):
        Config().steps = 3


def test_it_needs_no_torch() -> None:
    code = (
        "import sys, stretto.config; stretto.config.load_config(); "
        "print([m for m in ('torch', 'transformers') if m in sys.modules])"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert out.stdout.strip() == "[]"


def test_sections_are_complete() -> None:
    assert {name.rpartition(".")[0] for name in KEYS} == set(SECTIONS)
