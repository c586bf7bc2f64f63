"""Arguments of the tool calls in an answer, to count those that are no JSON.

The parser hands arguments on as the model wrote them: a value that is declared to be JSON and is not, or a name without
quotes, reaches the client, whose own parser then fails. Nothing can be done about it here, but it should be seen.
"""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import msgspec

from dsuf.text.protocols import CHAT, MESSAGES, RESPONSES, Protocol

_MARK = {  # of the events that bear arguments; within a string its quotes would be escaped
    CHAT.name: '"arguments":',
    RESPONSES.name: '"response.function_call_arguments.done"',
    MESSAGES.name: '"partial_json":',
}


class ToolArguments:
    """Reads the events of one answer."""

    def __init__(self, protocol: Protocol) -> None:
        self._protocol, self._mark = protocol, _MARK[protocol.name]
        self._texts: defaultdict[int, str] = defaultdict(str)

    def see(self, event: str) -> None:
        """Take one event."""
        if self._mark in event:
            for index, text in self._pieces(msgspec.json.decode(event)):
                self._texts[index] += text

    @property
    def invalid(self) -> int:
        """Calls whose arguments are no JSON object."""
        return sum(not _is_object(text) for text in self._texts.values())

    def _pieces(self, event: dict[str, Any]) -> list[tuple[int, str]]:
        if self._protocol is CHAT:
            calls = event["choices"][0]["delta"].get("tool_calls") or []
            return [(call["index"], call["function"]["arguments"]) for call in calls]
        if self._protocol is RESPONSES:
            return [(event["output_index"], event["arguments"])]
        return [(event["index"], event["delta"]["partial_json"])]


def _is_object(text: str) -> bool:
    try:
        return isinstance(msgspec.json.decode(text or "{}"), dict)
    except msgspec.DecodeError:
        return False
