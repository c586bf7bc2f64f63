"""What a row's filter record says of one token: its weight, whether EOS may come, whether a sampled draft stands.

    weight   2^((x - top) scale) if the filter keeps the token, else 0
    stands   u Q(d) < P(d) with u = Philox(position of the token, ACCEPT), cut to 24 bits, always under 1

Records are those of sample.py, slots those of slots.py. Reference: dsuf.ops.accept, dsuf.engine.choose.masked.
"""

from __future__ import annotations

from typing import Any

from dsuf.kernels.draw import allowed_bit, joined, philox, split_mass, weight
from dsuf.kernels.lang import float32, inline, int32, int64, uint32
from dsuf.kernels.ptx.convert import div
from dsuf.kernels.ptx.memory import ldg_f32, ldg_u32
from dsuf.kernels.route import ordered
from dsuf.kernels.rows import word
from dsuf.kernels.slots import (
    F_CUT,
    F_MASS,
    F_MASS_HIGH,
    F_SCALE,
    F_THRESHOLD,
    F_TOKEN,
    F_TOP,
    FILTER_BYTES,
    S_EMITTED,
    S_EOS,
    S_EOS_COUNT,
    S_MIN_TOKENS,
    S_SEED,
    S_SEED_HIGH,
)
from dsuf.ops.philox import Purpose

ACCEPT = int(Purpose.ACCEPT)


@inline
def mass_of(record: Any) -> Any:
    """Mass of a row's kept tokens."""
    return (int64(ldg_u32(record + 4 * F_MASS_HIGH)) << 32) + int64(ldg_u32(record + 4 * F_MASS))


@inline
def filter_of(record: Any) -> Any:
    """Threshold, cut, largest logit and scale of a row."""
    threshold = ldg_u32(record + 4 * F_THRESHOLD)
    cut = word(record, F_CUT)
    return threshold, cut, ldg_f32(record + 4 * F_TOP), ldg_f32(record + 4 * F_SCALE)


@inline
def kept_weight(x: Any, token: Any, threshold: Any, cut: Any, top: Any, scale: Any) -> Any:
    """Weight of a token in a row: 0 if the row's filter does not keep it."""
    key = ordered(x)
    kept = key > threshold or (key == threshold and token <= cut)
    w = weight(x, top, scale)
    return w if kept else 0.0


@inline
def barred_eos(own: Any, record: Any, ahead: Any) -> Any:
    """How many EOS ids a row may not give: none once min_tokens are there, or where nothing but EOS was left."""
    count = word(own, S_EOS_COUNT)
    early = int32(word(own, S_EMITTED) + ahead - word(own, S_MIN_TOKENS))
    best = word(record, F_TOKEN)
    only = int32(0)
    for i in range(count):
        one = word(own, S_EOS + i)
        only = int32(1 if one == best else only)
    return int32(count if early < 0 and only == 0 else 0)


@inline
def is_eos(own: Any, token: Any, count: Any) -> Any:
    """1 if a token is among the first `count` EOS ids."""
    found = int32(0)
    for i in range(count):
        one = word(own, S_EOS + i)
        found = int32(1 if one == token else found)
    return found


@inline
def stands(
    own: Any, logits: Any, records: Any, draft_logits: Any, draft_records: Any, token: Any, row: Any, draft_row: Any,
    place: Any, ahead: Any, mask: Any, mask_row: Any, vocabulary: Any,
) -> Any:  # fmt: skip
    """1 if a sampled draft is accepted: u Q < P."""
    p_record = records + int64(row) * FILTER_BYTES
    q_record = draft_records + int64(draft_row) * FILTER_BYTES
    x = ldg_f32(logits + (int64(row) * vocabulary + token) * 4)
    threshold, cut, top, scale = filter_of(p_record)
    p = kept_weight(x, token, threshold, cut, top, scale)
    barred = barred_eos(own, p_record, ahead)
    never = is_eos(own, token, barred)
    bit = uint32(1)
    if mask != 0:
        bit = allowed_bit(mask, int64(mask_row), int64((vocabulary + 31) >> 5), int64(token))
    p = p if never == 0 and bit == 1 else 0.0
    x = ldg_f32(draft_logits + (int64(draft_row) * vocabulary + token) * 4)
    q_threshold, q_cut, q_top, q_scale = filter_of(q_record)
    q = kept_weight(x, token, q_threshold, q_cut, q_top, q_scale)
    a, b = split_mass(p)
    c, d = split_mass(q)
    p_share = div(float32(joined(a, b)), float32(mass_of(p_record)))
    q_share = div(float32(joined(c, d)), float32(mass_of(q_record)))
    number = philox(ldg_u32(own + 4 * S_SEED), ldg_u32(own + 4 * S_SEED_HIGH), int32(place + 1), ACCEPT)
    u = float32(int32(number >> 8)) * 2.0**-24
    return int32(1 if u * q_share < p_share else 0)
