# SPDX-License-Identifier: Apache-2.0
"""What the demo says: coloured tables and a progress bar on a terminal, plain text in a pipe."""

import contextlib
import sys
import time

try:
    import rich.box
    import rich.console
    import rich.progress
    import rich.table
    import rich.text
except ImportError:
    rich = None


class Report:
    """In a pipe, progress is a line at most every `patience` seconds."""

    def __init__(self, stream=None, patience=2.0):
        stream = stream or sys.stdout
        self._patience = patience
        self._print = lambda text: print(text, file=stream, flush=True)
        self._console = None
        if rich and stream.isatty():
            self._console = rich.console.Console(file=stream, highlight=False)

    def section(self, title):
        if self._console:
            self._console.print(f"\n[bold cyan]{title}[/]")
        else:
            self._print(f"\n{title}\n{'-' * len(title)}")

    def say(self, text):
        if self._console:
            self._console.print(text, markup=False)
        else:
            self._print(text)

    def table(self, columns, rows, left=()):
        """rows: of texts, one for each of columns. left: numbers of the columns of words."""
        if self._console:
            table = rich.table.Table(box=rich.box.SIMPLE_HEAD, pad_edge=False)
            for i, column in enumerate(columns):
                table.add_column(column, justify="left" if i in left else "right")
            for row in rows:
                table.add_row(*map(rich.text.Text, row))
            self._console.print(table)
            return
        widths = [max(map(len, cells)) for cells in zip(columns, *rows)]
        for row in (columns, *rows):
            cells = zip(row, widths)
            flush = [c.ljust(w) if i in left else c.rjust(w) for i, (c, w) in enumerate(cells)]
            self._print("  ".join(flush).rstrip())

    @contextlib.contextmanager
    def progress(self, what, total):
        """Yields advance(note), to be called after each of total steps."""
        if not self._console:
            yield self._lines(total)
            return
        with rich.progress.Progress(
            rich.progress.TextColumn("{task.description}"),
            rich.progress.BarColumn(),
            rich.progress.MofNCompleteColumn(),
            rich.progress.TimeElapsedColumn(),
            console=self._console,
            transient=True,
        ) as bar:
            task = bar.add_task(what, total=total)
            yield lambda note: bar.update(task, advance=1, description=f"{what}: {note}")

    def _lines(self, total):
        done, last = 0, time.monotonic()

        def advance(note):
            nonlocal done, last
            done += 1
            if done < total and time.monotonic() - last >= self._patience:
                last = time.monotonic()
                self._print(f"  [{done}/{total}] {note}")

        return advance
