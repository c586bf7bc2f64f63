"""Request bodies before deepseek-recipe sees them: fields it does not know, and what it would pass over in silence.

What asks for something that this build does not do is refused by name. Fields that only hint (`user`, `metadata`,
`store`, `service_tier`, `prediction`, penalties, which the public API ignores as well) are accepted without effect.
"""

from __future__ import annotations

from typing import Annotated, Any

import msgspec

from dsuf.errors import NotSupported, PromptError

MAX_NEW_TOKENS = 393_216  # the recipe's bound on max_tokens
MAX_STOPS = 16
_RESPONSES_TOOLS = ("function", "namespace", "custom", "web_search", "web_search_preview")  # the recipe judges these
_LOGPROBS = "message.output_text.logprobs"


class Extensions(msgspec.Struct):
    """Fields that the recipe ignores or that it fills where the request is silent."""

    ignore_eos: bool | None = None
    min_tokens: Annotated[int, msgspec.Meta(ge=0, le=MAX_NEW_TOKENS)] | None = None
    top_k: Annotated[int, msgspec.Meta(ge=-1, le=2**31 - 1)] | None = None  # -1 and 0: off
    min_p: Annotated[float, msgspec.Meta(ge=0, le=1)] | None = None
    repetition_penalty: Annotated[float, msgspec.Meta(gt=0, le=2)] | None = None
    logit_bias: dict[str, Any] | None = None
    temperature: float | None = None
    top_p: float | None = None
    seed: Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)] | None = None
    stream_options: dict[str, Any] | None = None

    def refuse_unsupported(self) -> None:
        """Raise NotSupported for a field that asks for something this build does not do."""
        for name, neutral in (("logit_bias", {}), ("min_p", 0), ("repetition_penalty", 1)):
            if getattr(self, name) not in (None, neutral):
                raise not_supported(name)

    @property
    def include_usage(self) -> bool:
        """Whether a stream ends with a chunk that carries only the usage."""
        return bool((self.stream_options or {}).get("include_usage"))

    @property
    def include_steps(self) -> bool:
        """Whether the chunks of a stream say how many tokens and decode steps there were so far: an extension."""
        return bool((self.stream_options or {}).get("include_steps"))


def decode(body: bytes | dict[str, Any]) -> dict[str, Any]:
    """The body as an object. Raises PromptError for what is none."""
    try:
        document = msgspec.json.decode(body) if isinstance(body, bytes) else body
    except (msgspec.MsgspecError, UnicodeError) as error:
        raise PromptError(f"invalid JSON request: {error}") from None
    except RecursionError:
        raise PromptError("invalid JSON request: nested too deeply") from None
    if not isinstance(document, dict):
        raise PromptError("invalid request body: expected a JSON object")
    return document


def not_supported(name: str) -> NotSupported:
    """The refusal of one field."""
    return NotSupported(f"{name} is not supported by this build. Leave it out.")


def chat_fields(document: dict[str, Any]) -> dict[str, Any]:
    """`max_completion_tokens` -> `max_tokens`, role `developer` -> `system`; the same object when nothing applies."""
    _refuse(document, "functions", "function_call", "audio", "web_search_options")
    if any(modality != "text" for modality in _list(document, "modalities")):
        raise not_supported("a modality other than text")
    if document.get("best_of") not in (None, 1):
        raise not_supported("best_of")
    changed: dict[str, Any] = {}
    if document.get("max_tokens") is None and document.get("max_completion_tokens") is not None:
        changed["max_tokens"] = document["max_completion_tokens"]
    messages = document.get("messages")
    if isinstance(messages, list) and any(_is_developer(message) for message in messages):
        changed["messages"] = [{**m, "role": "system"} if _is_developer(m) else m for m in messages]
    return {**document, **changed} if changed else document


def responses_fields(document: dict[str, Any]) -> dict[str, Any]:
    """Responses are stateless here: what names something stored is refused, as are tools that a server would run."""
    _refuse(document, "previous_response_id", "conversation", "background", "prompt")
    for tool in _list(document, "tools"):
        kind = tool.get("type") if isinstance(tool, dict) else None
        if isinstance(kind, str) and not kind.startswith(_RESPONSES_TOOLS):
            raise not_supported(f"the tool type {kind}")
    for item in _list(document, "input"):
        if isinstance(item, dict) and item.get("type") == "item_reference":
            raise not_supported("item_reference, which names something stored,")
        _refuse_parts(item, "input_file")
    if _LOGPROBS in _list(document, "include") and document.get("top_logprobs") is None:
        return {**document, "top_logprobs": 0}
    return document


def messages_fields(document: dict[str, Any]) -> dict[str, Any]:
    """What the recipe would drop: tools of other servers, containers, documents."""
    _refuse(document, "mcp_servers", "container")
    for message in _list(document, "messages"):
        _refuse_parts(message, "document")
    return document


def output_schema(document: dict[str, Any]) -> str | None:
    """The JSON schema of Messages' `output_config.format`, which the recipe ignores. Raises PromptError."""
    config = document.get("output_config")
    asked = config.get("format") if isinstance(config, dict) else None
    if asked is None:
        return None
    if not isinstance(asked, dict) or asked.get("type") != "json_schema" or not isinstance(asked.get("schema"), dict):
        raise PromptError('output_config.format: expected {"type": "json_schema", "schema": {...}}.')
    return msgspec.json.encode(asked["schema"]).decode()


def several_calls(document: dict[str, Any]) -> bool:
    """Whether the answer may hold more than one tool call."""
    choice = document.get("tool_choice")
    alone = isinstance(choice, dict) and choice.get("disable_parallel_tool_use") is True
    return document.get("parallel_tool_calls") is not False and not alone


def _refuse(document: dict[str, Any], *names: str) -> None:
    for name in names:
        if document.get(name) not in (None, False, [], {}, "none"):
            raise not_supported(name)


def _refuse_parts(message: Any, kind: str) -> None:
    """Raise NotSupported when a message, or a tool's result in it, has a content part of `kind`."""
    content = message.get("content") if isinstance(message, dict) else None
    for part in content if isinstance(content, list) else ():
        if isinstance(part, dict):
            if part.get("type") == kind:
                raise not_supported(f"the content type {kind}")
            _refuse_parts(part, kind)


def _list(document: dict[str, Any], name: str) -> list[Any]:
    value = document.get(name)
    return value if isinstance(value, list) else []


def _is_developer(message: Any) -> bool:
    return isinstance(message, dict) and message.get("role") == "developer"
