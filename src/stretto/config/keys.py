"""The configuration as a flat table of dotted keys: what each takes, for help, messages and overrides."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from types import UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

import annotated_types
from pydantic.fields import FieldInfo

from stretto.config.base import Section, is_optional
from stretto.config.sections import Config

BOUNDS = {
    annotated_types.Ge: ("ge", "of at least"),
    annotated_types.Gt: ("gt", "above"),
    annotated_types.Le: ("le", "of at most"),
    annotated_types.Lt: ("lt", "below"),
    annotated_types.MinLen: ("min_length", "with a length of at least"),
}
WORDS = {int: "an integer", float: "a number", bool: "true or false", str: "a text", Any: "a value"}


@dataclass(frozen=True)
class Key:
    """One key that takes a value."""

    name: str  # dotted
    field: FieldInfo

    @property
    def branches(self) -> tuple[Any, ...]:
        """The types that a value may have, None left out."""
        annotation = self.field.annotation
        if get_origin(annotation) in (Union, UnionType):
            return tuple(branch for branch in get_args(annotation) if branch is not type(None))
        return (annotation,)

    @property
    def optional(self) -> bool:
        return is_optional(self.field.annotation)

    @property
    def list_branch(self) -> Any:
        """`list[...]` among the types, or None."""
        return next((b for b in self.branches if get_origin(b) is list), None)

    @property
    def free(self) -> bool:
        """Whether keys below it are the user's own."""
        return any(get_origin(branch) is dict for branch in self.branches)

    @property
    def choices(self) -> tuple[str, ...]:
        """The names that it can be set to, if there is such a list."""
        found: list[str] = []
        for branch in self.branches:
            inner = get_args(branch)[0] if get_origin(branch) is list else branch
            if get_origin(inner) is Literal:
                found += get_args(inner)
        return tuple(found)

    @property
    def default(self) -> Any:
        return self.field.get_default(call_default_factory=True)

    @property
    def expects(self) -> str:
        """What a value must be, in words: `an integer of at least 1, or "none"`."""
        words = " or ".join(_in_words(branch) for branch in self.branches) + _bounds(self.field.metadata)
        if self.name == "name":
            words += " of letters, digits and . _ + -"
        return f'{words}, or "none"' if self.optional else words


def _bounds(metadata: Iterable[Any]) -> str:
    bounds = [
        f"{said} {_exactly(getattr(bound, attribute))}"
        for kind, (attribute, said) in BOUNDS.items()
        for bound in metadata
        if isinstance(bound, kind)
    ]
    return f" {' and '.join(bounds)}".replace("and of", "and") if bounds else ""


def _exactly(bound: float) -> str:
    return str(bound) if isinstance(bound, int) else f"{bound:g}"


def _in_words(annotation: Any) -> str:
    origin, arguments = get_origin(annotation), get_args(annotation)
    if origin is Literal:
        return " or ".join(f'"{choice}"' for choice in arguments)
    if origin is list:
        inner = get_args(arguments[0])[0] if get_origin(arguments[0]) is Annotated else arguments[0]
        bounds = [bound for field in getattr(arguments[0], "__metadata__", ()) for bound in field.metadata]
        return f"a list of {_plural(inner)}{_bounds(bounds)}"
    if origin is tuple:
        bounds = [bound for field in getattr(arguments[0], "__metadata__", ()) for bound in field.metadata]
        return f"a list of {len(arguments)} {_plural(arguments[0])}{_bounds(bounds)}"
    if origin is dict:
        return "a table"
    return WORDS[annotation]


def _plural(annotation: Any) -> str:
    if get_origin(annotation) is Literal:
        return _in_words(annotation)
    if get_origin(annotation) is list:
        return f"lists of {_plural(get_args(annotation)[0])}"
    base = getattr(annotation, "__origin__", annotation)
    return {int: "integers", float: "numbers", str: "texts"}[base]


def section_of(annotation: Any) -> type[Section] | None:
    """The section that a field holds, if it does."""
    for branch in (annotation, *get_args(annotation)):
        if isinstance(branch, type) and issubclass(branch, Section):
            return branch
    return None


def _walk(section: type[Section], prefix: str) -> Iterator[tuple[str, type[Section] | Key, FieldInfo]]:
    for name, field in section.model_fields.items():
        inner = section_of(field.annotation)
        if inner is None:
            yield prefix + name, Key(prefix + name, field), field
        else:
            yield prefix + name, inner, field
            yield from _walk(inner, f"{prefix}{name}.")


KEYS: dict[str, Key] = {}
SECTIONS: dict[str, type[Section]] = {"": Config}
OPTIONAL_SECTIONS: set[str] = set()
for _name, _entry, _field in _walk(Config, ""):
    if isinstance(_entry, Key):
        KEYS[_name] = _entry
    else:
        SECTIONS[_name] = _entry
        if is_optional(_field.annotation):
            OPTIONAL_SECTIONS.add(_name)


def ancestors(key: str) -> Iterator[str]:
    """The key, then what it lies in, up to its section: "a.b.c", "a.b", "a"."""
    while key:
        yield key
        key = key.rpartition(".")[0]


def find(key: str) -> Key | None:
    """The entry that a dotted key sets: itself, or the free table that it lies in."""
    for name in ancestors(key):
        if name in KEYS:
            return KEYS[name] if name == key or KEYS[name].free else None
    return None


def did_you_mean(key: str) -> str:
    """A clause naming the valid keys nearest to an unknown one."""
    last = key.rpartition(".")[2].replace("-", "_")
    same = [name for name in (*KEYS, *SECTIONS) if name.rpartition(".")[2] == last and name != key]
    found = (
        difflib.get_close_matches(key, [*KEYS, *SECTIONS], n=1, cutoff=0.8) or same or _near_last(last, key)
    )
    if found:
        quoted = [f'"{name}"' for name in found[:3]]
        return f"did you mean {' or '.join(quoted)}?"
    section = key.rpartition(".")[0]
    inside = [name for name in KEYS if name.rpartition(".")[0] == section]
    return f"choose from: {', '.join(inside)}" if section in SECTIONS else f"sections: {_sections()}"


def _near_last(last: str, key: str) -> list[str]:
    """Keys of the same section, then of any, whose own name is near."""
    section = key.rpartition(".")[0]
    for names in ([n for n in KEYS if n.rpartition(".")[0] == section], list(KEYS)):
        by_last = {name.rpartition(".")[2]: name for name in names}
        close = difflib.get_close_matches(last, by_last, n=1, cutoff=0.6)
        if close:
            return [by_last[close[0]]]
    return []


def _sections() -> str:
    return ", ".join(name for name in SECTIONS if name)


def shown(value: object) -> str:
    """A value as TOML would have it, shortened for a message."""
    if isinstance(value, bool):
        text = str(value).lower()
    elif isinstance(value, str):
        text = f'"{value}"'
    else:
        text = "none" if value is None else str(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


def sections_in_order() -> Iterable[tuple[str, str, list[Key]]]:
    """(dotted name, description, keys) of every section, the run's own keys first; for help and docs."""
    for name, section in SECTIONS.items():
        keys = [key for key in KEYS.values() if key.name.rpartition(".")[0] == name]
        yield name, (section.__doc__ or "").strip(), keys
