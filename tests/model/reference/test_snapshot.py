"""A saved and restored sequence is the one that stayed: every live byte, logits, drafts, and its own later saves."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dsuf.errors import NotSupported, UsageError
from dsuf.layout import PageLayout, SnapshotLayout, pages_for, resume_step
from dsuf.model.reference import snapshot
from tests.model.reference.forwards import assert_goes_on_alike, prefilled, stepped

CONFIGS = ["tiny", "other", "micro"]


def ids_of(model, seed, count):
    return [int(i) for i in np.random.default_rng(seed).integers(0, model.spec.vocab_size, count)]


def saved(model, caches, position, part=None):
    """(pages, parts of the snapshot), in buffers full of rubbish; `part` is the size of a part."""
    size = SnapshotLayout.of(model.spec).snapshot_bytes
    pages = [bytearray(b"\xa5" * PageLayout.of(model.spec).page_bytes) for _ in range(pages_for(position))]
    parts = [bytearray(b"\xa5" * (part or size)) for _ in range(-(-size // (part or size)))]
    snapshot.save(caches, position, dict(enumerate(pages)), parts)
    return pages, parts


def restored(model, position, bytes_of):
    caches = model.new_caches()
    snapshot.load(caches, position, *bytes_of)
    return caches


def last_point(model, length):
    return length - length % resume_step(model.spec)


@pytest.mark.parametrize("config", CONFIGS)
@given(data=st.data())
@settings(max_examples=6, deadline=None)
def test_a_restored_sequence_goes_on_as_the_one_that_stayed(model_of, config, data):
    model = model_of(config, "qdq64")
    window = model.spec.sliding_window
    mode = data.draw(st.sampled_from(["exact", "truncated"]))
    prompt = data.draw(st.sampled_from([13, window + 1, 40, 127, 128, 129]))
    decoded = data.draw(st.integers(0, 20))
    ids = ids_of(model, prompt + decoded, prompt + decoded)
    stayed = prefilled(model, ids[:prompt], mode)
    if decoded:
        stepped(model, stayed, ids[prompt:])
    position = last_point(model, len(ids))
    back = data.draw(st.integers(0, (24 - (len(ids) - position)) // resume_step(model.spec)))
    position = max(last_point(model, prompt), position - back * resume_step(model.spec))  # rows run by decode again
    if not position:
        return
    first = saved(model, stayed, position)
    went = restored(model, position, first)
    assert saved(model, went, position) == first
    if position < len(ids) and position >= prompt:
        stepped(model, went, ids[position:])
        assert_goes_on_alike(model, went, stayed, ids_of(model, 5, 14))
        point = last_point(model, went.length)
        again = saved(model, went, point)
        assert again == saved(model, stayed, point)
        twice = restored(model, point, again)
        if point < went.length:
            return
        assert_goes_on_alike(model, twice, stayed, ids_of(model, 6, 3))


@pytest.mark.parametrize("numerics", ["qdq32", "bf16"])
def test_other_quantised_numerics_lose_nothing_either(model_of, numerics):
    model = model_of("micro", numerics)
    ids = ids_of(model, 12, 45)
    stayed = prefilled(model, ids, "truncated")
    went = restored(model, 44, saved(model, stayed, 44))
    stayed.rewind(44)
    for caches in (went, stayed):
        stepped(model, caches, ids[44:])
    assert_goes_on_alike(model, went, stayed, ids_of(model, 13, 12))


@pytest.mark.parametrize("config", CONFIGS)
@pytest.mark.parametrize("packed_size", [None, 1000])
def test_a_prompt_goes_on_over_what_was_restored(model_of, config, packed_size):
    """Exact prefill after a hit is a cold run, whatever the parts of the snapshot."""
    model = model_of(config, "qdq64")
    ids = ids_of(model, 1, 75)
    cold = prefilled(model, ids)
    point = last_point(model, 61)
    hit = restored(model, point, saved(model, prefilled(model, ids[:61]), point, packed_size))
    model.prefill(hit, ids[point:70], final=False)
    model.prefill(hit, ids[70:], final=True)
    assert_goes_on_alike(model, hit, cold, ids_of(model, 2, 4))


@pytest.mark.parametrize("config", CONFIGS)
@pytest.mark.parametrize("beyond", [1, 5, 30])
def test_truncated_prefill_after_a_hit_is_that_of_the_sequence_that_stayed(model_of, config, beyond):
    """Near the prompt's end it goes on over the restored windows, far from it they are dropped."""
    model = model_of(config, "qdq64")
    point = last_point(model, 48)
    ids = ids_of(model, 3, point + beyond)
    stayed = prefilled(model, ids[:point], "truncated")
    hit = restored(model, point, saved(model, stayed, point))
    first = [model.prefill(caches, ids[point:], final=True, mode="truncated").logits for caches in (hit, stayed)]
    assert np.array_equal(*first)
    assert_goes_on_alike(model, hit, stayed, ids_of(model, 4, 4))
    window = model.spec.sliding_window
    assert hit.decoder_start == (point if beyond <= window else point + beyond) - window


def test_only_the_wanted_pages_are_written_and_full_pages_never_change(model_of):
    model = model_of("micro", "qdq64")
    ids = ids_of(model, 7, 300)
    caches = prefilled(model, ids[:260])
    early, _ = saved(model, caches, 260)
    stepped(model, caches, ids[260:])
    late, state = saved(model, caches, 300)
    assert late[:2] == early[:2] and late[2] != early[2]
    untouched = bytearray(b"\xa5" * PageLayout.of(model.spec).page_bytes)
    only = {2: bytearray(untouched)}
    snapshot.save(caches, 300, only, state)
    assert only[2] == late[2]


def test_rows_and_entries_that_nobody_may_read_are_zero(model_of):
    model = model_of("micro", "qdq64")
    caches = prefilled(model, ids_of(model, 8, 30), "truncated")
    assert caches.decoder_start == 22
    stepped(model, caches, ids_of(model, 9, 3))
    layout = SnapshotLayout.of(model.spec)
    (page,), (state,) = saved(model, caches, 26)
    windows = np.frombuffer(state, np.uint8)[: layout.windows_bytes].reshape(layout.window_layers, 8, -1)
    first = model.spec.decoder_start_layer
    assert not windows[first:, :4].any() and windows[first:, 4:].any(axis=-1).all()
    assert windows[:first].any(axis=-1).all()
    codes = PageLayout.of(model.spec).sources[-1].codes
    rows = np.frombuffer(page, np.uint8)[codes.offset : codes.end].reshape(codes.rows, codes.width)
    assert rows[:26].any(axis=-1).all() and not rows[26:].any()


def test_what_cannot_be_saved_or_restored_says_why(model_of):
    model = model_of("micro", "qdq64")
    caches = prefilled(model, ids_of(model, 10, 60))
    good = saved(model, caches, 60)
    for position in (61, 59, 34, 0):
        with pytest.raises(UsageError, match=f"save at {position}, expected a multiple of 2 from 36 to 60"):
            snapshot.save(caches, position, {}, good[1])
    with pytest.raises(UsageError, match="page 1 wanted, expected 0 to 0"):
        snapshot.save(caches, 60, {1: good[0][0]}, good[1])
    with pytest.raises(UsageError, match="room for 9 bytes"):
        snapshot.save(caches, 60, {}, [bytearray(9)])
    went = restored(model, 60, good)
    with pytest.raises(UsageError, match="not before 60, where the sequence was restored"):
        model.rewind(went, 58)
    with pytest.raises(UsageError, match="save at 58, expected a multiple of 2 from 60 to 60"):
        snapshot.save(went, 58, {}, good[1])
    with pytest.raises(UsageError, match="restore over 60 positions"):
        snapshot.load(caches, 60, *good)
    with pytest.raises(UsageError, match="1 pages for 160 tokens, expected 2"):
        snapshot.load(model.new_caches(), 160, *good)
    with pytest.raises(UsageError, match="a snapshot of 7 bytes"):
        snapshot.load(model.new_caches(), 60, good[0], [bytearray(7)])
    damaged = [bytearray(good[1][0])]
    damaged[0][-8] = 200
    with pytest.raises(UsageError, match="damaged"):
        snapshot.load(model.new_caches(), 60, good[0], damaged)
    model.prefill(halfway := model.new_caches(), [1, 2], final=False, mode="truncated")
    with pytest.raises(UsageError, match="inside a truncated prefill"):
        snapshot.save(halfway, 2, {}, good[1])
    plain = model_of("micro", "exact32")
    with pytest.raises(NotSupported, match="exact32"):
        snapshot.save(prefilled(plain, [1, 2]), 2, {}, good[1])
    with pytest.raises(NotSupported, match="exact32"):
        snapshot.load(plain.new_caches(), 2, *good)
