"""Saved prefixes in the life of a call: looked up before it is encoded, named when its answer ends, let go at the end.

    body -> rendered, hashed -> agent: longest saved prefix -> its ids checked against our own text -> the rest encoded
    answer complete -> agent: the end of the answer by its text, before the client hears of the end

The second makes the next turn find it wherever it goes, however fast it comes. An agent that is gone, slow or without a
prefix costs a bounded moment and never an error.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace

from dsuf.kv import messages as m
from dsuf.kv.client import WebClient
from dsuf.kv.names import RESUME_TOKENS, ids_array
from dsuf.text.prompt import Prompt, Unencoded

_LAST_IDS = 8  # more than an entry can lack of its segment's end
_LABELS = {"outcome": "kind", "pulled_bytes": "path", "reuse_lost_tokens": "reason"}  # of the agent's counters
Encode = Callable[[Callable[[], Prompt | None]], Awaitable[Prompt | None]]  # runs it here or in a thread


class Prefixes:
    """The web process's dealings with the agent."""

    def __init__(self, client: WebClient, resume_tokens: int = RESUME_TOKENS) -> None:
        self._client, self._resume_tokens = client, resume_tokens
        self._counts: Counter[str] = Counter()  # in the agent's words

    async def prompt(self, begun: Unencoded, reply_id: str, tenant: str, encode: Encode) -> Prompt:
        """The prompt, with the ids of the longest saved prefix if there is one; it is held under `reply_id` then."""
        found = await self._client.lookup(reply_id, tenant, segments=begun.digests)
        prompt, tokens, look_up = None, 0, "found" if isinstance(found, m.Found) else found.kind
        if isinstance(found, m.Found):
            prefix = ids_array(found.ids).tolist()
            prompt, tokens = await encode(lambda: begun.encode(prefix)), found.tokens
            if prompt is None:
                self._counts.update({"outcome.misread": 1, "reuse_lost_tokens.misread": tokens})
                tokens, look_up = 0, "misread"
            else:
                self._counts["reuse_lost_tokens.rendering"] += _earlier_tokens(prompt, len(prefix))
        if prompt is None:
            prompt = await encode(begun.encode)
        if len(prompt.ids) - tokens > self._resume_tokens:  # a point inside a long text that others have begun alike
            inner = await self._client.lookup(reply_id, tenant, ids=prompt.ids, beyond=tokens)
            if isinstance(inner, m.Found):
                tokens, look_up = inner.tokens, "found"
        return replace(prompt, lease=m.FOUND if tokens else m.NONE, tenant=tenant, look_up=look_up)

    async def ended(self, prompt: Prompt, reply_id: str, emitted: Sequence[int], whole: bool) -> None:
        """An answer has ended; `whole`: with its own last token, not by a limit, a stop string or a cancel."""
        if prompt.text_hash is None or not emitted:
            return
        ids = list(emitted) if whole else [*emitted, prompt.eos_id]  # the next turn has the mark behind it either way
        hashed = prompt.text_hash.copy()
        hashed.ids(ids)
        last = [*prompt.ids[-_LAST_IDS:], *ids][-_LAST_IDS:]
        await self._client.alias(reply_id, hashed.digest(), len(prompt.ids) + len(ids), last)

    async def forget(self, reply_id: str) -> None:
        """The call has ended, however."""
        await self._client.tell(m.Forget(reply_id))

    async def draining(self) -> None:
        """The server drains; what it has saved can still be had."""
        await self._client.tell(m.Leave(True))

    async def metrics(self) -> bytes:
        """The agent's counters in the text exposition format; nothing while it is not there."""
        state = await self._client.status()
        if state is None:
            return b""
        lines: list[str] = []
        numbers = Counter(state.numbers)
        numbers.update(self._counts)
        for stem, key in _LABELS.items():
            lines.append(f"# TYPE dsuf_kv_{stem}_total counter")
            for name, value in sorted(numbers.items()):
                family, _, label = name.partition(".")
                if family == stem:
                    lines.append(f'dsuf_kv_{stem}_total{{{key}="{label}"}} {value:.15g}')
        for name, value in sorted(numbers.items()):
            if "." not in name:
                lines += [f"# TYPE dsuf_kv_{name} gauge", f"dsuf_kv_{name} {value:.15g}"]
        return ("\n".join(lines) + "\n").encode()

    async def answers(self, within_s: float) -> bool:
        """Whether there is an agent that answers in time."""
        return await self._client.status(within_s) is not None

    async def close(self) -> None:
        """Hang up; the agent lets go of everything."""
        await self._client.close()


def _earlier_tokens(prompt: Prompt, found: int) -> int:
    """Tokens of earlier answers behind the ones that were found: they read otherwise than when they were saved."""
    ids = prompt.ids
    return next((at + 1 - found for at in range(len(ids) - 1, found - 1, -1) if ids[at] == prompt.eos_id), 0)
