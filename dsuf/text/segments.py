"""A rendered prompt in segments that end with special tokens: their digests, and ids for what is not in a cache yet.

A conversation is found again by its text, because a model may have sampled other ids than encoding the same text
gives. What is hashed is not the bare text, where a user may have typed the spelling of a special token, but

    plain text as UTF-8, a special token as 0xFF and its id (u32 little endian)

which no other sequence of text and special tokens equals, since UTF-8 has no 0xFF. A cut behind a special token changes
no id after it, so that a cached prefix of any ids that read the same can be followed by the encoding of the rest.
"""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Sequence
from dataclasses import dataclass, field

import deepseek_recipe as dr
from tokenizers import Tokenizer

from dsuf.text.vocabulary import Vocabulary

MAX_DIGESTS = 512  # of one look-up
NEAR_THE_END = 8  # segments that a request carries: an entry is saved near the end of its prompt
_SPECIAL = b"\xff"


@dataclass(frozen=True)
class Rendering:
    """Pieces of a prompt in order: plain text with None, or the spelling of a special token with its id."""

    pieces: list[tuple[str, int | None]]
    ends: list[int] = field(default_factory=list)  # pieces up to the end of each special token
    digests: list[bytes] = field(default_factory=list)  # SHA-256 up to there

    @property
    def longest_first(self) -> list[bytes]:
        """What to look up."""
        return self.digests[: -MAX_DIGESTS - 1 : -1]


class TextHash:
    """Hash of a text and its special tokens, which can go on with what a model emits."""

    def __init__(self, encoder: PromptEncoder) -> None:
        self._encoder = encoder
        self._hash = hashlib.sha256()

    def text(self, text: str) -> None:
        """Go on with plain text."""
        self._hash.update(text.encode("utf-8", "surrogatepass"))

    def special(self, token: int) -> None:
        """Go on with a special token."""
        self._hash.update(_SPECIAL + token.to_bytes(4, "little"))

    def ids(self, ids: Sequence[int]) -> None:
        """Go on with what these ids stand for."""
        self._hash.update(self._encoder.canonical(ids))

    def digest(self) -> bytes:
        """SHA-256 so far."""
        return self._hash.digest()

    def copy(self) -> TextHash:
        """Another one that goes on from here."""
        other = TextHash(self._encoder)
        other._hash = self._hash.copy()
        return other


class PromptEncoder:
    """Renders conversations and encodes them, whole or behind a prefix. Safe to use from several threads."""

    def __init__(self, vocabulary: Vocabulary, encoding: dr.DeepseekV41Encoding, tokenizer_json: str) -> None:
        self._encoding, self._json = encoding, tokenizer_json
        self._lock, self._tokenizer = threading.Lock(), None
        self._id_of: dict[str, int] = {}
        for kind in (value for value in vars(dr.SpecialToken).values() if isinstance(value, dr.SpecialToken)):
            spelling = vocabulary.special_tokens.token(kind)
            self._id_of[spelling] = vocabulary.tokenizer.encode(spelling)[0]
        special = {token: _SPECIAL + token.to_bytes(4, "little") for token in self._id_of.values()}
        # A byte 0xFF that a model emits as text is not UTF-8 either way, so it may as well be another such byte.
        plain = (text.replace(_SPECIAL, b"\xfe") for text in vocabulary.bytes_of)
        self._bytes = [special.get(token, text) for token, text in enumerate(plain)]

    def render(self, conversation: dr.Conversation) -> Rendering:
        """The prompt of a conversation, hashed up to each special token."""
        rendered = self._encoding.render_conversation(conversation)
        prompt, at = rendered.prompt, 0
        rendering, hashed = Rendering([]), TextHash(self)
        for start, end in rendered.special_ranges:
            if start > at:
                self._add(rendering, hashed, prompt[at:start], None)
            self._add(rendering, hashed, prompt[start:end], self._id_of[prompt[start:end]])
            at = end
        if at < len(prompt):
            self._add(rendering, hashed, prompt[at:], None)
        return rendering

    def prefix(self, rendering: Rendering, ids: Sequence[int]) -> int | None:
        """How many pieces `ids` stand for, read as text; None when they are no prefix that ends a segment."""
        hashed = TextHash(self)
        hashed.ids(ids)
        digest = hashed.digest()
        return rendering.ends[rendering.digests.index(digest)] if digest in rendering.digests else None

    def encode(self, rendering: Rendering, prefix: Sequence[int] = (), pieces: int = 0) -> list[int]:
        """Ids of the prompt: `prefix` for its first pieces, the encoding of the others."""
        rest = rendering.pieces[pieces:]
        encoded = iter(self.plain([text for text, token in rest if token is None]))
        ids = list(prefix)
        for _, token in rest:
            if token is None:
                ids += next(encoded)
            else:
                ids.append(token)
        return ids

    def plain(self, texts: list[str]) -> list[list[int]]:
        """Ids of each text, in which no special token is known."""
        return [encoding.ids for encoding in self._plain.encode_batch_fast(texts, add_special_tokens=False)]

    def segments(self, rendering: Rendering, ids: Sequence[int]) -> list[tuple[int, bytes]]:
        """The last segments of a prompt: ids up to the end of each, and its digest."""
        found, at = [], len(ids)
        for end in range(len(rendering.pieces), 0, -1):
            token = rendering.pieces[end - 1][1]
            if token is None:  # plain text before them is longer than what an entry may lack at its end
                break
            found.append((at, rendering.digests[rendering.ends.index(end)]))
            at -= 1
        return found[:NEAR_THE_END]

    def hash_of(self, rendering: Rendering) -> TextHash:
        """The hash of the whole prompt."""
        hashed = TextHash(self)
        for text, token in rendering.pieces:
            hashed.text(text) if token is None else hashed.special(token)
        return hashed

    def canonical(self, ids: Sequence[int]) -> bytes:
        """What is hashed for these ids."""
        table = self._bytes
        return b"".join([table[token] for token in ids])

    def load(self) -> None:
        """Make what the first prompt would wait for: 1 to 2 s for V4.1's vocabulary."""
        _ = self._plain

    @property
    def _plain(self) -> Tokenizer:
        """Without added tokens their spellings in a text are text, as the recipe has it."""
        with self._lock:
            if self._tokenizer is None:
                document = json.loads(self._json)
                self._tokenizer = Tokenizer.from_str(json.dumps({**document, "added_tokens": []}))
            return self._tokenizer

    def _add(self, rendering: Rendering, hashed: TextHash, text: str, token: int | None) -> None:
        rendering.pieces.append((text, token))
        if token is None:
            hashed.text(text)
        else:
            hashed.special(token)
            rendering.ends.append(len(rendering.pieces))
            rendering.digests.append(hashed.digest())
