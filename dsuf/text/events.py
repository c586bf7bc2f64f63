"""One event of a streamed answer, and the text of growing token lists."""

from __future__ import annotations

import codecs
from collections.abc import Sequence
from typing import NamedTuple

from dsuf.engine.messages import TokenLogprobs

_LOGPROB_FLOOR = -9999.0  # JSON has no infinity; the public API writes this


class Event(NamedTuple):
    """What one server-sent event carries; Chat Completions and text completions leave theirs unnamed."""

    data: str  # JSON
    name: str | None = None

    def frame(self) -> str:
        """The event on the wire."""
        return f"data: {self.data}\n\n" if self.name is None else f"event: {self.name}\ndata: {self.data}\n\n"

    def with_steps(self, decode: int, tokens: int) -> Event:
        """The event with decode steps and tokens so far beside what it carries."""
        return self._replace(data=f'{self.data[:-1]},"steps":{{"decode":{decode},"tokens":{tokens}}}}}')


class StopText:
    """Text up to the stop string that is complete first, given out as soon as it cannot be the beginning of one."""

    def __init__(self, stops: tuple[str, ...]) -> None:
        self.stopped = False
        self._stops, self._held = stops, ""
        self._bytes = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def feed(self, token: bytes) -> str:
        """Take the bytes of one token; returns what became certain. Nothing may follow once `stopped` is true."""
        self._held += self._bytes.decode(token)
        found = [(at + len(stop), at) for stop in self._stops if (at := self._held.find(stop)) >= 0]
        if found:
            self.stopped = True
            return self._held[: min(found)[1]]
        return self._give(len(self._held) - self._open_length())

    def flush(self) -> str:
        """The end: what was held back, without the bytes of an unfinished character."""
        return self._give(len(self._held))

    def _give(self, length: int) -> str:
        given, self._held = self._held[:length], self._held[length:]
        return given

    def _open_length(self) -> int:
        """Length of the longest end of the text that begins a stop string."""
        longest = max(map(len, self._stops), default=1) - 1
        for length in range(min(longest, len(self._held)), 0, -1):
            if any(stop.startswith(self._held[-length:]) for stop in self._stops):
                return length
        return 0


def used_before_stop(tokens: Sequence[bytes], stops: Sequence[str]) -> tuple[int, bytes]:
    """How many of `tokens` are used whole when the last one completes a stop string, and what is used after them.

    The second part is text of whole characters wherever the tokens are.
    """
    text, last = b"".join(tokens), len(tokens[-1])
    ends: list[tuple[int, int]] = []
    for stop in (stop.encode() for stop in stops):
        at = text.find(stop, max(0, len(text) - last - len(stop) + 1))
        if at >= 0:
            ends.append((at + len(stop), at))
    left = min(ends)[1] if ends else len(text)  # as in StopText: the one that is complete first
    count = 0
    while count < len(tokens) and len(tokens[count]) <= left:
        left -= len(tokens[count])
        count += 1
    rest = tokens[count][:left] if left else b""
    for _ in range(3):  # a token may hold the end of a character and more
        if count and not _is_text(rest):
            count -= 1
            rest = tokens[count] + rest
    return count, rest


def _is_text(data: bytes) -> bool:
    try:
        data.decode()
    except UnicodeDecodeError:
        return False
    return True


def finite(entry: TokenLogprobs) -> tuple[float, list[tuple[int, float]]]:
    """(logprob, [(token, logprob)]) without infinities."""
    return max(entry.logprob, _LOGPROB_FLOOR), [(token, max(value, _LOGPROB_FLOOR)) for token, value in entry.top]
