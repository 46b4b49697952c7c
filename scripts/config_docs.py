"""Writes docs/config.md from the configuration's own descriptions: run by `make docs`."""

from __future__ import annotations

from pathlib import Path

from stretto.config.keys import Key, sections_in_order, shown

OUT = Path(__file__).parent.parent / "docs" / "config.md"
HEAD = """\
# Configuration

<!-- Written by scripts/config_docs.py (`make docs`); edit the descriptions in src/stretto/config/sections.py. -->

Every key of a run, with its default. Set it in a TOML file (`[learner]` and `learning_rate = 1e-5`), on the
command line (`--learner.learning-rate 1e-5`) or from Python (`config={"learner": {"learning_rate": 1e-5}}`).
`"none"` unsets a key that may be unset. `stretto train --dry-run` prints what a run would use.
"""


def row(key: Key) -> str:
    cells = (f"`{key.name}`", f"`{shown(key.default)}`", key.field.description or "", key.expects)
    return f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} |"


def render() -> str:
    """The page."""
    parts = [HEAD]
    for section, description, keys in sections_in_order():
        title = f"## `[{section}]`" if section else "## The run"
        head = "| key | default | what it is | takes |\n| --- | --- | --- | --- |"
        parts.append("\n".join([title, "", description, "", head, *map(row, keys), ""]))
    return "\n".join(parts)


if __name__ == "__main__":
    OUT.write_text(render(), encoding="utf-8")
