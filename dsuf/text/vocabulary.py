"""What serving must know about a tokenizer.json: spellings of special tokens, and tokens that are not whole characters.

A tokenizer that does not fit the checkpoint is refused at start: prompts would be garbled without any later error.
"""

from __future__ import annotations

from dataclasses import dataclass

import deepseek_recipe as dr
import msgspec

from dsuf.errors import CheckpointError
from dsuf.spec import Spec
from dsuf.text.tokenizer import BYTE_OF


class _AddedToken(msgspec.Struct):
    id: int
    content: str


class _Model(msgspec.Struct):
    vocab: dict[str, int]


class _TokenizerFile(msgspec.Struct):
    model: _Model
    added_tokens: list[_AddedToken] = []


@dataclass(frozen=True)
class Vocabulary:
    """A tokenizer checked against a checkpoint."""

    tokenizer: dr.Tokenizer
    special_tokens: dr.SpecialTokens
    bytes_of: tuple[bytes, ...]  # UTF-8 bytes that each token stands for; none for an id without a token
    open_ids: frozenset[int]  # tokens whose bytes are not whole UTF-8 characters
    eos_id: int
    bos_id: int
    think_end_id: int
    dsml_id: int  # the marker of tool calls
    call_start: tuple[int, ...]  # what the model writes before a call, up to the marker


def read_vocabulary(tokenizer_json: str, spec: Spec) -> Vocabulary:
    """Load the text of a tokenizer.json and check it against `spec`. CheckpointError with every finding."""
    try:
        parsed = msgspec.json.decode(tokenizer_json, type=_TokenizerFile)
        tokenizer = dr.Tokenizer.from_str(tokenizer_json)
    except (msgspec.DecodeError, ValueError, RuntimeError) as error:
        raise CheckpointError(f"tokenizer.json cannot be read: {error}. Use the model's own file.") from None
    added = {token.id: token.content for token in parsed.added_tokens}
    # The recipe's default spelling of the image placeholder is not V4.1's, so the checkpoint's id decides.
    special_tokens = dr.SpecialTokens(image=added.get(spec.image_token_id))
    findings = _special_token_findings(tokenizer, special_tokens, spec)
    largest = max(max(parsed.model.vocab.values(), default=0), max(added, default=0))
    if largest >= spec.vocab_size:
        findings.append(f"token id {largest} found, the checkpoint has ids 0..{spec.vocab_size - 1}")
    if findings:
        raise CheckpointError(
            "tokenizer.json does not fit this checkpoint. Use the tokenizer.json of the same model.", findings
        )
    bytes_of = _bytes_of(parsed.model.vocab, added, spec.vocab_size)
    open_ids = frozenset(token for token, text in enumerate(bytes_of) if token not in added and not _whole(text))
    think_end, dsml = (
        tokenizer.encode(special_tokens.token(kind))[0] for kind in (dr.SpecialToken.ThinkingEnd, dr.SpecialToken.Dsml)
    )
    return Vocabulary(
        tokenizer=tokenizer,
        special_tokens=special_tokens,
        bytes_of=bytes_of,
        open_ids=open_ids,
        eos_id=spec.eos_token_id,
        bos_id=spec.bos_token_id,
        think_end_id=think_end,
        dsml_id=dsml,
        call_start=(*tokenizer.encode("\n\n<"), dsml),
    )


def _special_token_findings(tokenizer: dr.Tokenizer, special_tokens: dr.SpecialTokens, spec: Spec) -> list[str]:
    """One line for each special token that is not exactly one id, or not the id that config.json names."""
    expected = {"Bos": spec.bos_token_id, "Eos": spec.eos_token_id, "Image": spec.image_token_id}
    findings = []
    for name in sorted(n for n, kind in vars(dr.SpecialToken).items() if isinstance(kind, dr.SpecialToken)):
        spelling = special_tokens.token(getattr(dr.SpecialToken, name))
        ids = tokenizer.encode(spelling)
        if len(ids) != 1:
            findings.append(f"{name} {spelling!r} is {len(ids)} tokens, expected one")
        elif name in expected and ids[0] != expected[name]:
            findings.append(f"{name} {spelling!r} has id {ids[0]}, config.json says {expected[name]}")
    return findings


def _bytes_of(vocab: dict[str, int], added: dict[int, str], size: int) -> tuple[bytes, ...]:
    """Bytes of every id: byte-level spellings decoded, added tokens as they are spelled."""
    to_byte = str.maketrans({letter: chr(byte) for letter, byte in BYTE_OF.items()})
    found = [b""] * size
    for spelling, token in vocab.items():
        try:
            found[token] = spelling.translate(to_byte).encode("latin-1")
        except UnicodeError:  # an added token that is listed here too
            found[token] = spelling.encode()
    for token, spelling in added.items():
        found[token] = spelling.encode()
    return tuple(found)


def _whole(text: bytes) -> bool:
    """Whether the bytes are whole UTF-8 characters (about 1 % of V4.1's tokens are not)."""
    try:
        text.decode()
    except UnicodeDecodeError:
        return False
    return True
