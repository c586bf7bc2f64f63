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
from dsuf.engine.messages import Admitted, TokenLogprobs, Tokens
from dsuf.text.prompt import ChatText, Prompt

DONE = dr.ChatCompletionResponse.sse_done_data()
_FINGERPRINT = f"fp_dsuf_{__version__}"
_LOGPROB_FLOOR = -9999.0  # JSON has no infinity; the public API writes this
_REASONS = {"stop": dr.InferenceFinishReason.Stop, "length": dr.InferenceFinishReason.Length}


class Reply:
    """The answer to one prompt, as it comes. One task at a time may use it.

    `ready`, `tokens` and `finish` return the JSON of the events to stream; with `prompt.stream` false they return
    nothing and `body` gives the whole response at the end.
    """

    def __init__(self, text: ChatText, prompt: Prompt, reply_id: str) -> None:
        self.id = reply_id
        self.completion_tokens = 0  # as usage reports them: without an ending EOS
        self.reasoning_tokens: int | None = None
        self.finish_reason: str | None = None  # the protocol's, set at the end
        self._prompt = prompt
        self._open_ids = text.vocabulary.open_ids
        options = prompt.converted.parsing_options
        self._one_by_one = bool(options.stop_sequences) or prompt.sampling.logprobs is not None
        generator = dr.ChatCompletionRequest.chunk_generator(prompt.converted, reply_id, prompt.model)
        self._processor = dr.StreamProcessor(generator, options, text.vocabulary.tokenizer)
        self._response: dr.ChatCompletionResponse | None = None
        self._ended = False

    @property
    def finished(self) -> bool:
        """True after the end, and as soon as a stop string matched: the engine must then be told to stop."""
        return self._ended

    def ready(self, event: Admitted) -> list[str]:
        """Prefill has started: the role chunk."""
        if not self._prompt.stream:
            self._response = dr.ChatCompletionResponse(
                self.id, self._prompt.model, int(time.time()), event.prompt_tokens, event.cached_tokens
            )
        usage = dr.PromptUsage(prompt_tokens=event.prompt_tokens, prompt_cache_hit_tokens=event.cached_tokens)
        return self._push(dr.InferenceChunk.ready(prompt_usage=usage, system_fingerprint=_FINGERPRINT))

    def tokens(self, event: Tokens) -> list[str]:
        """What one or more steps emitted; ids after the end of a stop string are dropped."""
        ids, logprobs = self._visible(event)
        if not ids:
            return []
        # A push whose last token ends inside a character is held back whole, and lost if the answer ends there.
        if not self._one_by_one and ids[-1] not in self._open_ids:
            self.completion_tokens += len(ids)
            return self._push(dr.InferenceChunk.tokens(ids))
        events: list[str] = []
        for i, token in enumerate(ids):
            self.completion_tokens += 1
            events += self._push(dr.InferenceChunk.tokens([token], logprobs and logprobs[i : i + 1]))
            if self._ended:
                break
        return events

    def finish(self, reason: Literal["stop", "length"]) -> list[str]:
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
        return ids, [_finite(entry) for entry in given]

    def _push(self, chunk: dr.InferenceChunk) -> list[str]:
        chunks = self._processor.push(chunk)
        self._ended = self._processor.finished
        if not self._prompt.stream:
            if self._response is not None:
                for item in chunks:
                    self._response.accumulate(item)
            return []
        events = [item.to_json() for item in chunks]
        if self._ended:
            events[-1:] = self._last_events(events[-1])
        return events

    def _last_events(self, finish_chunk: str) -> list[str]:
        """The finish chunk with the usage settled and, with include_usage, a second one that carries only the usage.

        DeepSeek documents the first form; benchmark clients read only the second.
        """
        document = self._settle(finish_chunk)
        events = [_encode(document)]
        if self._prompt.include_usage:
            events.append(_encode({**document, "choices": []}))
        return events

    def _settle(self, text: str) -> dict[str, Any]:
        """The last chunk or the response with this reply's own token count; notes how it ended."""
        document = msgspec.json.decode(text)
        usage = document["usage"]
        usage["completion_tokens"] = self.completion_tokens
        usage["total_tokens"] = usage["prompt_tokens"] + self.completion_tokens
        self.reasoning_tokens = (usage.get("completion_tokens_details") or {}).get("reasoning_tokens")
        self.finish_reason = document["choices"][0]["finish_reason"]
        return document


def _finite(entry: TokenLogprobs) -> tuple[float, list[tuple[int, float]]]:
    return max(entry.logprob, _LOGPROB_FLOOR), [(token, max(value, _LOGPROB_FLOOR)) for token, value in entry.top]


def _encode(document: dict[str, Any]) -> str:
    return msgspec.json.encode(document).decode()
