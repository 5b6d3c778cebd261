"""Tables that fit their terminal: names, addresses and numbers are never broken, columns are left
out instead."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final

from rich.console import Console, ConsoleOptions, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

#: Width where nothing is to be left out.
_UNBOUNDED: Final = 100_000
#: Prose is wrapped at this width, also where there is room for more; and has so much at least.
_MAX_PROSE, _LEAST_PROSE = 100, 12
#: Width that a column takes beside its text, and a table beside its columns.
_COLUMN_RULE, _TABLE_RULE = 3, 1


@dataclass(frozen=True)
class ColumnSpec:
    """Name and treatment of a column."""

    name: str
    cell: Callable[[Any], str | Text] = str
    """Function of a row's value that returns the text of its cell; see ``FittedTable.add``."""
    rank: int = 0
    """Order in which columns get room on a narrow terminal; those of rank 0 are always shown."""
    is_prose: bool = False
    """True if its texts may be wrapped between words."""
    is_number: bool = False
    """True to align it on its right."""


def listing_console(*, wide: bool = False) -> Console:
    """Return the console of a listing: as wide as the terminal, or as wide as the listing where
    that is asked for, and where there is no terminal."""
    console = Console()
    return console if console.is_terminal and not wide else Console(width=_UNBOUNDED)


def fitting_columns(widths: Sequence[int], ranks: Sequence[int], width: int) -> list[int] | None:
    """Choose the columns of a table that has ``width`` characters.

    Args:
        widths: Least width of each column's text.
        ranks: Rank of each; see ``ColumnSpec``.

    Returns:
        The indices of the columns, in order; None if those of rank 0 do not fit.
    """
    chosen, room = [], width - _TABLE_RULE
    for index in sorted(range(len(widths)), key=lambda index: ranks[index]):
        needed = widths[index] + _COLUMN_RULE
        if needed <= room:
            chosen.append(index)
            room -= needed
        elif ranks[index] == 0:
            return None
    return sorted(chosen)


class FittedTable:
    """Table that chooses its columns as it is printed.

    Where not even the columns of rank 0 fit, each row is a block of lines.

    Args:
        title: Line above it.
        columns: Its columns; the first one names the row.
        caption: Line below it.
        empty: Line that is printed in its place where it has no rows.
    """

    def __init__(
        self, title: str, columns: Sequence[ColumnSpec], caption: str = "", empty: str = ""
    ) -> None:
        self._title, self._columns, self._caption = title, columns, caption
        self._empty = empty
        self._rows: list[list[Text]] = []
        self._notes: list[Text] = []

    def add(self, value: Any, notes: Sequence[Text] = ()) -> None:
        """Add a row of the cells that the columns make of a value; see ``add_row``."""
        self.add_row(*(column.cell(value) for column in self._columns), notes=notes)

    def add_row(self, *cells: str | Text, notes: Sequence[Text] = ()) -> None:
        """Add a row.

        Args:
            cells: Texts of the columns.
            notes: Remarks on the row, printed below the table with its name.
        """
        row = [Text(cell) if isinstance(cell, str) else cell for cell in cells]
        self._rows.append(row)
        self._notes += [Text.assemble(row[0], ": ", note) for note in notes]

    def __rich_console__(
        self, console: Console, options: ConsoleOptions
    ) -> Iterator[RenderableType]:
        if not self._rows and self._empty:
            yield Text(self._empty, "dim")
            return
        natural = [max(map(_width, texts)) for texts in self._texts()]
        least = [
            max(min(width, _LEAST_PROSE), *map(_longest_word, texts)) if column.is_prose else width
            for column, width, texts in zip(self._columns, natural, self._texts(), strict=True)
        ]
        ranks = [column.rank for column in self._columns]
        chosen = fitting_columns(least, ranks, options.max_width)
        if chosen is None:
            yield from self._blocks()
        else:
            room = options.max_width - _TABLE_RULE
            room -= sum(least[index] + _COLUMN_RULE for index in chosen)
            widths = {}
            for index in chosen:
                wanted = max(least[index], min(natural[index], _MAX_PROSE))
                widths[index] = min(wanted, least[index] + max(0, room))
                room -= widths[index] - least[index]
            yield self._table(widths)
        yield from self._notes

    def _texts(self) -> list[list[Text]]:
        """Return the texts of each column, its header among them."""
        return [
            [Text(column.name), *(row[index] for row in self._rows)]
            for index, column in enumerate(self._columns)
        ]

    def _table(self, widths: dict[int, int]) -> Table:
        left_out = [c.name for i, c in enumerate(self._columns) if i not in widths]
        captions = [self._caption] * bool(self._caption)
        captions += [f"not shown: {', '.join(left_out)}; see --wide"] * bool(left_out)
        table = Table(
            title=self._title,
            title_justify="left",
            caption="\n".join(captions) or None,
            caption_justify="left",
        )
        for index, width in widths.items():
            column = self._columns[index]
            table.add_column(
                column.name,
                width=width,
                overflow="fold",
                justify="right" if column.is_number else "left",
            )
        for row in self._rows:
            table.add_row(*(row[index] for index in widths))
        return table

    def _blocks(self) -> Iterator[RenderableType]:
        """Yield each row as a line for its name, and one for each other column."""
        yield Text(self._title, "italic")
        for row in self._rows:
            yield row[0]
            for column, cell in zip(self._columns[1:], row[1:], strict=True):
                if cell.plain:
                    yield Padding(Text.assemble(f"{column.name}: ", cell), (0, 0, 0, 2))
        if self._caption:
            yield Text(self._caption, "dim italic")


def _width(text: Text) -> int:
    return max((line.cell_len for line in text.split("\n")), default=0)


def _longest_word(text: Text) -> int:
    return max((Text(word).cell_len for word in text.plain.split()), default=0)
