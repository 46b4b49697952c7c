"""Configuration in: a TOML file, a preset or a mapping, and dotted overrides on top."""

from __future__ import annotations

import copy
import re
import tomllib
from collections.abc import Callable, Mapping, Sequence
from importlib import resources
from pathlib import Path
from typing import Any

from pydantic import ValidationError
from pydantic_core import ErrorDetails

from stretto.config.checks import SOURCES
from stretto.config.idle import RATIO, USED_WITH, recomputed
from stretto.config.keys import KEYS, OPTIONAL_SECTIONS, SECTIONS, ancestors, did_you_mean, shown
from stretto.config.overrides import parse_options
from stretto.config.paths import name_in_file, resolve_paths
from stretto.config.sections import Config
from stretto.errors import StrettoError, nearest

Tree = dict[str, Any]
Place = Callable[[str], str]
"""From a dotted key to where it was set, such as "run.toml:12: " or "--steps: "."""

TABLE = re.compile(r"\s*\[\s*([^\[\]]+?)\s*\]")
ASSIGNMENT = re.compile(r"""\s*([A-Za-z0-9_.'"\s-]+?)\s*=""")


def preset_names() -> list[str]:
    """Names of the configurations that ship with the package."""
    folder = resources.files("stretto") / "presets"
    return sorted(
        entry.name.removesuffix(".toml") for entry in folder.iterdir() if entry.name.endswith(".toml")
    )


def default_source(options: Sequence[str]) -> str | Tree:
    """What lies below command-line `options` where they come without a file or preset: the demo, or, where they name a
    model or prompts of their own, nothing but defaults: what the demo sets was chosen for its model.
    """
    layer: Tree = {}
    for key, value in parse_options(options).items():
        _put(layer, key, value, lambda key: "")
    own = [("model", "path"), *(("data", key) for key in SOURCES)]
    given = [layer[name].get(key) for name, key in own if isinstance(layer.get(name), dict)]
    return {} if any(value not in (None, "none") for value in given) else "demo"


def load_config(
    source: str | Path | Mapping[str, Any] | None = None,
    overrides: Sequence[str] | Mapping[str, Any] = (),
    *,
    saved: bool = False,
) -> Config:
    """The configuration of a run.

    Args:
        source: a TOML file, the name of a preset, or a nested mapping; None is the preset "demo".
        overrides: on top of it: command-line words (`["--learner.learning-rate", "1e-5"]`), or values by
            dotted key.
        saved: the source is a run's own file: keys in it that do nothing are left out, not refused, for it may be
            of a version that took them.

    Relative paths in a file (model, tokenizer, data, held-out rows, `file.py:name`) are relative to the
    file's folder, elsewhere to the current one; in the result they are absolute.

    Raises:
        StrettoError: everything that is wrong, a line each: file and line or option, key, value, what is
            expected.
    """
    options = not isinstance(overrides, Mapping)
    changes = dict(overrides) if isinstance(overrides, Mapping) else parse_options(overrides)
    lines: dict[str, int] = {}
    if isinstance(source, Mapping):
        tree, origin = _plain(source), ""
        resolve_paths(tree, Path.cwd())
    else:
        text, origin, folder = _read(source)
        tree, lines = _parse(text, origin), key_lines(text)
        if folder is not None:
            resolve_paths(tree, folder)

    def in_source(key: str) -> str:
        line = next((lines[name] for name in ancestors(key) if name in lines), None)
        return f"{origin}:{line}: " if line else f"{origin}: " if origin else ""

    def in_overrides(key: str) -> str:
        return "--" if options else ""

    def place(key: str) -> str:
        overridden = any(name in changes for name in ancestors(key))
        return in_overrides(key) if overridden else in_source(key)

    layer: Tree = {}
    problems = _unknown(tree, in_source)
    for key, value in changes.items():
        problems += _put(layer, key, _plain(value) if isinstance(value, Mapping) else value, in_overrides)
    problems += _unknown(layer, in_overrides)
    if problems:
        raise StrettoError("\n".join(dict.fromkeys(problems)))
    resolve_paths(layer, Path.cwd())
    if saved:
        _leave_idle(tree, _merge(tree, layer))  # what was idle then may be wanted now
        _leave_ratio(tree, tree)
    _leave_source(tree, layer, saved)
    _leave_idle(tree, layer)
    _leave_ratio(tree, layer)
    return _validate(_merge(tree, layer), place)


def _leave_source(below: Tree, above: Tree, saved: bool) -> None:
    """Where `above` names another source of prompts, drop the one of `below`, and what was meant for it.

    A class of the same name in another file is another task, but for a `saved` run, whose files may have been moved.
    """
    old, new = below.get("data"), above.get("data")
    if not (isinstance(old, dict) and isinstance(new, dict)):
        return
    task = name_in_file(new.get("task"))
    if saved and task is not None and task == name_in_file(old.get("task")):
        return
    if any(new.get(key) not in (None, "none", old.get(key)) for key in SOURCES):
        for key in (*SOURCES, "args"):
            old.pop(key, None)


def _leave_idle(below: Tree, above: Tree) -> None:
    """Where `above` sets what makes keys of `below` idle, drop those: a saved run or a preset meant them for itself."""
    for key, (other, values) in USED_WITH.items():
        section, _, name = key.partition(".")
        old, new = below.get(section), above.get(section)
        if not (isinstance(old, dict) and isinstance(new, dict)):
            continue
        if new.get(other.rpartition(".")[2], values[0]) not in values:
            old.pop(name, None)


def _leave_ratio(below: Tree, above: Tree) -> None:
    """The same for keys of `learner` that are idle by where the probability ratio starts, which two keys decide."""
    new, old = above.get("learner", {}), below.get("learner")
    if not (isinstance(new, dict) and isinstance(old, dict)):
        return
    if "deterministic" in above or "old_logprobs" in new:
        both = _merge(below, above)
        how = recomputed(both.get("deterministic", True), both["learner"].get("old_logprobs", "auto"))
        for name, used in RATIO.items():
            if used != how:
                old.pop(name, None)


def _plain(mapping: Mapping[str, Any]) -> Tree:
    return {key: _plain(v) if isinstance(v, Mapping) else copy.copy(v) for key, v in mapping.items()}


def _read(source: str | Path | None) -> tuple[str, str, Path | None]:
    """(text, what to call it in messages, the folder that its paths are relative to) of a file or preset."""
    name = "demo" if source is None else str(source)
    path = Path(name)
    presets = preset_names()
    if not path.is_file() and name in presets:
        return (
            (resources.files("stretto") / "presets" / f"{name}.toml").read_text("utf-8"),
            f'preset "{name}"',
            None,
        )
    if path.is_dir():
        raise StrettoError(
            f"{name}: is a folder; expected a TOML file or a preset (stretto resume continues a run)"
        )
    try:
        return path.read_text("utf-8-sig"), name, path.resolve().parent
    except FileNotFoundError:
        near = nearest(name, [*presets, *(str(path.parent / p.name) for p in path.parent.glob("*.toml"))])
        raise StrettoError(f"{name}: no such file or preset; {near}") from None
    except (OSError, UnicodeDecodeError) as error:
        raise StrettoError(f"{name}: cannot be read: {error}") from None


def _parse(text: str, origin: str) -> Tree:
    try:
        return tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        found = re.search(r"^(.*) \(at (?:line (\d+), column \d+|end of document)\)$", str(error), re.DOTALL)
        if found is None:
            raise StrettoError(f"{origin}: not valid TOML: {error}") from None
        line = found[2] or text.count("\n") + 1
        raise StrettoError(f"{origin}:{line}: not valid TOML: {found[1]}") from None


def key_lines(text: str) -> dict[str, int]:
    """Line numbers (from 1) of the keys and tables of a TOML text, by dotted name; the first of each."""
    lines: dict[str, int] = {}
    table = ""
    for number, line in enumerate(text.splitlines(), start=1):
        if header := TABLE.match(line):
            table = _dotted(header[1])
            lines.setdefault(table, number)
        elif assignment := ASSIGNMENT.match(line):
            name = _dotted(assignment[1])
            lines.setdefault(f"{table}.{name}" if table else name, number)
    return lines


def _dotted(name: str) -> str:
    return ".".join(part.strip().strip("\"'") for part in name.split("."))


def _unknown(tree: Tree, place: Place, prefix: str = "") -> list[str]:
    """A message for each key that no section has, and each section that is not one."""
    problems: list[str] = []
    for name, value in tree.items():
        key = f"{prefix}{name}"
        if key in SECTIONS:
            if isinstance(value, dict):
                problems += _unknown(value, place, f"{key}.")
            elif not (key in OPTIONAL_SECTIONS and value in (None, "none")):
                example = next(k for k in KEYS if k.startswith(f"{key}."))
                problems.append(
                    f"{place(key)}{key} = {shown(value)}: expected a section with keys such as {example}"
                )
        elif key not in KEYS or (isinstance(value, dict) and not KEYS[key].free):
            inside = [f"{key}.{inner}" for inner in value] if isinstance(value, dict) and value else [key]
            problems += [f"{place(k)}{k}: unknown key; {did_you_mean(k)}" for k in inside]
    return problems


def _put(layer: Tree, key: str, value: Any, place: Place) -> list[str]:
    """Set a dotted key; a message if what it lies in is set to something else."""
    *sections, last = key.split(".")
    for depth, section in enumerate(sections, start=1):
        inner = layer.setdefault(section, {})
        if not isinstance(inner, dict):
            return [f"{place(key)}{key}: {'.'.join(sections[:depth])} is set to {shown(inner)} as well"]
        layer = inner
    if isinstance(value, dict) and isinstance(layer.get(last), dict):
        value = _merge(layer[last], value)
    layer[last] = value
    return []


def _merge(below: Tree, above: Tree) -> Tree:
    """Both trees, values of `above` where both have one."""
    merged = dict(below)
    for name, value in above.items():
        under = merged.get(name)
        merged[name] = _merge(under, value) if isinstance(under, dict) and isinstance(value, dict) else value
    return merged


def _validate(tree: Tree, place: Place) -> Config:
    try:
        return Config.model_validate(tree)
    except ValidationError as error:
        said = dict.fromkeys(_explain(details, place) for details in error.errors())
        raise StrettoError("\n".join(said)) from None


def _explain(details: ErrorDetails, place: Place) -> str:
    """One of pydantic's findings in our words; a check of our own speaks for itself."""
    if details["type"] == "value_error":
        return str(details["ctx"]["error"])
    # A location goes on into list positions and the branches of a union; the key ends where the table does.
    name = next(name for name in ancestors(".".join(map(str, details["loc"]))) if name in KEYS)
    key, value = KEYS[name], details["input"]
    said = f"{place(name)}{name} = {shown(value)}: expected {key.expects}"
    return f"{said}; {nearest(value, key.choices)}" if key.choices and isinstance(value, str) else said
