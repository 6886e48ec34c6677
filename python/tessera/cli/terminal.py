# SPDX-License-Identifier: Apache-2.0
"""Tables and progress: rich on a terminal when it is installed, plain text in a pipe."""

from __future__ import annotations

import importlib.util
import sys
import time

_SECONDS_BETWEEN_LINES = 5.0


def is_rich(stream) -> bool:
    return stream.isatty() and importlib.util.find_spec("rich") is not None


def print_table(columns, rows, title=""):
    """columns: headings, "<name" left and ">name" right aligned; rows: lists of text."""
    names = [column[1:] for column in columns]
    if is_rich(sys.stdout):
        from rich.console import Console
        from rich.table import Table
        table = Table(title=title or None, title_justify="left")
        for column, name in zip(columns, names):
            table.add_column(name, justify="right" if column[0] == ">" else "left",
                             overflow="fold")
        for row in rows:
            table.add_row(*map(_escape, row))
        Console().print(table)
        return
    widths = [max(len(str(row[i])) for row in [names, *rows]) for i in range(len(names))]
    if title:
        print(title)
    for row in [names, *rows]:
        print(line_of(columns, row, widths))


def line_of(columns, row, widths) -> str:
    cells = [f"{text:{column[0]}{width}}" for text, column, width in zip(row, columns, widths)]
    return "  ".join(cells).rstrip()


class Rows:
    """A table in plain text whose rows are printed as they come, with room for `longest` characters
    in the first column. A row ends up on paper whatever becomes of the process afterwards."""

    def __init__(self, columns, longest: int, print_line=lambda text: print(text, flush=True)):
        self._columns, self._print = columns, print_line
        names = [column[1:] for column in columns]
        self._widths = [max(longest, len(names[0]))] + [max(len(name), 7) for name in names[1:]]
        self._print(line_of(columns, names, self._widths))

    def row(self, cells, *remarks):
        for text in (line_of(self._columns, cells, self._widths), *remarks):
            self._print(text)


def _escape(text) -> str:
    from rich.markup import escape
    return escape(str(text))


class Progress:
    """A bar on stderr; without rich or tqdm, or in a pipe, a line every few seconds."""

    def __init__(self, total: int, label: str):
        self._total, self._label, self._done = total, label, 0
        self._bar = self._tqdm = None
        self._said = time.monotonic()

    def __enter__(self):
        if is_rich(sys.stderr):
            from rich.console import Console
            from rich.progress import BarColumn, MofNCompleteColumn, Progress as Bar, TextColumn, \
                TimeRemainingColumn
            self._bar = Bar(TextColumn(self._label), BarColumn(), MofNCompleteColumn(),
                            TimeRemainingColumn(), TextColumn("{task.description}"),
                            console=Console(stderr=True), transient=True)
            self._task = self._bar.add_task("", total=self._total)
            self._bar.start()
        elif sys.stderr.isatty() and importlib.util.find_spec("tqdm") is not None:
            import tqdm
            self._tqdm = tqdm.tqdm(total=self._total, desc=self._label, leave=False)
        return self

    def step(self, text: str = ""):
        self._done += 1
        if self._bar:
            self._bar.update(self._task, advance=1, description=_escape(text[:60]))
        elif self._tqdm:
            self._tqdm.update(1)
        elif time.monotonic() - self._said > _SECONDS_BETWEEN_LINES:
            self._said = time.monotonic()
            print(f"{self._label} {self._done}/{self._total} {text}", file=sys.stderr, flush=True)

    def print(self, text: str):
        """A line on stdout that does not break the bar."""
        if self._bar:
            self._bar.stop()
        elif self._tqdm:
            self._tqdm.clear()
        print(text, flush=True)
        if self._bar:
            self._bar.start()

    def __exit__(self, *_):
        if self._bar:
            self._bar.stop()
        elif self._tqdm:
            self._tqdm.close()
