"""stdout and stderr where something is wrong with them: closed, unencodable, full, or without a reader."""

from __future__ import annotations

import contextlib
import io
import os
import select
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TextIO

# 128 + SIGPIPE, as shells report a program that this signal ended: `git log | head -1`. It is not 1, which says that a
# check failed, nor 0, because checks and thresholds that would have come were not made. Python ignores the signal, and
# it stays ignored: it would end a command without its `finally`, and leave a server that it has started.
UNREAD = 141


def mend() -> None:
    """Let no character that the terminal lacks end a command, nor a stream that the caller has closed."""
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if stream is None:
            setattr(sys, name, Path(os.devnull).open("w", encoding="utf-8"))  # noqa: SIM115 - for the whole process
        elif isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")


def unread() -> list[int]:
    """Those of the descriptors 1 and 2 that are pipes whose reader is gone."""
    poll = select.poll()
    for descriptor in (1, 2):
        poll.register(descriptor, 0)
    return [descriptor for descriptor, events in poll.poll(0) if events & select.POLLERR]


def discard(descriptors: list[int]) -> None:
    """What is still buffered cannot be written either; the interpreter would try, and end with a status of its own."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    for descriptor in descriptors:
        os.dup2(nowhere, descriptor)


@contextlib.contextmanager
def lasting() -> Iterator[None]:
    """stdout and stderr for a server, which is not there for its log: lines that cannot be written are dropped."""
    with contextlib.redirect_stdout(_lossy(sys.stdout)), contextlib.redirect_stderr(_lossy(sys.stderr)):
        yield


def outliving(target: Callable[..., Any], *arguments: Any) -> None:
    """Main function of a server's process that runs `target` with these."""
    with lasting():
        target(*arguments)


def _lossy(stream: TextIO) -> TextIO:
    try:
        descriptor = stream.fileno()
    except OSError:  # not a file
        return stream
    lossy = io.BufferedWriter(_Lossy(descriptor, "w", closefd=False))
    return io.TextIOWrapper(lossy, encoding=stream.encoding, errors="replace", line_buffering=True)


class _Lossy(io.FileIO):
    """A pipe without a reader and a full disk take everything."""

    def write(self, data: Any) -> int:
        try:
            return super().write(data)
        except OSError:
            return len(data)
