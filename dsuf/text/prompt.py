"""Requests of the chat protocols to token ids, limits and sampling: the checks and defaults around deepseek-recipe.

The recipe parses, validates and renders; this file adds what it leaves out (model names, the checkpoint's own sampling
defaults, the clamp to the room left, constraints on the answer) and refuses by name what this build does not do. Ids
come from the recipe's prompt encoding, which keeps special-token spellings inside user text as plain text.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any

import deepseek_recipe as dr
import msgspec

from dsuf.engine.messages import Request, Sampling
from dsuf.errors import CheckpointError, NotSupported, PromptError
from dsuf.spec import Spec
from dsuf.text.answer_grammar import answer_grammar
from dsuf.text.fields import MAX_NEW_TOKENS, Extensions, decode
from dsuf.text.protocols import CHAT, MESSAGES, RESPONSES, Protocol
from dsuf.text.segments import PromptEncoder, Rendering, TextHash
from dsuf.text.vocabulary import Vocabulary, read_vocabulary

MODEL_NAMES = (
    "deepseek-v4.1-flash",  # canonical
    "deepseek-flash",  # the public API's name
    "deepseek-v4-flash",  # what the official harness asks for
    "deepseek-chat",
    "deepseek-reasoner",
    "DeepSeek-V4.1-Flash",
    "deepseek-ai/DeepSeek-V4.1-Flash",
)
NO_THINKING_NAMES = ("deepseek-chat",)  # keeps its older meaning: thinking off unless asked for
THINKING_MIN_TOP_P = 0.95  # the recipe says so in single precision
OTHER_NAMES = "claude"  # Messages only: names that begin so are served by this model, as the public API does
TINY_PROMPT, TINY_ANSWER = 1024, 64  # tokens; the official harness asks for a title of 64 beside each conversation
NO_IMAGES = "image input is not supported by this build"


class GenerationDefaults(msgspec.Struct, frozen=True):
    """generation_config.json: values for a request that is silent. Other keys of the file are not used."""

    temperature: Annotated[float, msgspec.Meta(ge=0, le=2)] | None = None
    top_p: Annotated[float, msgspec.Meta(gt=0, le=1)] | None = None
    max_new_tokens: Annotated[int, msgspec.Meta(ge=1, le=MAX_NEW_TOKENS)] | None = None


def read_defaults(generation: Mapping[str, Any] | None) -> GenerationDefaults:
    """What a parsed generation_config.json says. Raises CheckpointError for a value out of its range."""
    try:
        return msgspec.convert(dict(generation or {}), GenerationDefaults)
    except msgspec.ValidationError as error:
        raise CheckpointError(f"generation_config.json: {error}. Correct or remove the file.") from None


@dataclass(frozen=True)
class Prompt:
    """One request, ready for the engine and for formatting its answer."""

    protocol: Protocol
    model: str  # the name that the client sent
    ids: list[int]
    stream: bool
    include_usage: bool
    include_steps: bool
    max_tokens: int
    sampling: Sampling
    eos_id: int
    ignore_eos: bool
    min_tokens: int
    tokenize_s: float
    constraint: str | None = None
    converted: dr.ConversationRequest | None = None  # of a recipe's protocol
    tool_names: dict[str, tuple[str, str]] | None = None  # Responses: names of namespace tools
    echo: dr.ResponsesEcho | None = None  # Responses: settings that the answer repeats
    segments: list[tuple[int, bytes]] = field(default_factory=list)  # the last ones: ids up to the end, digest
    text_hash: TextHash | None = None  # of the whole prompt; goes on with the answer
    lease: bytes = b""  # what the engine is told about a saved prefix
    tenant: str = ""  # whose saved prefixes may be used
    look_up: str | None = None  # how the search for a saved prefix ended: found, or in one word why not
    stops: tuple[str, ...] = ()  # text completions: their own stop strings
    echoed: str = ""  # text completions: the prompt, where it is asked for in front of the answer

    def request(self, request_id: str) -> Request:
        """The engine's request under `request_id`. A title or the like, short in and out, goes before others."""
        is_tiny = len(self.ids) <= TINY_PROMPT and self.max_tokens <= TINY_ANSWER
        return Request(
            id=request_id,
            prompt_ids=self.ids,
            max_tokens=self.max_tokens,
            sampling=self.sampling,
            eos_ids=[self.eos_id],
            ignore_eos=self.ignore_eos,
            min_tokens=self.min_tokens,
            constraint=self.constraint,
            priority=int(is_tiny),
            segments=self.segments,
            lease=self.lease,
            tenant=self.tenant,
        )


@dataclass(frozen=True)
class _Asked:
    """A body of a chat protocol, understood."""

    model: str
    document: dict[str, Any]
    converted: dr.ConversationRequest
    extensions: Extensions
    tool_names: dict[str, tuple[str, str]] | None
    echo: dr.ResponsesEcho | None


@dataclass(frozen=True)
class Unencoded:
    """A request that was understood and rendered, but not encoded yet: a prefix of it may be saved somewhere."""

    text: ChatText
    protocol: Protocol
    asked: _Asked
    rendering: Rendering
    seconds: float  # spent so far

    @property
    def digests(self) -> list[bytes]:
        """By which a saved prefix is looked up, the longest first."""
        return self.rendering.longest_first

    def encode(self, prefix: Sequence[int] = ()) -> Prompt | None:
        """The prompt, its first ids being `prefix`; None when these do not read as its text. Raises as `prompt`."""
        begin, encoder = time.perf_counter(), self.text.encoder
        pieces = encoder.prefix(self.rendering, prefix) if prefix else 0
        if pieces is None:
            return None
        ids = encoder.encode(self.rendering, prefix, pieces)
        made = self.text.made(self.protocol, self.asked, ids, begin - self.seconds)
        return replace(made, segments=encoder.segments(self.rendering, ids), text_hash=encoder.hash_of(self.rendering))


class ChatText:
    """Turns requests into prompts for one checkpoint. Safe to use from several threads."""

    def __init__(
        self,
        vocabulary: Vocabulary,
        *,
        context_limit: int,
        defaults: GenerationDefaults = GenerationDefaults(),  # noqa: B008  (frozen)
        served_names: Sequence[str] = (),
        strict_max_tokens: bool = False,
        tokenizer_json: str = "",
    ) -> None:
        self.vocabulary = vocabulary
        self.context_limit = context_limit
        self.defaults = defaults
        self.listed_names = tuple(dict.fromkeys((*served_names, MODEL_NAMES[0])))  # what GET /models shows
        self.names = tuple(dict.fromkeys((*self.listed_names, *MODEL_NAMES)))  # what a request may ask for
        self.strict_max_tokens = strict_max_tokens
        self._encoding = (
            dr.DeepseekV41Encoding().with_tokenizer(vocabulary.tokenizer).with_special_tokens(vocabulary.special_tokens)
        )
        self.encoder = PromptEncoder(vocabulary, self._encoding, tokenizer_json)
        self._options = (
            dr.ConversionOptions()
            .with_model_versions_by_name(dict.fromkeys(self.names, dr.ModelVersion.DeepseekV41Flash))
            .with_special_tokens(vocabulary.special_tokens)
        )
        self._options_without_thinking = self._options.with_default_thinking_mode(False)

    @classmethod
    def open(
        cls,
        tokenizer_path: Path | None,
        spec: Spec,
        *,
        context_limit: int,
        generation: Mapping[str, Any] | None = None,
        served_names: Sequence[str] = (),
        strict_max_tokens: bool = False,
    ) -> ChatText:
        """Read a V4.1 tokenizer.json and the parsed generation_config.json. CheckpointError for what does not fit."""
        if tokenizer_path is None:
            raise CheckpointError(
                "the checkpoint has no tokenizer.json, which chat needs. Put the model's tokenizer.json into the "
                "folder, or run token ids with `dsuf run --tokens FILE`."
            )
        try:
            text = Path(tokenizer_path).read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise CheckpointError(f"{tokenizer_path} cannot be read: {error}. Use the model's own file.") from None
        return cls(
            read_vocabulary(text, spec),
            context_limit=context_limit,
            defaults=read_defaults(generation),
            served_names=served_names,
            strict_max_tokens=strict_max_tokens,
            tokenizer_json=text,
        )

    def chat(self, body: bytes | dict[str, Any]) -> Prompt:
        """`prompt` for Chat Completions."""
        return self.prompt(CHAT, body)

    def prompt(self, protocol: Protocol, body: bytes | dict[str, Any]) -> Prompt:
        """Parse, check, render and encode one body of a chat protocol.

        Raises PromptError or NotSupported (both HTTP 400) with the message for the client. Costs about 0.1 ms for a
        short request and 2 s a million tokens, most of it without the interpreter lock.
        """
        begin = time.perf_counter()
        asked = self._parse(protocol, body)
        return self.made(protocol, asked, self._encode(asked.converted.conversation), begin)

    def begin(self, protocol: Protocol, body: bytes | dict[str, Any]) -> Unencoded:
        """`prompt` in two parts: this one parses, checks and renders. Raises as `prompt` does."""
        begin = time.perf_counter()
        asked = self._parse(protocol, body)
        _refuse_images(asked.converted.conversation)
        rendering = self.encoder.render(asked.converted.conversation)
        return Unencoded(self, protocol, asked, rendering, time.perf_counter() - begin)

    def made(self, protocol: Protocol, asked: _Asked, ids: list[int], begin: float) -> Prompt:
        """Limits and sampling for an encoded request; `begin` is when its work began."""
        converted, extensions = asked.converted, asked.extensions
        constraint = answer_grammar(protocol, asked.document, converted, extensions, self.vocabulary)
        max_tokens = self.max_tokens(converted, len(ids))
        limit = converted.inference_options.max_tokens or max_tokens
        return Prompt(
            protocol=protocol,
            model=asked.model,
            ids=ids,
            stream=converted.stream,
            include_usage=extensions.include_usage,
            include_steps=extensions.include_steps and protocol is CHAT,
            max_tokens=max_tokens,
            sampling=self._sampling(converted, extensions),
            eos_id=self.vocabulary.eos_id,
            ignore_eos=bool(extensions.ignore_eos),
            min_tokens=min(least_tokens(extensions.min_tokens, limit, default=1), max_tokens),
            tokenize_s=time.perf_counter() - begin,
            constraint=constraint and constraint.encode(),
            converted=converted,
            tool_names=asked.tool_names,
            echo=asked.echo,
        )

    def count(self, protocol: Protocol, body: bytes | dict[str, Any]) -> list[int]:
        """The prompt's ids alone, with no word on whether they leave room for an answer. Raises as `prompt` does."""
        return self._encode(self._parse(protocol, body).converted.conversation)

    def _parse(self, protocol: Protocol, body: bytes | dict[str, Any]) -> _Asked:
        document = decode(body)
        edited = protocol.fields(document)
        model = document.get("model")
        if protocol is MESSAGES and isinstance(model, str) and model.startswith(OTHER_NAMES):
            edited = {**edited, "model": MODEL_NAMES[0]}
        options = self._options_without_thinking if model in NO_THINKING_NAMES else self._options
        try:
            extensions = msgspec.convert(edited, Extensions)
            extensions.refuse_unsupported()
            unchanged = isinstance(body, bytes) and edited is document
            request = protocol.request(body if unchanged else msgspec.json.encode(edited))
            tool_names = request.namespace_tool_map(options) if protocol is RESPONSES else None
            echo = request.echo() if protocol is RESPONSES else None
            converted = request.convert(options)
        except msgspec.ValidationError as error:
            raise PromptError(f"invalid request body: {error}") from None
        except RecursionError:
            raise PromptError("invalid JSON request: nested too deeply") from None
        except UnicodeEncodeError:
            raise PromptError("invalid request body: found text that is no Unicode. Send it as UTF-8.") from None
        except (dr.ConversionError, ValueError, TypeError) as error:
            raise PromptError(str(error)) from None
        if not converted.conversation.messages:  # the recipe drops empty system messages and lone reasoning
            raise PromptError("Empty input messages: none of those given says anything. Add a user's.")
        return _Asked(model, document, converted, extensions, tool_names, echo)

    def _encode(self, conversation: dr.Conversation) -> list[int]:
        """Ids of the rendered prompt. Raises NotSupported for images."""
        _refuse_images(conversation)
        return self._encoding.encode(conversation)

    def max_tokens(self, converted: dr.ConversationRequest, prompt_tokens: int) -> int:
        """Tokens that may be made: as asked, else the checkpoint's default, else the recipe's; cut to the room left."""
        asked = converted.inference_options.max_tokens
        room = self.context_limit - prompt_tokens
        try:
            if room < 1:  # one more token makes the recipe refuse with the words that clients look for
                converted.resolve_max_tokens(self.context_limit + 1, self.context_limit)
            wanted = self.defaults.max_new_tokens if asked is None else asked
            if wanted is None or (asked is not None and self.strict_max_tokens):
                return converted.resolve_max_tokens(prompt_tokens, self.context_limit)
        except dr.ConversionError as error:
            raise PromptError(str(error)) from None
        return min(wanted, room)

    def _sampling(self, converted: dr.ConversationRequest, extensions: Extensions) -> Sampling:
        """Sampling as asked; the checkpoint's defaults, then the recipe's, where the request is silent.

        With thinking the public API ignores a given temperature, so that one counts as silent, and the recipe raises
        top_p to 0.95. Without thinking the recipe would drop a given top_p; here it counts.
        """
        options, defaults = converted.inference_options, self.defaults
        temperature, top_p = extensions.temperature, extensions.top_p
        if converted.conversation.thinking_mode:
            temperature = None
            top_p = None if top_p is None else max(top_p, THINKING_MIN_TOP_P)
        return Sampling(
            temperature=first(temperature, defaults.temperature, options.temperature),
            top_p=first(top_p, defaults.top_p, options.top_p),
            top_k=max(extensions.top_k or 0, 0),
            seed=secrets.randbits(63) if extensions.seed is None else extensions.seed,
            logprobs=(options.top_logprobs or 0) if options.logprobs else None,
        )


def _refuse_images(conversation: dr.Conversation) -> None:
    if any(message.image_sources for message in conversation.messages):
        raise NotSupported(NO_IMAGES)


def first(*values: float | None) -> float:
    """The first value that is given."""
    return next(value for value in values if value is not None)


def least_tokens(asked: int | None, limit: int, default: int) -> int:
    """min_tokens as asked. Raises PromptError above `limit`.

    The default is 1: clients take a `stop` with nothing in it for a broken server and retry (the official harness:
    EMPTY_RESPONSE).
    """
    least = default if asked is None else asked
    if least > limit:
        raise PromptError(f"min_tokens is {least}, expected at most max_tokens, which is {limit}.")
    return least
