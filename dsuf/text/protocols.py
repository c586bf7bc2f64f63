"""The four protocols that a completion is asked for and answered in, as data: what differs between them.

Three are deepseek-recipe's; text completions have no recipe class and their own files.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import deepseek_recipe as dr

from dsuf.text.fields import chat_fields, messages_fields, responses_fields

_STOPPED = {
    "stop": "stop", "length": "length", "tool_calls": "tool_calls", "content_filter": "content_filter",
    "end_turn": "stop", "stop_sequence": "stop", "max_tokens": "length", "tool_use": "tool_calls",
}  # fmt: skip


@dataclass(frozen=True)
class Protocol:
    """One way to ask and to answer."""

    name: str  # in the log
    id_prefix: str
    fields: Callable[[dict[str, Any]], dict[str, Any]] | None = None  # the raw body as the recipe must see it
    request: Any = None  # the recipe's classes
    response: Any = None
    done: str | None = None  # data of the last event of a stream


CHAT = Protocol(
    "chat", "chatcmpl-", chat_fields, dr.ChatCompletionRequest, dr.ChatCompletionResponse,
    dr.ChatCompletionResponse.sse_done_data(),
)  # fmt: skip
RESPONSES = Protocol("responses", "resp_", responses_fields, dr.ResponsesRequest, dr.ResponsesResponse)
MESSAGES = Protocol("messages", "msg_", messages_fields, dr.MessagesRequest, dr.MessagesResponse)
COMPLETIONS = Protocol("completions", "cmpl-", done=CHAT.done)


def settle(protocol: Protocol, document: dict[str, Any], completion_tokens: int) -> tuple[str, int | None]:
    """Write the token count into a response or a stream's last event; returns (finish reason, reasoning tokens).

    The reason is in OpenAI's words for every protocol; reasoning tokens are None where the protocol has no place for
    them. A document without usage is left as it is.
    """
    holder = document.get("response", document) if protocol is RESPONSES else document
    usage = holder["usage"]
    if protocol is CHAT:
        usage["completion_tokens"] = completion_tokens
        usage["total_tokens"] = usage["prompt_tokens"] + completion_tokens
        reason, details = document["choices"][0]["finish_reason"], usage.get("completion_tokens_details")
    elif protocol is RESPONSES:
        usage["output_tokens"] = completion_tokens
        usage["total_tokens"] = usage["input_tokens"] + completion_tokens
        details, reason = usage.get("output_tokens_details"), "stop"
        if holder["status"] == "incomplete":
            reason = "length"
        elif any(item["type"] == "function_call" for item in holder["output"]):
            reason = "tool_calls"
    else:
        usage["output_tokens"] = completion_tokens
        reason, details = document.get("delta", document)["stop_reason"], None
    return _STOPPED.get(reason, reason), (details or {}).get("reasoning_tokens")
