"""A short chat body, and the prompt that it makes for V4.1."""

from __future__ import annotations

import json
from typing import Any

from dsuf.text.prompt import ChatText, Prompt
from tests.support.serving import v41_text

HELLO = [{"role": "user", "content": "Hello"}]
OFF = {"thinking": {"type": "disabled"}}


def body(**fields: Any) -> bytes:
    return json.dumps({"model": "deepseek-v4.1-flash", "messages": HELLO, **fields}).encode()


def prompt(text: ChatText | None = None, **fields: Any) -> Prompt:
    return (text or v41_text()).chat(body(**fields))
