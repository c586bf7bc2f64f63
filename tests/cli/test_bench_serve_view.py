"""The live view of `bench serve`: what it says of a run that is under way, on a terminal and in a log."""

from __future__ import annotations

import asyncio
import contextlib
import io
import re
import time

from dsuf.cli.bench import serve_view
from dsuf.cli.bench.serve_client import Record
from dsuf.cli.bench.serve_view import View


def view_of_a_run():
    view, now = View(9), time.perf_counter()
    for events, text, error in (([0.2, 0.1], "done", ""), ([0.05], "", ""), ([], "", "status 429")):
        view.started(Record("", 0.0, now - 0.3, [now - ago for ago in events], 5, 0, 2, text, error))
    return view


def test_rows_count_what_is_done_and_running():
    rows = dict(view_of_a_run().rows())
    assert (rows["done"], rows["running"], rows["failed"]) == ("2 of 9", "1", "1")
    assert rows["ttft"] == "175 ms" and rows["gap"].startswith("100.0")


def test_nothing_is_known_before_the_first_answer():
    rows = dict(View(None).rows())
    assert (rows["done"], rows["ttft"], rows["gap"]) == ("0", "-", "-")


def shown(monkeypatch, terminal):
    """What `show` writes in a moment."""
    written = io.StringIO()
    written.isatty = lambda: terminal
    monkeypatch.setattr("sys.stderr", written)
    monkeypatch.setattr(serve_view, "LINE_EVERY_S", 0.01)
    monkeypatch.setattr(serve_view, "_REFRESH_S", 0.01)

    async def watch():
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(0.5):
                await view_of_a_run().show()

    asyncio.run(watch())
    return written.getvalue()


def test_a_terminal_gets_a_panel_and_a_log_gets_lines(monkeypatch):
    panel = re.sub(r"\x1b\[[\d;?]*[A-Za-z]", "", shown(monkeypatch, terminal=True))
    assert "bench serve" in panel and "2 of 9" in panel
    lines = shown(monkeypatch, terminal=False)
    assert "\x1b" not in lines and "done 2 of 9, running 1, failed 1" in lines
