"""What the engine is asked and what it answers, the same in-process and over the pipe.

A frame on the pipe is one msgpack array: of `Command` towards the engine, of `Event` from it; the engine sends one
array a step for all sequences. Times are seconds of the engine's monotonic clock.
"""

from __future__ import annotations

from typing import Literal

import msgspec

from dsuf import errors

FinishReason = Literal["stop", "length", "cancelled", "error"]
CacheSource = Literal["none", "local", "remote"]
LEAST_TEMPERATURE = 1e-6  # below it nothing but the largest logit has a chance, and its inverse leaves float32


class Sampling(msgspec.Struct, frozen=True, omit_defaults=True):
    """How a token is chosen from a row of logits."""

    temperature: float = 1.0  # 0: greedy, as is anything below LEAST_TEMPERATURE
    top_p: float = 1.0
    top_k: int = 0  # 0: off
    seed: int = 0  # key of the counter-based generator, 64 bit
    logprobs: int | None = None  # None: off; 0..20 alternatives beside the emitted token

    def __post_init__(self) -> None:
        """Hosts and devices must agree on what is greedy, and a device knows single precision only."""
        if 0 < self.temperature < LEAST_TEMPERATURE:
            msgspec.structs.force_setattr(self, "temperature", 0.0)


class Request(msgspec.Struct, frozen=True, omit_defaults=True, tag="request"):
    """One completion. `id` is the caller's and must not be in use; later messages name it."""

    id: str
    prompt_ids: list[int]
    max_tokens: int  # cut to the room left in the context
    sampling: Sampling = Sampling()
    eos_ids: list[int] = []  # msgspec copies an empty default for every instance
    ignore_eos: bool = False  # an EOS is then an ordinary token
    min_tokens: int = 0  # no EOS can be chosen before this many tokens
    draft: bool | None = None  # None: the engine's default
    verify: int | None = None  # drafts verified in a step, 0..block; None: the engine's default
    constraint: str | None = None  # what the engine's constraint factory makes a Constraint of; None: free text
    priority: int = 0  # 0..9; higher ones are served first among short prompts
    segments: list[tuple[int, bytes]] = []  # prompt tokens up to a special token's end, digest of the text up to there
    lease: bytes = b""  # the saved prefix that the caller found, as the cache tier names it
    tenant: str = ""  # whose saved prefixes may be used


class Cancel(msgspec.Struct, frozen=True, omit_defaults=True, tag="cancel"):
    """End a request wherever it is; an id that has finished already is not an error."""

    id: str
    keep: int | None = None  # emitted tokens whose whole text is of use (a stop string came late); None: all


class StatusRequest(msgspec.Struct, frozen=True, tag="status"):
    """Ask for one `Status`."""


class TokenLogprobs(msgspec.Struct, frozen=True):
    """Natural-log probabilities of one emitted token under the unfiltered distribution at temperature 1."""

    logprob: float
    top: list[tuple[int, float]] = []  # most likely first, as many as Sampling.logprobs


class Stats(msgspec.Struct, frozen=True, omit_defaults=True):
    """Counts and times of one request. An iteration is a decode step; the first token comes from prefill."""

    prompt_tokens: int = 0
    cached_tokens: int = 0
    completion_tokens: int = 0
    iterations: int = 0
    drafted_tokens: int = 0  # of all iterations, verified or not; 0 without drafting
    accepted_histogram: list[int] = []  # [a]: iterations that accepted a drafts
    queue_s: float = 0.0  # submitted .. prefill started
    prefill_s: float = 0.0  # prefill started .. first token
    ttft_s: float = 0.0  # submitted .. first token
    decode_s: float = 0.0  # first token .. last token

    @property
    def average_accept_length(self) -> float:
        """Decoded tokens per iteration, the first token excluded; 0 before the first iteration."""
        return max(self.completion_tokens - 1, 0) / self.iterations if self.iterations else 0.0

    @property
    def average_iteration_s(self) -> float:
        """Mean time of a decode step; 0 before the first iteration."""
        return self.decode_s / self.iterations if self.iterations else 0.0


class Admitted(msgspec.Struct, frozen=True, omit_defaults=True, tag="admitted"):
    """Prefill of a request has started."""

    id: str
    prompt_tokens: int
    cached_tokens: int = 0
    source: CacheSource = "none"


class Tokens(msgspec.Struct, frozen=True, omit_defaults=True, tag="tokens"):
    """What one step emitted for one request, an ending EOS included; at most one a step and request."""

    id: str
    ids: list[int]
    logprobs: list[TokenLogprobs] | None = None  # one per id, when asked for


class Finished(msgspec.Struct, frozen=True, omit_defaults=True, tag="finished"):
    """The last event of a request; every accepted request gets exactly one."""

    id: str
    reason: FinishReason
    stats: Stats = Stats()
    message: str = ""  # for reason "error": what happened


class Rejected(msgspec.Struct, frozen=True, omit_defaults=True, tag="rejected"):
    """The only event of a request that cannot run: `submit` refused it, or its constraint did not compile.

    In-process `submit` raises its own refusals instead.
    """

    id: str
    kind: str  # class name in dsuf.errors; `as_error` makes the exception
    message: str


class Status(msgspec.Struct, frozen=True, omit_defaults=True, tag="status"):
    """The engine's state; sent on request, with each piece of loading progress and once when ready."""

    ready: bool
    running: int = 0  # sequences in prefill or decode
    waiting: int = 0  # sequences not yet started
    parked: int = 0  # sequences set aside in host memory until there is room again
    waiting_tokens: int = 0  # prompt tokens still to be processed, of all sequences
    context_tokens: int = 0  # tokens held in caches
    rows: int = 0  # rows of the latest decode step
    max_context: int = 0
    max_sequences: int = 0
    loading: str = ""  # while not ready: what is being done
    loaded: float = 0.0  # while not ready: share done, 0..1
    info: dict[str, str | int | float] = {}  # backend, numerics, bytes by kind


class Failed(msgspec.Struct, frozen=True, omit_defaults=True, tag="failed"):
    """Over the pipe only: the engine cannot go on and its process ends with `exit_code`; the pipe closes next."""

    kind: str
    message: str
    exit_code: int


Command = Request | Cancel | StatusRequest
Event = Admitted | Tokens | Finished | Rejected | Status | Failed


def as_error(kind: str, message: str) -> errors.DsufError:
    """The exception that `Rejected` or `Failed` speaks of; an unknown kind becomes EngineGone."""
    found = getattr(errors, kind, errors.EngineGone)
    is_error = isinstance(found, type) and issubclass(found, errors.DsufError)
    return (found if is_error else errors.EngineGone)(message)
