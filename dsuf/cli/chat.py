"""`dsuf run --chat`: turns at a terminal or from a pipe, one user message a line."""

from __future__ import annotations

import sys
from typing import Any

from dsuf.cli.live import say
from dsuf.cli.printer import TextPrinter
from dsuf.cli.run import generate, summary, text_prompt
from dsuf.cli.session import Session
from dsuf.config import SamplingFlags
from dsuf.engine.sequence import Trace
from dsuf.errors import PromptError
from dsuf.text.prompt import ChatText


def talk(
    session: Session, text: ChatText, messages: list[dict[str, Any]], thinking: bool, sampling: SamplingFlags
) -> None:
    """Read messages until the input ends; Ctrl-C breaks off one answer, and at the prompt the chat."""
    say("One message a line. Ctrl-C breaks off an answer, Ctrl-D ends the chat.")
    while (line := _next_line()) is not None:
        if not line.strip():
            continue
        turn = [*messages, {"role": "user", "content": line}]
        try:
            prompt = text_prompt(text, turn, thinking, sampling)
        except PromptError as error:
            say(f"{error}")
            continue
        printer = TextPrinter(text, prompt)
        try:
            _, finished = generate(session, prompt.request("chat"), Trace(), printer.tokens)
        except KeyboardInterrupt:
            print("\n[broken off; this turn is forgotten]", flush=True)
            continue
        printer.close(finished)
        say(summary(finished))
        said = {"role": "assistant", "content": printer.content}
        messages = [*turn, said | ({"reasoning_content": printer.reasoning} if printer.reasoning else {})]


def _next_line() -> str | None:
    try:
        return input("> " if sys.stdin.isatty() else "")
    except EOFError:
        return None
