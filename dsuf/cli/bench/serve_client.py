"""One streamed chat call of `bench serve`: what came when.

The client must measure the server and not itself: a stream is read by a protocol of its own on httptools, without a
task switch between the socket and the clock.
"""

from __future__ import annotations

import asyncio
import time
import urllib.parse
from dataclasses import dataclass, field
from typing import Any

import httptools
import msgspec

from dsuf.cli.client import chat_url


@dataclass
class Record:
    """One call; times are seconds of `time.perf_counter`."""

    group: str
    queued_s: float = 0.0  # held back by --max-concurrency
    sent: float = 0.0
    events: list[float] = field(default_factory=list)  # arrivals of output, or of the end where its tokens show no text
    prompt_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0
    text: str = ""
    error: str = ""  # empty: the answer is complete
    steps: list[int] = field(default_factory=list)  # decode steps until each event, where the server tells; else -1

    @property
    def ttft_s(self) -> float:
        """Sent to the first output."""
        return self.events[0] - self.sent

    @property
    def gaps_s(self) -> list[float]:
        """Between outputs; one of them holds all tokens of a step."""
        return [later - earlier for earlier, later in zip(self.events, self.events[1:], strict=False)]

    @property
    def e2e_s(self) -> float:
        """Sent to the last output."""
        return self.events[-1] - self.sent

    @property
    def tpot_s(self) -> float:
        """Time of an output token after the first output; 0 for an answer of one token."""
        more = self.output_tokens - 1
        return (self.events[-1] - self.events[0]) / more if more > 0 else 0.0


class _Delta(msgspec.Struct, frozen=True):
    content: str | None = None
    reasoning_content: str | None = None
    tool_calls: list[Any] | None = None


class _Choice(msgspec.Struct):
    delta: _Delta = _Delta()


class _Details(msgspec.Struct):
    cached_tokens: int | None = 0


class _Usage(msgspec.Struct):
    prompt_tokens: int = 0
    completion_tokens: int = 0
    prompt_tokens_details: _Details | None = None


class _Steps(msgspec.Struct, frozen=True):
    decode: int = -1


class _Event(msgspec.Struct):
    choices: list[_Choice] = []
    steps: _Steps = _Steps()
    usage: _Usage | None = None
    error: dict[str, Any] | None = None


_decode = msgspec.json.Decoder(_Event).decode


class Target:
    """The server that is measured."""

    def __init__(self, url: str, api_key: str | None) -> None:
        parts = urllib.parse.urlsplit(chat_url(url))
        self.url = urllib.parse.urlunsplit(parts)
        self.base = f"{parts.scheme}://{parts.netloc}"
        self._host, self._tls = parts.hostname, parts.scheme == "https"
        self._port = parts.port or (443 if self._tls else 80)
        key = f"authorization: Bearer {api_key}\r\n" if api_key else ""
        self._head = (
            f"POST {parts.path} HTTP/1.1\r\nhost: {parts.netloc}\r\ncontent-type: application/json\r\n"
            f"accept: text/event-stream\r\nconnection: close\r\n{key}"
        )

    async def send(self, body: dict[str, Any], record: Record) -> Record:
        """Make one call and fill in `record`, whatever happens; a cancelled one keeps what had arrived."""
        raw = msgspec.json.encode(body)
        head = f"{self._head}content-length: {len(raw)}\r\n\r\n".encode()
        loop = asyncio.get_running_loop()
        reader = _Reader(record, loop.create_future())
        record.sent = time.perf_counter()
        try:
            transport, _ = await loop.create_connection(lambda: reader, self._host, self._port, ssl=self._tls or None)
        except OSError as error:
            record.error = f"cannot connect: {error.strerror or error}"
            return record
        try:
            transport.write(head)
            transport.write(raw)
            await reader.done
        finally:
            transport.abort()
        if not record.error and not record.events:
            if record.output_tokens:  # a part of a character, a special token
                record.events.append(reader.ended)
                record.steps.append(-1)
            else:
                record.error = "the answer is empty"
        return record


class _Reader(asyncio.Protocol):
    """Reads one response."""

    def __init__(self, record: Record, done: asyncio.Future[None]) -> None:
        self.done = done
        self._record, self._parser = record, httptools.HttpResponseParser(self)
        self._rest, self._texts = b"", []
        self.ended = 0.0

    def data_received(self, data: bytes) -> None:
        """Bytes from the server."""
        try:
            self._parser.feed_data(data)
        except (httptools.HttpParserError, msgspec.DecodeError) as error:
            self._end(f"not a stream of chat events: {error}")

    def on_body(self, data: bytes) -> None:
        """A part of the body."""
        self._rest += data
        if self._parser.get_status_code() != 200:
            return
        *frames, self._rest = self._rest.split(b"\n\n")
        for frame in frames:
            if frame.startswith(b"data: {"):
                self._take(_decode(frame[6:]))
            elif frame == b"data: [DONE]":
                self._end("")

    def on_message_complete(self) -> None:
        """The proper end of a body whose length is known or whose last chunk came."""
        status = self._parser.get_status_code()
        self._end("" if status == 200 else self._problem(status))

    def connection_lost(self, error: Exception | None) -> None:
        """The end of a body without any other, or a break."""
        status = self._parser.get_status_code()
        self._end("the server broke off" if status in (0, 200) else self._problem(status))

    def _problem(self, status: int) -> str:
        return f"status {status}: {self._rest[:200].decode('utf-8', 'replace')}"

    def _take(self, event: _Event) -> None:
        record = self._record
        if event.error is not None:
            record.error = str(event.error.get("message", event.error))
        for choice in event.choices:
            delta = choice.delta
            if delta.content or delta.reasoning_content or delta.tool_calls:
                record.events.append(time.perf_counter())
                record.steps.append(event.steps.decode)
                self._texts.append(delta.content or "")
        if event.usage is not None:
            record.prompt_tokens, record.output_tokens = event.usage.prompt_tokens, event.usage.completion_tokens
            record.cached_tokens = (event.usage.prompt_tokens_details or _Details()).cached_tokens or 0

    def _end(self, error: str) -> None:
        if not self.done.done():
            self.ended = time.perf_counter()
            self._record.error = self._record.error or error
            self._record.text = "".join(self._texts)
            self.done.set_result(None)
