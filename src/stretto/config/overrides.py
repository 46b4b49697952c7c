"""Dotted command-line options: `--learner.learning-rate 1e-5`, `--data.shuffle=false`."""

from __future__ import annotations

import tomllib
from collections.abc import Sequence
from typing import Any, Literal, get_args, get_origin

from stretto.config.keys import Key, find
from stretto.errors import StrettoError


def split_words(words: Sequence[str]) -> tuple[list[str], list[str]]:
    """The words that are neither an option nor an option's value, and the options, each as `--key=text`.

    An option's value follows after "=" or as the next word; a value that starts with "--" needs the "=". A
    truth value alone means true.

    Raises:
        StrettoError: an option without its value.
    """
    plain: list[str] = []
    options: list[str] = []
    rest = list(words)
    while rest:
        word = rest.pop(0)
        if not word.startswith("--"):
            plain.append(word)
            continue
        name, equals, text = word.removeprefix("--").partition("=")
        name = name.replace("-", "_") if not _is_free(name) else name
        options.append(f"--{name}={text if equals else _next_value(find(name), name, rest)}")
    return plain, options


def parse_options(words: Sequence[str]) -> dict[str, Any]:
    """Options as values by dotted key. Lists: in TOML, or the option repeated. "none" unsets what may be unset.

    Raises:
        StrettoError: a word that is no option, an option without its value, or given twice.
    """
    plain, options = split_words(words)
    if plain:
        raise StrettoError(f'"{plain[0]}": expected an option such as --steps 20')
    given: dict[str, list[str]] = {}
    for option in options:
        name, _, text = option.removeprefix("--").partition("=")
        given.setdefault(name, []).append(text)
    return {name: _value(find(name), name, texts) for name, texts in given.items()}


def _is_free(name: str) -> bool:
    key = find(name)
    return key is not None and key.free


def _next_value(key: Key | None, name: str, rest: list[str]) -> str:
    is_truth = key is not None and bool in key.branches
    follows = bool(rest) and not rest[0].startswith("--")
    if follows and (not is_truth or rest[0].lower() in ("true", "false", "none")):
        return rest.pop(0)
    if is_truth or key is None:  # an unknown key is reported with the others
        return "true"
    raise StrettoError(f"--{name}: expects a value: {key.expects}")


def _value(key: Key | None, name: str, texts: list[str]) -> Any:
    if key is not None and key.list_branch is not None:
        return _list_value(key, texts)
    if len(texts) > 1:
        raise StrettoError(f"--{name}: given {len(texts)} times ({', '.join(texts)}); give it once")
    return _scalar(key, texts[0])


def _scalar(key: Key | None, text: str) -> Any:
    if key is not None and key.optional and text.lower() == "none":
        return None
    if key is not None and all(_is_text(branch) for branch in key.branches):
        return text
    if key is not None and bool in key.branches and text.lower() in ("true", "false"):
        return text.lower() == "true"
    return _toml_or_text(text)


def _list_value(key: Key, texts: list[str]) -> Any:
    if len(texts) == 1:
        text = texts[0]
        if (key.optional and text.lower() == "none") or (text in key.choices and len(key.branches) > 1):
            return None if text.lower() == "none" else text
        if text.startswith("["):
            value = _toml_or_text(text)
            if isinstance(value, list):
                return value
    element = get_args(key.list_branch)[0]
    return [text if _is_text(element) else _toml_or_text(text) for text in texts]


def _is_text(annotation: Any) -> bool:
    return annotation is str or get_origin(annotation) is Literal


def _toml_or_text(text: str) -> Any:
    """The TOML value that a word spells, else the word itself."""
    try:
        document = tomllib.loads(f"value = {text}")
    except tomllib.TOMLDecodeError:
        return text
    return document["value"] if list(document) == ["value"] else text
