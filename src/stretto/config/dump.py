"""Configuration out: as TOML, and compared with another."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import tomli_w

from stretto.config.base import Section
from stretto.config.keys import KEYS, SECTIONS
from stretto.config.paths import resolve_paths
from stretto.config.sections import Config
from stretto.errors import StrettoError


def dump_toml(config: Config) -> str:
    """The whole configuration, defaults included, as TOML from which `load_config` gives an equal one.

    Relative paths are made absolute, since the text will lie in another folder. What is None is written as
    "none" unless that is its default.

    Raises:
        StrettoError: `data.args` or `reward.args` hold something that TOML cannot.
    """
    tree = _without_none(config.model_dump(mode="python"))
    resolve_paths(tree, Path.cwd())
    try:
        return tomli_w.dumps(tree, multiline_strings=False)
    except TypeError as error:
        raise StrettoError(f"data.args or reward.args: cannot be written to a TOML file: {error}") from None


def _without_none(tree: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    result: dict[str, Any] = {}
    for name, value in tree.items():
        key = f"{prefix}{name}"
        if value is None:
            if key in KEYS and KEYS[key].default is not None:
                result[name] = "none"
        elif key in SECTIONS and isinstance(value, Mapping):
            result[name] = _without_none(value, f"{key}.")
        else:
            result[name] = list(value) if isinstance(value, tuple) else value
    return result


def flat(config: Config) -> dict[str, Any]:
    """Values by dotted key; an unset section is one None."""
    return dict(_flat(config, ""))


def _flat(section: Section, prefix: str) -> Iterator[tuple[str, Any]]:
    for name in type(section).model_fields:
        value = getattr(section, name)
        if isinstance(value, Section):
            yield from _flat(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value


def difference(a: Config, b: Config) -> list[str]:
    """The keys whose values differ, in the order of the configuration."""
    before, after = flat(a), flat(b)
    return [key for key in dict.fromkeys((*before, *after)) if before.get(key) != after.get(key)]
