"""Token ids of a text completion to its events or its one body."""

from __future__ import annotations

import codecs
import time
from typing import Any, Literal

import msgspec

from dsuf.engine.messages import Admitted, TokenLogprobs, Tokens
from dsuf.text.events import Event, StopText, finite
from dsuf.text.output import FINGERPRINT, Reply
from dsuf.text.prompt import ChatText, Prompt


class CompletionReply:
    """The answer to one prompt, as it comes; used as `dsuf.text.output.Reply` is."""

    def __init__(self, text: ChatText, prompt: Prompt, reply_id: str) -> None:
        self.id = reply_id
        self.completion_tokens = 0  # without an ending EOS
        self.reasoning_tokens: int | None = None
        self.finish_reason: str | None = None
        self.invalid_tool_calls = 0  # there are no tools here
        self._prompt, self._bytes_of = prompt, text.vocabulary.bytes_of
        self._text = StopText(prompt.stops)
        self._usage: dict[str, Any] = {}
        self._pieces: list[str] = []  # of an answer that is not streamed
        self._logprobs = _Logprobs(self._bytes_of, prompt) if prompt.sampling.logprobs is not None else None
        self._head = {
            "id": reply_id,
            "object": "text_completion",
            "created": int(time.time()),
            "model": prompt.model,
            "system_fingerprint": FINGERPRINT,
        }

    @property
    def stops(self) -> tuple[str, ...]:
        """Strings that end the answer."""
        return self._prompt.stops

    @property
    def finished(self) -> bool:
        """True after the end, and as soon as a stop string matched: the engine must then be told to stop."""
        return self.finish_reason is not None

    def ready(self, event: Admitted) -> list[Event]:
        """Prefill has started: the prompt, where it is to be repeated."""
        self._usage = {
            "prompt_tokens": event.prompt_tokens,
            "prompt_tokens_details": {"cached_tokens": event.cached_tokens},
            "prompt_cache_hit_tokens": event.cached_tokens,
            "prompt_cache_miss_tokens": event.prompt_tokens - event.cached_tokens,
        }
        return self._emit(self._prompt.echoed)

    def tokens(self, event: Tokens) -> list[Event]:
        """What one or more steps emitted; ids after the end of a stop string are dropped."""
        given = ""
        for i, token in enumerate(event.ids):
            if token == self._prompt.eos_id:  # never text; under ignore_eos it counts
                self.completion_tokens += self._prompt.ignore_eos
                continue
            self.completion_tokens += 1
            given += self._text.feed(self._bytes_of[token])
            if self._logprobs is not None:
                self._logprobs.add(token, event.logprobs[i])
            if self._text.stopped:
                return self._emit(given, "stop")
        return self._emit(given)

    def finish(self, reason: Literal["stop", "length"]) -> list[Event]:
        """The engine has ended the answer: what was held back, the finish chunk and, if asked for, the usage chunk."""
        return self._emit(self._text.flush(), reason)

    def body(self) -> str:
        """The whole response, after the end of an answer that is not streamed."""
        if self._prompt.stream or not self.finished:
            raise RuntimeError("body() before the end of an answer that is not streamed")
        logprobs = self._logprobs and self._logprobs.take()
        return _encode(self._document("".join(self._pieces), logprobs) | {"usage": self._usage})

    def close(self) -> None:
        """There is nothing to give up."""

    def _emit(self, text: str, reason: str | None = None) -> list[Event]:
        self.finish_reason = reason
        if reason is not None:
            count = self.completion_tokens
            self._usage |= {"completion_tokens": count, "total_tokens": self._usage["prompt_tokens"] + count}
        if not self._prompt.stream:
            self._pieces.append(text)
            return []
        logprobs = self._logprobs and self._logprobs.take()
        if not text and not logprobs and reason is None:
            return []
        document = self._document(text, logprobs)
        if reason is not None:
            document["usage"] = self._usage
        elif self._prompt.include_usage:
            document["usage"] = None
        events = [Event(_encode(document))]
        if reason is not None and self._prompt.include_usage:
            events.append(Event(_encode({**document, "choices": []})))
        return events

    def _document(self, text: str, logprobs: dict[str, Any] | None) -> dict[str, Any]:
        choice = {"index": 0, "text": text, "logprobs": logprobs, "finish_reason": self.finish_reason}
        return {**self._head, "choices": [choice]}


class _Logprobs:
    """The protocol's four parallel lists. A token that is part of a character is shown as its bytes."""

    def __init__(self, bytes_of: tuple[bytes, ...], prompt: Prompt) -> None:
        self._bytes_of, self._offset = bytes_of, len(prompt.echoed)
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._lists = self._empty()

    def add(self, token: int, given: TokenLogprobs) -> None:
        """One more token."""
        logprob, top = finite(given)
        text = self._spelled(token)
        for name, value in (
            ("tokens", text),
            ("token_logprobs", logprob),
            ("top_logprobs", {self._spelled(other): value for other, value in top}),
            ("text_offset", self._offset),
        ):
            self._lists[name].append(value)
        self._offset += len(self._decoder.decode(self._bytes_of[token]))

    def take(self) -> dict[str, Any] | None:
        """What was added since the last time, if anything."""
        taken, self._lists = self._lists, self._empty()
        return taken if taken["tokens"] else None

    def _empty(self) -> dict[str, Any]:
        return {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}

    def _spelled(self, token: int) -> str:
        try:
            return self._bytes_of[token].decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in self._bytes_of[token])


AnyReply = Reply | CompletionReply


def _encode(document: dict[str, Any]) -> str:
    return msgspec.json.encode(document).decode()
