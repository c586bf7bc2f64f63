"""JSON schemas, regular expressions and forced tool calls as masks over the vocabulary: the engine's `Constraint`.

llguidance does the work. Of the kept grammar libraries that make token masks it is the one that fits an install
without PyTorch (xgrammar needs it): one abi3 wheel for every Python and both Linux processors, no dependencies, MIT,
and the grammar engine of several servers in wide use. A row costs 5 to 120 microseconds (V4.1's
129,280 tokens), 400 where a character class is repeated thousands of times: six rows a step, which a GPU's step hides
while its layers take longer. It refuses schema keywords that it cannot keep instead of passing them over, and lets go
of the interpreter lock while it compiles.

A constraint travels as a string in the request, so that the web process, which checks it, and the engine process, which
keeps it, need to share nothing:

    reasoning (if the prompt opened it)  anything but the end, up to </think>
    answer                               what the grammar allows; with tools, a tool call may stand in its place
    calls                                after a DSML marker anything goes: the parser reads it
"""

from __future__ import annotations

import copy
import secrets
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Literal

import llguidance
import msgspec
import numpy as np

from dsuf.errors import EngineGone, PromptError
from dsuf.model.checkpoint import Checkpoint

Kind = Literal["json", "regex", "lark"]
# One line break with its indent, or a few blanks: a weak model would otherwise go on with them until max_tokens.
_JSON_OPTIONS: llguidance.JsonCompileOptions = {"whitespace_pattern": r"(\r?\n[ \t]{0,40}|[ \t]{1,4})"}
_ANY_OBJECT = '{"type":"object"}'  # what JSON mode promises
_SILENT = 0  # what goes wrong is told to the client, in the log's form, not to stderr
_LIMITS = llguidance.LLParserLimits(verbose_errors=False)


class Grammar(msgspec.Struct, frozen=True, omit_defaults=True):
    """What `Request.constraint` says, as JSON."""

    kind: Kind
    text: str  # schema, regular expression, or a grammar of llguidance's
    think_end: int | None = None  # the prompt ends in open reasoning: nothing counts before this token
    call_start: tuple[int, ...] = ()  # tokens that open a tool call, which may stand instead of the answer

    def encode(self) -> str:
        """The string for the request."""
        return msgspec.json.encode(self).decode()

    def compiled_text(self) -> str:
        """The same in llguidance's own form. Raises PromptError for a schema that is no JSON object."""
        if self.kind == "regex":
            return llguidance.LLMatcher.grammar_from_regex(self.text)
        if self.kind == "lark":
            return llguidance.LLMatcher.grammar_from_lark(self.text)
        try:
            return llguidance.LLMatcher.grammar_from_json_schema(self.text or _ANY_OBJECT, overrides=_JSON_OPTIONS)
        except ValueError as error:
            raise PromptError(f"the JSON schema cannot be used: {_reason(error)}.") from None

    def check(self) -> None:
        """Raise PromptError unless the grammar can be kept; takes no tokenizer and under a millisecond."""
        failed, messages = llguidance.LLMatcher.validate_grammar_with_warnings(self.compiled_text(), limits=_LIMITS)
        if failed:
            what = {"json": "the JSON schema", "regex": "the regular expression"}.get(self.kind, "the grammar")
            raise PromptError(f"{what} cannot be kept while sampling: {_reason(messages[0])}. Write it without.")


class TokenGrammars:
    """Compiles constraints for one tokenizer. May be called in any thread; the interpreter lock is free meanwhile."""

    def __init__(self, tokenizer_json: str, vocab_size: int, eos_id: int) -> None:
        self.vocab_size, self.eos_id = vocab_size, eos_id
        # about a second for V4.1's vocabulary, long over when the first request comes
        opening = ThreadPoolExecutor(1, "grammar")
        self._tokenizer = opening.submit(_open_tokenizer, tokenizer_json, vocab_size, eos_id)
        opening.shutdown(wait=False)

    def __call__(self, constraint: str) -> TokenConstraint:
        """The constraint of one request, compiled. Raises PromptError for a string that is no usable `Grammar`."""
        try:
            grammar = msgspec.json.decode(constraint, type=Grammar)
        except msgspec.MsgspecError as error:
            raise PromptError(f"the constraint is not one: {error}") from None
        text = grammar.compiled_text()
        matcher = llguidance.LLMatcher(self._tokenizer.result(), text, limits=_LIMITS, log_level=_SILENT)
        if not matcher.is_error():
            matcher.compute_bitmask()  # the first mask builds what later ones look up
        if matcher.is_error():
            raise PromptError(f"the constraint cannot be kept: {_reason(matcher.get_error())}.")
        return TokenConstraint(grammar, matcher, self.vocab_size, self.eos_id)


class TokenConstraint:
    """Which tokens may come next in one answer. `fill` looks ahead along drafts, `advance` commits."""

    def __init__(self, grammar: Grammar, matcher: llguidance.LLMatcher, vocab_size: int, eos_id: int) -> None:
        self._grammar, self._matcher, self._eos = grammar, matcher, eos_id
        self._vocab_size = vocab_size
        self._opened = 0  # how many tokens of call_start there were
        self._state = "reasoning" if grammar.think_end is not None else "start"

    def fill(self, masks: np.ndarray, drafts: Sequence[int]) -> int:
        """Write rows 0..n of `masks`, uint32 [>= 1 + len(drafts), words of 32 tokens], and return n.

        Bit t % 32 of word t // 32 in row i is set when token t may follow the committed tokens and drafts[:i]. n is the
        number of drafts that may be kept; rows beyond are left as they are. Nothing is committed.
        """
        ahead = self._copy()
        for row in range(len(drafts) + 1):
            ahead._write(masks[row])
            if row == len(drafts) or not _has(masks[row], drafts[row]):
                break
            ahead._take(drafts[row])
        return row

    def advance(self, ids: Sequence[int]) -> None:
        """Commit emitted tokens. Raises EngineGone when one is outside the grammar: the masks were not kept."""
        for token in ids:
            self._take(token)

    def _copy(self) -> TokenConstraint:
        """Costs microseconds. The matcher's own rollback does not count the bytes of special tokens right."""
        copied = copy.copy(self)
        copied._matcher = self._matcher.deep_copy()
        return copied

    def _write(self, row: np.ndarray) -> None:
        """The mask of this state."""
        state = self._state
        if state in ("reasoning", "calls"):
            row[:] = 0xFFFFFFFF
            if self._vocab_size % 32:
                row[-1] = (1 << self._vocab_size % 32) - 1
            _set(row, self._eos, state == "calls")
        elif state == "call opens":
            row[:] = 0
            _set(row, self._grammar.call_start[self._opened], True)
        elif state == "ended":
            row[:] = 0
            _set(row, self._eos, True)
        else:
            self._matcher.unsafe_compute_mask_ptr(row.ctypes.data, row.nbytes)
            self._raise_error()  # the mask would allow the end
            if state == "start" and self._grammar.call_start:
                _set(row, self._grammar.call_start[0], True)

    def _take(self, token: int) -> None:
        """Go on to the state after `token`."""
        state, opens = self._state, self._grammar.call_start
        if state == "reasoning":
            self._state = "start" if token == self._grammar.think_end else state
        elif state == "calls":
            self._state = "ended" if token == self._eos else state
        elif state in ("start", "call opens") and opens and token == opens[self._opened]:
            self._opened += 1
            self._state = "calls" if self._opened == len(opens) else "call opens"
        elif token == self._eos and (state == "ended" or self._matcher.is_accepting()):
            self._state = "ended"
        elif state in ("start", "answer") and self._matcher.try_consume_tokens([token]) == 1:
            self._state = "answer"
        else:
            self._raise_error()
            raise EngineGone(
                f"token {token} is outside the constraint of this request. Send it again without constraint."
            )

    def _raise_error(self) -> None:
        """Raise EngineGone when the library has given up: a limit of its own, met on the way."""
        if self._matcher.is_error():
            raise EngineGone(f"the constraint cannot be kept any further: {_reason(self._matcher.get_error())}.")


def checkpoint_grammars(checkpoint: Checkpoint) -> Callable[[str], TokenConstraint] | None:
    """The engine's factory of constraints for a checkpoint; None without a tokenizer."""
    path, spec = checkpoint.tokenizer_path, checkpoint.spec
    return path and TokenGrammars(path.read_text(encoding="utf-8"), spec.vocab_size, spec.eos_token_id)


def _open_tokenizer(tokenizer_json: str, vocab_size: int, eos_id: int) -> llguidance.LLTokenizer:
    """The vocabulary with other names for its added tokens, which nobody can guess.

    The library encodes text that must come next. Where a schema's own words read like an added token they would become
    that token, which its matcher then takes for none of the text.
    """
    document = msgspec.json.decode(tokenizer_json)
    vocabulary = document["model"]["vocab"]
    for token in document.get("added_tokens", ()):
        name = f"<{secrets.token_hex(16)}>"
        if token["content"] in vocabulary:
            vocabulary[name] = vocabulary.pop(token["content"])
        token |= {"content": name, "special": True, "normalized": False}
    return llguidance.LLTokenizer(msgspec.json.encode(document).decode(), n_vocab=vocab_size, eos_token=eos_id)


def _has(row: np.ndarray, token: int) -> bool:
    return bool(int(row[token >> 5]) >> (token & 31) & 1)


def _set(row: np.ndarray, token: int, allowed: bool) -> None:
    bit = 1 << (token & 31)
    row[token >> 5] = int(row[token >> 5]) | bit if allowed else int(row[token >> 5]) & ~bit


def _reason(message: object) -> str:
    """The line of an error report that says what is wrong."""
    if str(message).startswith("NoExtension"):
        return "no answer fits it"
    lines = str(message).strip().splitlines()
    return next((line.removeprefix("error: ") for line in lines if line.startswith("error: ")), lines[0]).rstrip(".")
