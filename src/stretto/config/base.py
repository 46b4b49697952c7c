"""What every section of a configuration is.

Every section is frozen, refuses unknown keys, and takes values of the stated type only ("5" is no number).
For every field that may be None the text "none" stands for it, since TOML has no null.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pydantic import BaseModel, ConfigDict, model_validator


class Section(BaseModel):
    model_config = ConfigDict(
        extra="forbid", frozen=True, strict=True, allow_inf_nan=False, use_attribute_docstrings=True
    )

    @model_validator(mode="before")
    @classmethod
    def _none_is_none(cls, values: Any) -> Any:
        if not isinstance(values, Mapping):
            return values
        fields = cls.model_fields
        return {
            key: None if value == "none" and key in fields and is_optional(fields[key].annotation) else value
            for key, value in values.items()
        }


def is_optional(annotation: Any) -> bool:
    """Whether None is among the values of a field's type."""
    return type(None) in getattr(annotation, "__args__", ())
