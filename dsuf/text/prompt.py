"""A Chat Completions body to token ids, limits and sampling: the checks and defaults around deepseek-recipe.

The recipe parses, validates and renders; this file adds what it leaves out (model names, the newer field names,
extensions of benchmark clients, the checkpoint's own sampling defaults, the clamp to the room left) and refuses by name
what this build does not do. Ids come from the recipe's prompt encoding, which keeps special-token spellings inside user
text as plain text.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import deepseek_recipe as dr
import msgspec

from dsuf.engine.messages import Request, Sampling
from dsuf.errors import CheckpointError, NotSupported, PromptError
from dsuf.spec import Spec
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
MAX_NEW_TOKENS = 393_216  # the recipe's bound on max_tokens
NO_IMAGES = "image input is not supported by this build"


class _Extensions(msgspec.Struct):
    """Fields that the recipe ignores or that it fills where the request is silent."""

    ignore_eos: bool | None = None
    min_tokens: Annotated[int, msgspec.Meta(ge=0, le=MAX_NEW_TOKENS)] | None = None
    top_k: Annotated[int, msgspec.Meta(ge=-1, le=2**31 - 1)] | None = None  # -1 and 0: off
    min_p: Annotated[float, msgspec.Meta(ge=0, le=1)] | None = None
    repetition_penalty: Annotated[float, msgspec.Meta(gt=0, le=2)] | None = None
    logit_bias: dict[str, Any] | None = None
    temperature: float | None = None
    top_p: float | None = None
    max_tokens: int | None = None
    stream_options: dict[str, Any] | None = None

    def refuse_unsupported(self) -> None:
        """Raise NotSupported for a field that asks for something this build does not do."""
        for name, neutral in (("logit_bias", {}), ("min_p", 0), ("repetition_penalty", 1)):
            if getattr(self, name) not in (None, neutral):
                raise NotSupported(f"{name} is not supported by this build. Leave it out.")


class GenerationDefaults(msgspec.Struct, frozen=True):
    """generation_config.json: values for a request that is silent. Other keys of the file are not used."""

    temperature: Annotated[float, msgspec.Meta(ge=0, le=2)] | None = None
    top_p: Annotated[float, msgspec.Meta(gt=0, le=1)] | None = None
    max_new_tokens: Annotated[int, msgspec.Meta(ge=1, le=MAX_NEW_TOKENS)] | None = None


@dataclass(frozen=True)
class Prompt:
    """One request, ready for the engine and for parsing its answer."""

    model: str  # the name that the client sent
    ids: list[int]
    stream: bool
    include_usage: bool
    max_tokens: int
    sampling: Sampling
    eos_id: int
    ignore_eos: bool
    min_tokens: int
    tokenize_s: float
    converted: dr.ConversationRequest

    def request(self, request_id: str, priority: int = 0) -> Request:
        """The engine's request under `request_id`."""
        return Request(
            id=request_id,
            prompt_ids=self.ids,
            max_tokens=self.max_tokens,
            sampling=self.sampling,
            eos_ids=[self.eos_id],
            ignore_eos=self.ignore_eos,
            min_tokens=self.min_tokens,
            priority=priority,
        )


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
        try:
            defaults = msgspec.convert(dict(generation or {}), GenerationDefaults)
        except msgspec.ValidationError as error:
            raise CheckpointError(f"generation_config.json: {error}. Correct or remove the file.") from None
        return cls(
            read_vocabulary(text, spec),
            context_limit=context_limit,
            defaults=defaults,
            served_names=served_names,
            strict_max_tokens=strict_max_tokens,
        )

    def chat(self, body: bytes | dict[str, Any]) -> Prompt:
        """Parse, check, render and encode one Chat Completions body.

        Raises PromptError or NotSupported (both HTTP 400) with the message for the client. Costs about 0.1 ms for a
        short request and 2 s a million tokens, most of it without the interpreter lock.
        """
        begin = time.perf_counter()
        request, extensions = _parse(body)
        extensions.refuse_unsupported()
        model = request.model
        options = self._options_without_thinking if model in NO_THINKING_NAMES else self._options
        try:
            converted = request.convert(options)
        except (dr.ConversionError, ValueError) as error:
            raise PromptError(str(error)) from None
        conversation = converted.conversation
        _refuse_unsupported_content(conversation)
        ids = self._encoding.encode(conversation)
        max_tokens = self._max_tokens(converted, len(ids))
        # Clients take a `stop` with nothing in it for a broken server and retry (the official harness: EMPTY_RESPONSE).
        min_tokens = 1 if extensions.min_tokens is None else extensions.min_tokens
        if min_tokens > (limit := converted.inference_options.max_tokens or max_tokens):
            raise PromptError(f"min_tokens is {min_tokens}, expected at most max_tokens, which is {limit}.")
        return Prompt(
            model=model,
            ids=ids,
            stream=converted.stream,
            include_usage=bool((extensions.stream_options or {}).get("include_usage")),
            max_tokens=max_tokens,
            sampling=self._sampling(converted, extensions),
            eos_id=self.vocabulary.eos_id,
            ignore_eos=bool(extensions.ignore_eos),
            min_tokens=min(min_tokens, max_tokens),
            tokenize_s=time.perf_counter() - begin,
            converted=converted,
        )

    def _max_tokens(self, converted: dr.ConversationRequest, prompt_tokens: int) -> int:
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

    def _sampling(self, converted: dr.ConversationRequest, extensions: _Extensions) -> Sampling:
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
            temperature=_first(temperature, defaults.temperature, options.temperature),
            top_p=_first(top_p, defaults.top_p, options.top_p),
            top_k=max(extensions.top_k or 0, 0),
            seed=secrets.randbits(63) if options.seed is None else options.seed,
            logprobs=(options.top_logprobs or 0) if options.logprobs else None,
        )


def _parse(body: bytes | dict[str, Any]) -> tuple[dr.ChatCompletionRequest, _Extensions]:
    """The recipe's request, with the field names it does not know translated, and the fields that it ignores."""
    try:
        document = msgspec.json.decode(body) if isinstance(body, bytes) else body
        if not isinstance(document, dict):
            raise PromptError("invalid request body: expected a JSON object")
        edited = _translate(document)
        parsed = dr.ChatCompletionRequest(body if edited is document else msgspec.json.encode(edited))
        return parsed, msgspec.convert(edited, _Extensions)
    except msgspec.ValidationError as error:
        raise PromptError(f"invalid request body: {error}") from None
    except (msgspec.MsgspecError, UnicodeError) as error:
        raise PromptError(f"invalid JSON request: {error}") from None
    except RecursionError:
        raise PromptError("invalid JSON request: nested too deeply") from None
    except (dr.ConversionError, ValueError, TypeError) as error:
        raise PromptError(str(error)) from None


def _translate(document: dict[str, Any]) -> dict[str, Any]:
    """`max_completion_tokens` -> `max_tokens`, role `developer` -> `system`; the same object when nothing applies."""
    changed: dict[str, Any] = {}
    if document.get("max_tokens") is None and document.get("max_completion_tokens") is not None:
        changed["max_tokens"] = document["max_completion_tokens"]
    messages = document.get("messages")
    if isinstance(messages, list) and any(_is_developer(message) for message in messages):
        changed["messages"] = [{**m, "role": "system"} if _is_developer(m) else m for m in messages]
    return {**document, **changed} if changed else document


def _is_developer(message: Any) -> bool:
    return isinstance(message, dict) and message.get("role") == "developer"


def _refuse_unsupported_content(conversation: dr.Conversation) -> None:
    """Raise NotSupported for images and for output formats that only constrained sampling could promise."""
    if any(message.image_sources for message in conversation.messages):
        raise NotSupported(NO_IMAGES)
    if conversation.response_format in ("json_schema", "regex"):
        raise NotSupported(
            f"response_format {conversation.response_format} is not supported by this build, because it does not "
            "constrain sampling. Use json_object or leave it out."
        )


def _first(*values: float | None) -> float:
    """The first value that is given."""
    return next(value for value in values if value is not None)
