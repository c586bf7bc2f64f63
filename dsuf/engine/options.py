"""What an engine is started with: typed, range-checked, frozen."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from dsuf.errors import ConfigError
from dsuf.layout import PAGE_TOKENS

NUMERICS = ("exact32", "qdq32", "qdq64", "bf16")


@dataclass(frozen=True)
class EngineOptions:
    """Everything about an engine that does not change while it runs. Raises ConfigError for a value out of range."""

    ckpt: Path
    numerics: str = "qdq64"
    prefill: Literal["exact", "truncated"] = "truncated"
    draft: bool = True  # where a request is silent
    verify: int | Literal["auto"] = "auto"  # where a request is silent: drafts verified in a step
    verify_threshold: float = 0.4  # auto: cut where the product of the confidences falls under this
    max_context: int | None = None  # None: the checkpoint's max_position_embeddings
    max_sequences: int = 8  # in prefill or decode at once; the others wait
    prefill_chunk: int = 64  # prompt rows of one pass; on a CPU more are not faster and keep streams waiting longer
    prefill_budget_s: float = 0.05  # of prefill between two decode steps; a further pass must fit into it
    resume_every: int = 8192  # snapshots inside long prompts and replies; truncated prefill runs its tail there too
    cache_tokens: int | None = None  # room in the caches for all sequences together; None: what the machine has
    park_bytes: int = 1 << 30  # host memory for sequences that are set aside when caches run short
    gpus: tuple[int, ...] = ()  # devices; none: the CPU backend
    gpus_named: bool = True  # False: they were taken because they are there
    engram_memory: Path | None = None  # what an engine before this one left of Engram's tables in host memory
    kernels: Path | None = None  # folder of compiled kernels for GPUs; None: those of `cache`, built where missing
    cache: Path | None = None  # the user's build cache

    def __post_init__(self) -> None:
        self._check_caches()
        _check(self.numerics in NUMERICS, "numerics", self.numerics, f"one of {', '.join(NUMERICS)}")
        _check(self.prefill in ("exact", "truncated"), "prefill", self.prefill, "exact or truncated")
        _check(
            self.verify == "auto" or (_is_int(self.verify) and self.verify >= 0),
            "verify",
            self.verify,
            '"auto" or a number of drafts from 0 to the block length of the checkpoint',
        )
        _check(0.0 <= self.verify_threshold <= 1.0, "verify_threshold", self.verify_threshold, "0 to 1")
        _check(
            self.max_context is None or (_is_int(self.max_context) and self.max_context >= 2),
            "max_context",
            self.max_context,
            "at least 2 tokens, or nothing for the checkpoint's own",
        )
        _check(
            _is_int(self.max_sequences) and 1 <= self.max_sequences <= 256,
            "max_sequences",
            self.max_sequences,
            "1 to 256",
        )
        _check(
            _is_int(self.prefill_chunk) and 1 <= self.prefill_chunk <= 65_536,
            "prefill_chunk",
            self.prefill_chunk,
            "1 to 65536 rows",
        )
        _check(0.0 <= self.prefill_budget_s <= 60.0, "prefill_budget_s", self.prefill_budget_s, "0 to 60 seconds")

    def _check_caches(self) -> None:
        _check(
            _is_int(self.resume_every) and self.resume_every >= PAGE_TOKENS and self.resume_every % PAGE_TOKENS == 0,
            "resume_every",
            self.resume_every,
            f"a multiple of {PAGE_TOKENS} tokens",
        )
        _check(
            self.cache_tokens is None or (_is_int(self.cache_tokens) and self.cache_tokens >= PAGE_TOKENS),
            "cache_tokens",
            self.cache_tokens,
            f"at least {PAGE_TOKENS} tokens, or nothing for what the machine has",
        )
        _check(_is_int(self.park_bytes) and self.park_bytes >= 0, "park_bytes", self.park_bytes, "0 or more bytes")


def _is_int(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _check(holds: bool, name: str, value: object, expected: str) -> None:
    if not holds:
        raise ConfigError(f"{name} is {value!r}, expected {expected}. Change the flag or leave it out.")
