"""The toy's tokenizer: byte-level BPE over the corpus, with the special tokens of V4.1.

Splits, byte alphabet, decoder, flags of added tokens and order of ids are those of the V4.1 tokenizer.json, with two
differences: each digit is a token (a secret code is copied digit by digit), and numbered place holders are left out.
BOS 0, EOS 1, pad 2, then bytes and merges, then the other added tokens.
"""

from __future__ import annotations

from collections.abc import Iterable

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, processors, trainers

VOCAB_SIZE = 2560
FIRST_TOKENS = ("<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>", "<｜▁pad▁｜>")

# Added tokens after the merges, in V4.1's order; flags (special, normalized) of each stretch.
_ADDED = [
    (
        (False, True),
        """<｜System｜> <｜fim▁hole｜> <｜fim▁begin｜> <｜fim▁end｜> <｜User｜> <｜Assistant｜> <|EOT|>
        <｜tool▁calls▁begin｜> <｜tool▁calls▁end｜> <｜tool▁call▁begin｜> <｜tool▁call▁end｜>
        <｜tool▁outputs▁begin｜> <｜tool▁outputs▁end｜> <｜tool▁output▁begin｜> <｜tool▁output▁end｜> <｜tool▁sep｜>
        <｜begin▁of▁repo▁name｜> <｜end▁of▁repo▁name｜> <｜begin▁of▁file▁name｜> <｜end▁of▁file▁name｜>
        <｜begin▁of▁file｜> <｜end▁of▁file｜> <think> </think> ｜DSML｜ <｜begin▁sys｜> <｜end▁sys｜>
        <｜latest_reminder｜> <｜action｜> <｜query｜> <｜authority｜> <｜domain｜> <｜task｜> <｜political｜>
        <｜entity｜> <｜title｜> <｜safety｜> <｜answer｜> <｜search｜> <dsml: </dsml:
        <｜search▁begin｜> <｜search▁end｜> <｜extracted_url｜> <｜read_url｜>""",
    ),
    ((True, False), "<｜end_of_query｜> <｜rl_image_pad｜> <｜rl_image_start｜>"),
    ((False, False), "<｜deepseek_image｜>"),
    (
        (True, False),
        """<｜/polygon｜> <｜polygon｜> <｜/point｜> <｜point｜> <｜/box｜> <｜box｜> <｜/ref｜> <｜ref｜>""",
    ),
]

_SPLITS = [
    r"\p{N}",
    "[一-龥\u3040-ゟ゠-ヿ]+",
    r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+[\r\n]*"""
    r"|\s*[\r\n]+|\s+(?!\S)|\s+",
]


def added_tokens() -> list[AddedToken]:
    """Every added token, the first three (ids 0, 1, 2) first."""
    first = [AddedToken(text, special=True, normalized=False) for text in FIRST_TOKENS]
    return first + [
        AddedToken(text, special=special, normalized=normalized)
        for (special, normalized), texts in _ADDED
        for text in texts.split()
    ]


def build(texts: Iterable[str], vocab_size: int = VOCAB_SIZE) -> str:
    """tokenizer.json with merges learnt from `texts`."""
    added = added_tokens()
    tokenizer = Tokenizer(models.BPE())
    splits = [pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in _SPLITS]
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([*splits, byte_level])
    tokenizer.post_processor = processors.ByteLevel(trim_offsets=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size - len(added) + 3,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        special_tokens=added[:3],
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.add_tokens(added[3:])
    return tokenizer.to_str(pretty=False)
