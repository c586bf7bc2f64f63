"""Refuses at submit what cannot run: each message says what was found, what was expected and what to do."""

from __future__ import annotations

import math

from dsuf.engine.backend import Limits
from dsuf.engine.messages import Request, Sampling
from dsuf.errors import NotSupported, PromptError, UsageError

MAX_LOGPROBS = 20
MAX_TEMPERATURE = 100.0  # beyond it every choice is uniform; servers refuse far lower values themselves
MOST_PRIORITY = 9


def check_request(request: Request, limits: Limits, *, constraints: bool) -> None:
    """Raises PromptError, UsageError or NotSupported; returns for a request that can run.

    `constraints`: whether the engine can make any.
    """
    _check_prompt(request.prompt_ids, limits)
    _check_sampling(request.sampling)
    _check_lengths(request)
    _check_ids(request.eos_ids, "eos_ids", limits.vocab_size, UsageError)
    if request.verify is not None and not 0 <= request.verify <= limits.draft_len:
        raise UsageError(
            f"verify is {request.verify}, expected 0 to {limits.draft_len} (the drafts of one block). "
            "Leave it out for the engine's default."
        )
    if request.constraint is not None and not constraints:
        raise NotSupported("this engine was started without output constraints (JSON schema, regex). Leave them out.")
    if not 0 <= request.priority <= MOST_PRIORITY:
        raise UsageError(f"priority is {request.priority}, expected 0 to {MOST_PRIORITY}. Leave it out for 0.")


def _check_prompt(ids: list[int], limits: Limits) -> None:
    if not ids:
        raise PromptError("the prompt is empty, expected at least 1 token. Give some text or token ids.")
    if len(ids) >= limits.max_context:
        raise PromptError(
            f"the prompt has {len(ids)} tokens, the maximum context length is {limits.max_context} with at least one "
            f"token to generate. Shorten the prompt to {limits.max_context - 1} tokens."
        )
    _check_ids(ids, "prompt", limits.vocab_size, PromptError)


def _check_ids(ids: list[int], name: str, vocab_size: int, error: type[UsageError]) -> None:
    if ids and (min(ids) < 0 or max(ids) >= vocab_size):
        index, token = next((i, token) for i, token in enumerate(ids) if not 0 <= token < vocab_size)
        raise error(
            f"{name} token {index} is {token}, expected 0 to {vocab_size - 1} (the checkpoint's vocabulary). "
            "Was it encoded with another tokenizer?"
        )


def _check_sampling(sampling: Sampling) -> None:
    def need(holds: bool, name: str, value: object, expected: str) -> None:
        if not holds:
            raise UsageError(f"{name} is {value!r}, expected {expected}. Change it or leave it out.")

    t = sampling.temperature
    need(math.isfinite(t) and 0 <= t <= MAX_TEMPERATURE, "temperature", t, f"0 (greedy) to {MAX_TEMPERATURE:g}")
    need(0 < sampling.top_p <= 1, "top_p", sampling.top_p, "more than 0 and at most 1")
    need(sampling.top_k >= 0, "top_k", sampling.top_k, "0 (off) or more")
    need(0 <= sampling.seed < 1 << 64, "seed", sampling.seed, "an integer of 64 bits, 0 or more")
    count = sampling.logprobs
    need(count is None or 0 <= count <= MAX_LOGPROBS, "logprobs", count, f"0 to {MAX_LOGPROBS} alternatives")


def _check_lengths(request: Request) -> None:
    if request.max_tokens < 1:
        raise UsageError(f"max_tokens is {request.max_tokens}, expected at least 1.")
    if not 0 <= request.min_tokens <= request.max_tokens:
        raise UsageError(
            f"min_tokens is {request.min_tokens}, expected 0 to max_tokens ({request.max_tokens}). Lower it."
        )
