"""`dsuf run --chat`: turns at a terminal or from a pipe, one user message a line."""

from __future__ import annotations

import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

from dsuf.cli.live import say
from dsuf.cli.printer import TextPrinter
from dsuf.cli.run import generate, summary, text_prompt
from dsuf.cli.session import Session
from dsuf.config import SamplingFlags
from dsuf.engine.engine import Engine
from dsuf.engine.messages import Event, Request
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
        printer, request = TextPrinter(text, prompt), prompt.request("chat")
        with _interrupts() as asked:
            events = _until(asked, session.engine, request)
            _, finished = generate(session, request, Trace(), printer.tokens, events)
        if finished.reason == "cancelled":
            print("\n[broken off; this turn is forgotten]", flush=True)
            continue
        printer.close(finished)
        say(summary(finished))
        said = {"role": "assistant", "content": printer.content}
        messages = [*turn, said | ({"reasoning_content": printer.reasoning} if printer.reasoning else {})]


@contextmanager
def _interrupts() -> Iterator[Callable[[], bool]]:
    """Whether Ctrl-C was pressed: it must not strike inside a step of the engine, which goes on. A second one does."""
    heard: list[int] = []

    def note(number: int, frame: FrameType | None) -> None:
        if heard:
            raise KeyboardInterrupt
        heard.append(number)

    before = signal.signal(signal.SIGINT, note)
    try:
        yield lambda: bool(heard)
    finally:
        signal.signal(signal.SIGINT, before)


def _until(asked: Callable[[], bool], engine: Engine, request: Request) -> Iterator[Event]:
    """Events of one request, which is cancelled between two steps once that is asked for."""
    engine.submit(request)
    while not engine.idle:
        yield from engine.step()
        if asked():
            engine.cancel(request.id)


def _next_line() -> str | None:
    terminal = sys.stdin.isatty()
    try:
        return input("> " if terminal else "")
    except (EOFError, KeyboardInterrupt) as end:
        if terminal:
            say("")  # so that what follows does not stand behind the prompt
        if isinstance(end, KeyboardInterrupt):
            raise
        return None
