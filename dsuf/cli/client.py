"""A streaming chat client that times what arrives, by the definitions of the published script.

tokens_per_s           completion tokens / (end of the stream - first content event): the published definition. It
                       counts the first token, whose time is not in the interval, and the tail of the stream.
unbiased_tokens_per_s  (completion tokens - 1) / (last content event - first content event): the first event carries
                       the one token that prefill chose.
"""

from __future__ import annotations

import http.client
import json
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from dsuf.errors import CheckFailed, EnvironmentProblem, UsageError

CHAT_PATH = "/v1/chat/completions"
SILENCE_S = 600.0  # a server sends a comment at least every 10 s while it works
SETTLE_S = 1.0  # a server counts a request just after its last byte


@dataclass(frozen=True)
class StreamTimes:
    """One streamed answer; times are seconds after the request was sent."""

    text: str
    completion_tokens: int
    finish_reason: str
    first_s: float
    last_s: float
    end_s: float

    @property
    def tokens_per_s(self) -> float:
        """The published definition."""
        return self.completion_tokens / max(self.end_s - self.first_s, 1e-9)

    @property
    def unbiased_tokens_per_s(self) -> float:
        """Without the first event's token, up to the last content event; 0 for an answer of one event."""
        took_s = self.last_s - self.first_s
        return (self.completion_tokens - 1) / took_s if took_s > 0 else 0.0

    def headline(self) -> str:
        """The line that the published script ends with."""
        return (
            f"{self.completion_tokens} tokens at {self.tokens_per_s:,.0f} tokens/s "
            f"(first token after {self.first_s:.2f} s)"
        )


def chat_url(url: str) -> str:
    """The chat endpoint of `url`: itself when it has a path, else with /v1/chat/completions."""
    parts = urllib.parse.urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise UsageError(f"--url is {url!r}; expected http://HOST:PORT or the full address of chat/completions.")
    path = parts.path.rstrip("/")
    if path.endswith("/chat/completions"):
        return url
    return urllib.parse.urlunsplit(parts._replace(path=path.removesuffix("/v1") + CHAT_PATH))


class _NotShown(Exception):
    """Our own output failed, not the server."""

    def __init__(self, error: OSError) -> None:
        super().__init__(str(error))
        self.error = error


def stream_chat(
    url: str, request: dict[str, Any], on_text: Callable[[str], None], api_key: str | None = None
) -> StreamTimes:
    """POST `request` and time its stream; `on_text` gets each piece of the answer as it arrives.

    Raises EnvironmentProblem when the server cannot be reached or breaks off, UsageError when it refuses the request,
    CheckFailed when the answer has no text.
    """
    headers = {"Content-Type": "application/json"}
    if api_key:
        headers["Authorization"] = f"Bearer {api_key}"
    post = urllib.request.Request(url, json.dumps(request).encode(), headers)
    started = time.perf_counter()

    def show(text: str) -> None:
        try:
            on_text(text)
        except OSError as error:
            raise _NotShown(error) from None

    try:
        with urllib.request.urlopen(post, timeout=SILENCE_S) as stream:
            return _read_stream(stream, started, show)
    except _NotShown as failed:
        raise failed.error from None
    except urllib.error.HTTPError as error:
        message = _error_message(error.read())
        kind = UsageError if 400 <= error.code < 500 else EnvironmentProblem
        raise kind(f"{url} answered {error.code}: {message}") from None
    except (OSError, http.client.HTTPException) as error:
        reason = getattr(error, "reason", error)
        raise EnvironmentProblem(f"{url} cannot be reached or broke off: {reason}. Is the server running?") from None
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise EnvironmentProblem(f"{url} does not stream chat completions ({error!r}).") from None


def _read_stream(stream: http.client.HTTPResponse, started: float, on_text: Callable[[str], None]) -> StreamTimes:
    pieces: list[str] = []
    tokens, finish, first, last = 0, "", None, 0.0
    for line in stream:
        if not line.startswith(b"data: {"):
            continue
        event = json.loads(line[6:])
        if "error" in event:
            raise EnvironmentProblem(f"The server ended the stream with an error: {_error_message(line[6:])}")
        tokens = (event.get("usage") or {}).get("completion_tokens", tokens)
        for choice in event["choices"]:
            finish = choice.get("finish_reason") or finish
            if text := choice["delta"].get("content"):
                last = time.perf_counter() - started
                first = last if first is None else first
                pieces.append(text)
                on_text(text)
    end = time.perf_counter() - started
    if first is None:
        raise CheckFailed("The server's answer has no text.")
    return StreamTimes("".join(pieces), tokens, finish, first, last, end)


def _error_message(body: bytes) -> str:
    try:
        return str(json.loads(body)["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return " ".join(body.decode("utf-8", "replace").split())[:200] or "nothing"


@dataclass(frozen=True)
class StepCounters:
    """The server's own counts over all requests so far: decode steps, their time, tokens that they emitted."""

    steps: float
    step_seconds: float
    emitted: float

    def since(self, earlier: StepCounters) -> dict[str, float] | None:
        """Means over the steps between two readings, named as in the request_end line; None without a step."""
        steps = self.steps - earlier.steps
        if steps <= 0:
            return None
        return {
            "average_iteration_ms": (self.step_seconds - earlier.step_seconds) / steps * 1e3,
            "average_accept_length": (self.emitted - earlier.emitted) / steps,
        }


def read_counters(url: str) -> StepCounters | None:
    """The step counters of /metrics on the server of `url`; None where it does not report them."""
    address = urllib.parse.urlunsplit(urllib.parse.urlsplit(url)._replace(path="/metrics", query="", fragment=""))
    try:
        with urllib.request.urlopen(address, timeout=10) as answer:
            text = answer.read().decode()
    except (OSError, http.client.HTTPException, UnicodeDecodeError):
        return None
    totals: dict[str, float] = {}
    for line in text.splitlines():
        if line.startswith("dsuf_"):
            name, _, value = line.rpartition(" ")
            totals[name.partition("{")[0]] = totals.get(name.partition("{")[0], 0.0) + float(value)
    try:
        return StepCounters(
            steps=totals["dsuf_accept_length_count"],
            step_seconds=totals["dsuf_request_decode_time_seconds_sum"],
            emitted=totals["dsuf_accept_length_sum"],
        )
    except KeyError:
        return None


def steps_since(url: str, earlier: StepCounters | None) -> dict[str, float] | None:
    """Mean step time and accepted length of the request that just ended; waits briefly until it is counted."""
    if earlier is None:
        return None
    deadline = time.monotonic() + SETTLE_S
    while True:
        counters = read_counters(url)
        found = counters.since(earlier) if counters else None
        if found or time.monotonic() > deadline:
            return found
        time.sleep(0.02)
