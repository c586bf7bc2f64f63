"""Processes of a server's own: neither Ctrl-C, which reaches all of a terminal, nor an unread pipe ends them."""

from __future__ import annotations

import multiprocessing
import signal
from collections.abc import Callable
from multiprocessing import resource_tracker
from multiprocessing.process import BaseProcess
from typing import Any

from dsuf.cli.streams import outliving


def own_process(name: str, target: Callable[..., Any], *arguments: Any) -> BaseProcess:
    """A process, not started yet, that will run `target` with these."""
    return multiprocessing.get_context("spawn").Process(target=outliving, args=(target, *arguments), name=name)


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
