"""Progress: nothing for short work, plain lines in a log, a bar on a terminal, never on stdout."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys

import pytest

from dsuf.cli import live


@pytest.fixture
def clock(monkeypatch):
    class Clock:
        now = 0.0

    monkeypatch.setattr(live.time, "monotonic", lambda: Clock.now)
    return Clock


def test_work_under_a_second_says_nothing(clock, capsys):
    with live.progress("writing", "B") as update:
        clock.now = 0.9
        update(1, 2)
    assert capsys.readouterr() == ("", "")


def test_a_log_gets_a_line_now_and_then_and_one_at_the_end(clock, capsys):
    with live.progress("writing", "B") as update:
        for second in range(1, 9):
            clock.now = float(second)
            update(second * 10**6, 8 * 10**6)
    out, err = capsys.readouterr()
    assert out == ""
    assert err.splitlines() == ["writing: 1 of 8 MB", "writing: 6 of 8 MB", "writing: 8.0 s"]


def test_a_terminal_gets_a_bar_that_goes_away():
    code = (
        "import time\n"
        "from dsuf.cli.live import progress\n"
        "with progress('bench', 'repeats') as update:\n"
        "    for done in range(1, 8):\n"
        "        time.sleep(0.2)\n"
        "        update(done, 7)\n"
    )
    ours, theirs = os.openpty()
    process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=theirs)
    os.close(theirs)
    shown = b""
    with contextlib.suppress(OSError):  # EIO: the other side is closed
        while piece := os.read(ours, 4096):
            shown += piece
    os.close(ours)
    assert process.communicate(timeout=10) == (b"", None)
    assert process.returncode == 0
    assert b"bench" in shown
    assert b"7/7" in shown
    assert b"\x1b[2K" in shown  # the line is erased at the end


def test_an_error_inside_ends_the_view(clock, capsys):
    with pytest.raises(KeyboardInterrupt), live.progress("writing") as update:
        clock.now = 2.0
        update(1, 2)
        raise KeyboardInterrupt
    assert capsys.readouterr().err == "writing: 1 of 2\n"
