"""Token ids of a text or of a chat, and the text of ids: what /tokenize and /detokenize answer."""

from __future__ import annotations

from typing import Any

import msgspec

from dsuf.errors import PromptError
from dsuf.text.completion import join, prompt_ids
from dsuf.text.fields import decode
from dsuf.text.prompt import MODEL_NAMES, ChatText
from dsuf.text.protocols import CHAT


class _Spelled(msgspec.Struct):
    tokens: list[int]


class _Flags(msgspec.Struct):
    add_special_tokens: bool = True


def tokenize(text: ChatText, body: bytes | dict[str, Any]) -> list[int]:
    """Ids of `{prompt}` as text completions take it, or of `{messages, ...}` as a chat. Raises PromptError."""
    document = decode(body)
    if "messages" in document:
        return text.count(CHAT, {"model": MODEL_NAMES[0], **document})
    return prompt_ids(text, document.get("prompt"), _convert(document, _Flags).add_special_tokens)


def detokenize(text: ChatText, body: bytes | dict[str, Any]) -> str:
    """The text of `{tokens}`, special tokens by their spelling. Raises PromptError."""
    ids, size = _convert(decode(body), _Spelled).tokens, len(text.vocabulary.bytes_of)
    if not all(0 <= token < size for token in ids):
        raise PromptError(f"tokens: expected token ids from 0 to {size - 1}.")
    return join(text, ids)


def _convert(document: dict[str, Any], kind: type[Any]) -> Any:
    try:
        return msgspec.convert(document, kind)
    except msgspec.ValidationError as error:
        raise PromptError(f"invalid request body: {error}") from None
