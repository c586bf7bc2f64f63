"""Starting a process of one's own that Ctrl-C, which reaches every process of the terminal, does not end."""

from __future__ import annotations

import signal
from multiprocessing import resource_tracker
from multiprocessing.process import BaseProcess


def start_deaf(process: BaseProcess) -> None:
    """Start `process` with SIGINT blocked; one that comes meanwhile is delivered to this process afterwards."""
    resource_tracker.ensure_running()  # where start() has to start it, it lets SIGINT through from then on
    heard: list[int] = []
    before = signal.signal(signal.SIGINT, lambda number, frame: heard.append(number))
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        process.start()
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        signal.signal(signal.SIGINT, before)
        if heard:
            signal.raise_signal(signal.SIGINT)
