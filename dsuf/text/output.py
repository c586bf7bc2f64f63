"""Token ids of one answer to protocol events: reasoning, answer and tool calls, stop strings, usage.

deepseek-recipe parses and formats. This file decides how ids are pushed, so that the text is the same for any split of
the ids into steps, and settles the usage: the recipe forgets tokens that end inside a character, and every client must
find the count where it looks for it.
"""

from __future__ import annotations

import time
from typing import Any, Literal

import deepseek_recipe as dr
import msgspec

from dsuf import __version__
from dsuf.engine.messages import Admitted, Tokens
from dsuf.text.events import Event, finite
from dsuf.text.prompt import ChatText, Prompt
from dsuf.text.protocols import CHAT, MESSAGES, RESPONSES, settle
from dsuf.text.tool_calls import ToolArguments

FINGERPRINT = f"fp_dsuf_{__version__}"
_REASONS = {"stop": dr.InferenceFinishReason.Stop, "length": dr.InferenceFinishReason.Length}


class Reply:
    """The answer to one prompt, as it comes. One task at a time may use it.

    `ready`, `tokens` and `finish` return the events to stream; with `prompt.stream` false they return
    nothing and `body` gives the whole response at the end.
    """

    def __init__(self, text: ChatText, prompt: Prompt, reply_id: str) -> None:
        self.id = reply_id
        self.completion_tokens = 0  # as usage reports them: without an ending EOS
        self.reasoning_tokens: int | None = None
        self.finish_reason: str | None = None  # in Chat Completions' words, set at the end
        self.invalid_tool_calls = 0  # whose arguments are no JSON, set at the end
        self._prompt, self._protocol = prompt, prompt.protocol
        self._open_ids = text.vocabulary.open_ids
        options = prompt.converted.parsing_options
        if options.thinking_initial_stage is None and prompt.converted.conversation.messages[-1].prefix:
            # what continues an answer may begin with a line break, which the parser drops from a new one
            options.thinking_initial_stage = dr.ThinkingInitialStage.ContentContinuation
        self._one_by_one = bool(options.stop_sequences) or prompt.sampling.logprobs is not None
        generator = self._protocol.request.chunk_generator(prompt.converted, reply_id, prompt.model)
        if self._protocol is RESPONSES:
            generator = generator.with_namespace_tool_map(prompt.tool_names).with_echo(prompt.echo)
        self._processor = dr.StreamProcessor(generator, options, text.vocabulary.tokenizer)
        self._arguments = ToolArguments(self._protocol) if options.parse_tool_calls else None
        self._response: Any = None  # accumulates an answer that is not streamed
        self._ended = False

    @property
    def stops(self) -> list[str]:
        """Strings that end the answer."""
        return self._prompt.converted.parsing_options.stop_sequences

    @property
    def finished(self) -> bool:
        """True after the end, and as soon as a stop string matched: the engine must then be told to stop."""
        return self._ended

    def ready(self, event: Admitted) -> list[Event]:
        """Prefill has started: the protocol's opening events."""
        if not self._prompt.stream:
            self._response = self._protocol.response(
                self.id, self._prompt.model, int(time.time()), event.prompt_tokens, event.cached_tokens
            )
        usage = dr.PromptUsage(prompt_tokens=event.prompt_tokens, prompt_cache_hit_tokens=event.cached_tokens)
        return self._push(dr.InferenceChunk.ready(prompt_usage=usage, system_fingerprint=FINGERPRINT))

    def tokens(self, event: Tokens) -> list[Event]:
        """What one or more steps emitted; ids after the end of a stop string are dropped."""
        ids, logprobs = self._visible(event)
        if not ids:
            return []
        # A push whose last token ends inside a character is held back whole, and lost if the answer ends there.
        if not self._one_by_one and ids[-1] not in self._open_ids:
            self.completion_tokens += len(ids)
            return self._push(dr.InferenceChunk.tokens(ids))
        events: list[Event] = []
        for i, token in enumerate(ids):
            self.completion_tokens += 1
            events += self._push(dr.InferenceChunk.tokens([token], logprobs and logprobs[i : i + 1]))
            if self._ended:
                break
        return events

    def finish(self, reason: Literal["stop", "length"]) -> list[Event]:
        """The engine has ended the answer: what was held back, the finish chunk and, if asked for, the usage chunk."""
        return self._push(dr.InferenceChunk.finish(_REASONS[reason]))

    def body(self) -> str:
        """The whole response, after the end of an answer that is not streamed."""
        if self._response is None or not self._ended:
            raise RuntimeError("body() before the end of an answer that is not streamed")
        return _encode(self._settle(self._response.to_json()))

    def close(self) -> None:
        """Give up the parser without completing the answer."""
        self._processor.close()

    def _visible(self, event: Tokens) -> tuple[list[int], list[tuple[float, list[tuple[int, float]]]] | None]:
        """Ids and logprobs to push. An EOS never is: it would come out as text. Under ignore_eos it counts."""
        ids, given, eos = event.ids, event.logprobs, self._prompt.eos_id
        if eos in ids:
            kept = [i for i, token in enumerate(ids) if token != eos]
            if self._prompt.ignore_eos:
                self.completion_tokens += len(ids) - len(kept)
            ids, given = [ids[i] for i in kept], given and [given[i] for i in kept]
        if self._prompt.sampling.logprobs is None or given is None:
            return ids, None
        return ids, [finite(entry) for entry in given]

    def _push(self, chunk: dr.InferenceChunk) -> list[Event]:
        chunks = self._processor.push(chunk)
        self._ended = self._processor.finished
        if self._arguments is not None:
            for item in chunks:
                self._arguments.see(item.to_json())
        if not self._prompt.stream:
            if self._response is not None:
                for item in chunks:
                    self._response.accumulate(item)
            return []
        response = self._protocol.response
        events = [Event(item.to_json(), response.sse_event_name(item)) for item in chunks]
        if self._ended:
            self._settle_last(events)
        return events

    def _settle_last(self, events: list[Event]) -> None:
        """The event with the usage gets our count and, in a chat with include_usage, a successor with the usage alone.

        DeepSeek documents the first form; benchmark clients read only the second.
        """
        last = len(events) - (2 if self._protocol is MESSAGES else 1)  # before message_stop
        document = self._settle(events[last].data)
        events[last] = Event(_encode(document), events[last].name)
        if self._prompt.include_usage and self._protocol is CHAT:
            events.append(Event(_encode({**document, "choices": []})))

    def _settle(self, text: str) -> dict[str, Any]:
        """The last event or the response with this reply's own token count; notes how it ended."""
        document = msgspec.json.decode(text)
        self.finish_reason, self.reasoning_tokens = settle(self._protocol, document, self.completion_tokens)
        if self.finish_reason == "tool_calls" and self._arguments is not None:
            self.invalid_tool_calls = self._arguments.invalid
        return document


def _encode(document: dict[str, Any]) -> str:
    return msgspec.json.encode(document).decode()
