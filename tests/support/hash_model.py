"""A model whose logits are a hash of the whole prefix, behind the CPU backend: every rule of choosing at no cost.

The drafter knows the target's logits but for some noise, so that drafts are accepted now and then, and says so.
"""

from __future__ import annotations

import zlib
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace

import numpy as np
from hypothesis import strategies as st

from dsuf.engine.cpu import CpuBackend
from dsuf.engine.engine import Engine
from dsuf.engine.messages import Event, Request, Sampling, Tokens
from dsuf.engine.options import EngineOptions
from dsuf.errors import UsageError
from dsuf.layout import PAGE_TOKENS
from dsuf.model.reference.snapshot import Sizes

VOCAB, BLOCK = 12, 5
drafting = st.sampled_from([dict(draft=False)] + [dict(draft=True, verify=v) for v in ("auto", *range(BLOCK + 1))])
samplings = st.builds(
    Sampling,
    temperature=st.sampled_from([0, 0.4, 1.0, 1.7]),
    top_p=st.sampled_from([1.0, 0.8]),
    top_k=st.sampled_from([0, 3]),
    seed=st.integers(0, 2**64 - 1),
)


@dataclass
class HashCaches:
    ids: list[int] = field(default_factory=list)
    pending_ids: list[int] = field(default_factory=list)

    @property
    def length(self) -> int:
        return len(self.ids)

    nbytes = 0


class HashModel:
    """Same calls as `ReferenceModel`; `sharpness` scales the logits, `noise` spoils the drafts."""

    spec = SimpleNamespace(vocab_size=VOCAB, max_position_embeddings=512, dspark_block_size=BLOCK)
    weights = SimpleNamespace(layers=[], stages=[])  # no experts to count

    def __init__(self, sharpness: float = 2.0, noise: float = 0.7) -> None:
        self.sharpness, self.noise = sharpness, noise
        self.forwards: list[list[int]] = []  # rows of each block, one list a call

    def new_caches(self) -> HashCaches:
        return HashCaches()

    def prefill(self, caches, ids, *, final, mode="exact", every_logit=False):
        assert not caches.pending_ids and len(ids)
        first = caches.length
        caches.ids += ids
        rows = [self.logits(caches.ids[: first + i + 1]) for i in range(len(ids))]
        argmax = np.argmax(rows, axis=-1) if every_logit else None
        return SimpleNamespace(logits=rows[-1], argmax=argmax) if final or every_logit else None

    def forward(self, blocks):
        self.forwards.append([len(block.ids) for block in blocks])
        return [self._block(block.caches, list(block.ids)) for block in blocks]

    def commit(self, caches, rows: int) -> None:
        assert 1 <= rows <= len(caches.pending_ids)
        caches.ids += caches.pending_ids[:rows]
        caches.pending_ids = []

    def draft(self, requests):
        return [self._draft(request) for request in requests]

    def rewind(self, caches, length: int) -> None:
        assert 0 <= caches.length - length <= 24
        del caches.ids[length:]

    def logits(self, prefix) -> np.ndarray:
        return self.sharpness * _normal(prefix, 1)

    def _block(self, caches, ids):
        assert not caches.pending_ids
        caches.pending_ids = ids
        return np.array([self.logits(caches.ids + ids[: i + 1]) for i in range(len(ids))])

    def _draft(self, request):
        prefix, tokens, logits = [*request.caches.ids, request.token], [], []
        for slot in range(BLOCK):
            row = self.logits(prefix) + self.noise * _normal(prefix, 2)
            tokens.append(request.choose(row, slot))
            logits.append(row)
            prefix.append(tokens[-1])
        return SimpleNamespace(tokens=tokens, confidence_logits=2 * _normal(prefix, 3)[:BLOCK], logits=np.array(logits))


class HashBackend(CpuBackend):
    """The CPU backend with a HashModel in place of weights."""

    def load(self, progress, model: HashModel | None = None) -> None:
        self._model, self._weight_bytes = model or HashModel(), 0

    def _sizes(self) -> Sizes:
        return Sizes(page_bytes=PAGE_TOKENS, snapshot_bytes=8, step=2)

    def _save(self, caches, position, pages, state) -> None:
        assert position % 2 == 0 and 0 <= caches.length - position <= 24
        for number, buffer in pages.items():
            buffer[:] = bytes(caches.ids[:position][number * PAGE_TOKENS :][:PAGE_TOKENS]).ljust(PAGE_TOKENS, b"\0")
        written = position.to_bytes(8, "little")
        for part in state:
            part[:], written = written[: len(part)], written[len(part) :]

    def _load(self, caches, position, pages, state) -> None:
        if caches.ids or int.from_bytes(b"".join(state), "little") != position:
            raise UsageError("damaged")
        caches.ids = list(b"".join(pages)[:position])


def hash_engine(model: HashModel | None = None, *, tier=None, constraints=None, **options) -> Engine:
    """An engine over a HashModel; `tier(limits)` makes a cache tier, `options` are those of EngineOptions."""
    backend = HashBackend(EngineOptions(ckpt=Path("hash"), **options))
    backend.load(lambda what, share: None, model)
    made = tier(backend.limits) if tier is not None else None
    return Engine(backend, backend._options, tier=made, constraints=constraints)


def _normal(prefix, salt: int) -> np.ndarray:
    return np.random.default_rng([zlib.crc32(repr(prefix).encode()), salt]).normal(size=VOCAB)


def run(engine: Engine, *requests: Request) -> dict[str, list[Event]]:
    """Events of each request, run together until idle."""
    said: dict[str, list[Event]] = {request.id: [] for request in requests}
    for request in requests:
        engine.submit(request)
    while not engine.idle:
        for event in engine.step():
            said[event.id].append(event)
    return said


def text(events: list[Event]) -> list[int]:
    """The ids that were emitted."""
    return [token for event in events if isinstance(event, Tokens) for token in event.ids]
