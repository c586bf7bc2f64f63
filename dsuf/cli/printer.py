"""What an answer looks like on stdout: text piece by piece, or bare token ids."""

from __future__ import annotations

from typing import Any

import msgspec

from dsuf.engine.messages import Admitted, Finished, Tokens
from dsuf.text.events import Event
from dsuf.text.output import Reply
from dsuf.text.prompt import ChatText, Prompt


class TextPrinter:
    """Prints reasoning and answer as they come and keeps both; `silent` only keeps."""

    def __init__(self, text: ChatText, prompt: Prompt, silent: bool = False) -> None:
        self.reasoning, self.content = "", ""
        self._silent = silent
        self._reply = Reply(text, prompt, "run")
        self._take(self._reply.ready(Admitted("run", len(prompt.ids))))

    def tokens(self, event: Tokens) -> None:
        """Print what became certain."""
        self._take(self._reply.tokens(event))

    def close(self, finished: Finished) -> None:
        """Print what was held back, and end the line."""
        if finished.reason in ("stop", "length") and not self._reply.finished:
            self._take(self._reply.finish(finished.reason))
        self._print("\n")

    def fields(self) -> dict[str, Any]:
        """Keys that --json adds for a text prompt."""
        return {"text": self.content} | ({"reasoning": self.reasoning} if self.reasoning else {})

    def _take(self, events: list[Event]) -> None:
        for event in events:
            for choice in msgspec.json.decode(event.data)["choices"]:
                delta = choice["delta"]
                if reasoning := delta.get("reasoning_content"):
                    self.reasoning += reasoning
                    self._print(reasoning)
                if content := delta.get("content"):
                    self._print(content if self.content or not self.reasoning else f"\n\n{content}")
                    self.content += content

    def _print(self, text: str) -> None:
        if not self._silent:
            print(text, end="", flush=True)


class IdPrinter:
    """Prints token ids, space-separated on one line."""

    def __init__(self, silent: bool = False) -> None:
        self._silent = silent

    def tokens(self, event: Tokens) -> None:
        """Print the ids of one step."""
        if not self._silent:
            print(*event.ids, end=" ", flush=True)

    def close(self, finished: Finished) -> None:
        """End the line."""
        if not self._silent:
            print(flush=True)

    def fields(self) -> dict[str, Any]:
        """Bare ids add nothing to --json."""
        return {}
