"""What a person sees while a command works: Rich views on a terminal, plain lines otherwise, always on stderr.

stdout carries only what was asked for (text, JSON, the headline), so that it can be piped.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

LINE_EVERY_S = 5.0  # plain lines, when stderr is not a terminal
SILENT_FOR_S = 1.0  # nothing is shown for work that ends sooner


def say(line: str) -> None:
    """Write one line to stderr at once."""
    print(line, file=sys.stderr, flush=True)


def is_terminal() -> bool:
    """True when stderr can show a moving bar."""
    return sys.stderr.isatty()


@contextmanager
def progress(label: str, unit: str = "") -> Iterator[Callable[[int, int], None]]:
    """A function `(done, total)` that shows how far `label` is, after the first second of work.

    `unit` is "B" for bytes, else a word such as "steps". The bar is gone when the block ends; a line says how long it
    took, if it came to its end.
    """
    view = _Bar(label, unit) if is_terminal() else _Lines(label, unit)
    try:
        yield view.update
    except BaseException:
        view.close(whole=False)
        raise
    view.close(whole=True)


class _Lines:
    """Plain lines for logs and CI: one every few seconds, none for short work."""

    def __init__(self, label: str, unit: str) -> None:
        self.label, self.unit = label, unit
        self.started = time.monotonic()
        self.next_line = self.started + SILENT_FOR_S

    def update(self, done: int, total: int) -> None:
        now = time.monotonic()
        if now >= self.next_line:
            self.next_line = now + LINE_EVERY_S
            if self.unit == "B":
                say(f"{self.label}: {done / 1e6:,.0f} of {total / 1e6:,.0f} MB")
            else:
                say(f"{self.label}: {done:,} of {total:,} {self.unit}".rstrip())

    def close(self, whole: bool) -> None:
        took_s = time.monotonic() - self.started
        if whole and took_s >= SILENT_FOR_S:
            say(f"{self.label}: {took_s:.1f} s")


class _Bar:
    """A Rich bar; Rich is imported when there is something to show."""

    def __init__(self, label: str, unit: str) -> None:
        self.label, self.unit = label, unit
        self.shown_after = time.monotonic() + SILENT_FOR_S
        self.bar = None

    def update(self, done: int, total: int) -> None:
        if self.bar is None:
            if time.monotonic() < self.shown_after:
                return
            self.bar = _start_bar(self.unit)
            self.task = self.bar.add_task(self.label, total=total)
        self.bar.update(self.task, completed=done, total=total)

    def close(self, whole: bool) -> None:
        if self.bar is not None:
            self.bar.stop()


def _start_bar(unit: str):  # noqa: ANN202 - rich.progress.Progress, imported late
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    amount = DownloadColumn() if unit == "B" else MofNCompleteColumn()
    columns = (TextColumn("{task.description}"), BarColumn(), amount, TimeRemainingColumn())
    bar = Progress(*columns, console=Console(stderr=True), transient=True)
    bar.start()
    return bar
