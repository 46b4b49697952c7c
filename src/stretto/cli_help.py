"""How `stretto train --help` shows the keys of the configuration."""

from __future__ import annotations

from typing import TYPE_CHECKING

from cyclopts.help import (
    ColumnSpec,
    DefaultFormatter,
    DescriptionRenderer,
    HelpEntry,
    HelpPanel,
    NameRenderer,
)

if TYPE_CHECKING:
    from rich.console import Console, ConsoleOptions


def with_keys(console: Console, options: ConsoleOptions, panel: HelpPanel) -> None:
    """The options of a command, and after them every key of the configuration, section by section."""
    from stretto.config.keys import sections_in_order, shown

    DefaultFormatter()(console, options, panel)
    name = ColumnSpec(renderer=NameRenderer(), style="cyclopts.name", no_wrap=True)
    whole_names = DefaultFormatter(column_specs=(name, ColumnSpec(renderer=DescriptionRenderer())))
    for section, description, keys in sections_in_order():
        entries = [
            HelpEntry(
                positive_names=(f"--{key.name}",),
                description=f"{key.field.description} ({key.expects})",
                default=shown(key.default),
            )
            for key in keys
        ]
        title = f"{section}: {description}" if section else "Keys of the configuration"
        whole_names(console, options, HelpPanel(format="parameter", title=title, entries=entries))
