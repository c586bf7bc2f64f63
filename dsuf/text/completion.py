"""Text completions, the protocol of benchmark clients: a raw prompt in, its continuation out, no roles and no parsing.

The prompt is taken as it is: spellings of special tokens in it are special tokens, and a BOS stands in front of text
unless `add_special_tokens` is false. The answer's text is a function of the ids alone, whatever steps they come in.
"""

from __future__ import annotations

import secrets
import time
from typing import Annotated, Any

import msgspec

from dsuf.engine.messages import Sampling
from dsuf.errors import NotSupported, PromptError
from dsuf.text.fields import MAX_NEW_TOKENS, MAX_STOPS, Extensions, decode, not_supported
from dsuf.text.prompt import ChatText, Prompt, first, least_tokens
from dsuf.text.protocols import COMPLETIONS

DEFAULT_MAX_TOKENS = 16  # the protocol's
_Penalty = Annotated[float, msgspec.Meta(ge=-2, le=2)]


class _Body(Extensions):
    """A request; `prompt` is checked by hand."""

    model: str = ""
    prompt: Any = None
    suffix: str | None = None
    max_tokens: Annotated[int, msgspec.Meta(ge=1, le=MAX_NEW_TOKENS)] | None = None
    temperature: Annotated[float, msgspec.Meta(ge=0, le=2)] | None = None
    top_p: Annotated[float, msgspec.Meta(gt=0, le=1)] | None = None
    n: Annotated[int, msgspec.Meta(ge=1, le=1)] | None = None
    best_of: Annotated[int, msgspec.Meta(ge=1, le=1)] | None = None
    stream: bool | None = None
    logprobs: Annotated[int, msgspec.Meta(ge=0, le=20)] | None = None
    echo: bool | None = None
    stop: str | list[str] | None = None
    presence_penalty: _Penalty | None = None
    frequency_penalty: _Penalty | None = None
    add_special_tokens: bool = True


def completion(text: ChatText, body: bytes | dict[str, Any]) -> Prompt:
    """Parse, check and encode one body. Raises PromptError or NotSupported with the message for the client."""
    begin = time.perf_counter()
    try:
        asked = msgspec.convert(decode(body), _Body)
    except msgspec.ValidationError as error:
        raise PromptError(f"invalid request body: {error}") from None
    asked.refuse_unsupported()
    if asked.suffix:
        raise NotSupported("suffix (fill in the middle) is not supported by this build. Leave it out.")
    if asked.echo and asked.logprobs is not None:
        raise NotSupported("echo with logprobs is not supported by this build. Leave one of them out.")
    if asked.stream_options is not None and not asked.stream:
        raise PromptError("stream_options should be set along with stream = true")
    if asked.model not in text.names:
        raise PromptError(f"The supported API model names are {', '.join(text.names)}, but you passed {asked.model}.")
    ids = prompt_ids(text, asked.prompt, asked.add_special_tokens)
    room = text.context_limit - len(ids)
    if room < 1:
        raise PromptError(
            f"This model's maximum context length is {text.context_limit} tokens. However, the prompt has {len(ids)} "
            "tokens and leaves no room for an answer. Please shorten it."
        )
    limit = asked.max_tokens or DEFAULT_MAX_TOKENS
    if asked.max_tokens is not None and text.strict_max_tokens and limit > room:
        raise PromptError(
            f"This model's maximum context length is {text.context_limit} tokens. However, you requested "
            f"{len(ids) + limit} tokens ({len(ids)} in the prompt, {limit} in the completion)."
        )
    return Prompt(
        protocol=COMPLETIONS,
        model=asked.model,
        ids=ids,
        stream=bool(asked.stream),
        include_usage=asked.include_usage,
        include_steps=asked.include_steps,
        max_tokens=min(limit, room),
        sampling=_sampling(text, asked),
        eos_id=text.vocabulary.eos_id,
        ignore_eos=bool(asked.ignore_eos),
        min_tokens=min(least_tokens(asked.min_tokens, limit, default=0), room),
        tokenize_s=time.perf_counter() - begin,
        stops=_stops(asked.stop),
        echoed=join(text, ids[asked.add_special_tokens :] if isinstance(asked.prompt, str) else ids)
        if asked.echo
        else "",
    )


def prompt_ids(text: ChatText, prompt: Any, add_special_tokens: bool = True) -> list[int]:
    """Ids of a raw prompt: a text, token ids, or a list with one of them. Raises PromptError."""
    if isinstance(prompt, list) and prompt and isinstance(prompt[0], str | list):
        if len(prompt) > 1:
            raise not_supported("a list of several prompts")
        prompt = prompt[0]
    known = text.vocabulary
    if isinstance(prompt, str):
        ids = known.tokenizer.encode(prompt)
        return [known.bos_id, *ids] if add_special_tokens and ids[:1] != [known.bos_id] else ids
    size = len(known.bytes_of)
    if not isinstance(prompt, list) or not prompt or not all(type(i) is int and 0 <= i < size for i in prompt):
        raise PromptError(f"prompt: expected a text or a list of token ids from 0 to {size - 1}.")
    return prompt


def join(text: ChatText, ids: list[int]) -> str:
    """The text of token ids; what is no UTF-8 becomes U+FFFD."""
    return b"".join(text.vocabulary.bytes_of[i] for i in ids).decode(errors="replace")


def _sampling(text: ChatText, asked: _Body) -> Sampling:
    return Sampling(
        temperature=first(asked.temperature, text.defaults.temperature, 1.0),
        top_p=first(asked.top_p, text.defaults.top_p, 1.0),
        top_k=max(asked.top_k or 0, 0),
        seed=secrets.randbits(63) if asked.seed is None else asked.seed,
        logprobs=asked.logprobs,
    )


def _stops(stop: str | list[str] | None) -> tuple[str, ...]:
    stops = (stop,) if isinstance(stop, str) else tuple(stop or ())
    if len(stops) > MAX_STOPS or not all(stops):
        raise PromptError(f"Invalid 'stop': expected at most {MAX_STOPS} texts, none of them empty.")
    return stops
