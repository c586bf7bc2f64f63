"""What must never change a sequence: chunks, blocks, rejections, rewinds, packing, company, drafts.

Every comparison is bit for bit, in exact32 too: rows are computed by shapes that do not depend on other rows.
"""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from dsuf.model.reference.model import Block, DraftRequest
from dsuf.ops.accept import accept_greedy
from tests.model.reference.forwards import (
    assert_goes_on_alike,
    assert_same_bits,
    assert_same_state,
    one_row,
    prefilled,
    stepped,
    twin,
)

FEW = settings(max_examples=5, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
seeds = st.integers(0, 2**32 - 1)


@pytest.fixture(scope="module", params=["tiny-exact32", "tiny-qdq64", "other-exact32", "other-qdq64"])
def model(request, model_of):
    return model_of(*request.param.split("-"))


def ids_of(model, seed, count):
    return [int(i) for i in np.random.default_rng(seed).integers(0, model.spec.vocab_size, count)]


def cuts_of(seed, length):
    """Ascending chunk ends, the last one `length`."""
    rng = np.random.default_rng(seed)
    inner = np.unique(rng.integers(1, length, rng.integers(0, 8))) if length > 1 else []
    return [*(int(cut) for cut in inner if cut < length), length]


@FEW
@given(seed=seeds, length=st.integers(1, 120))
def test_any_chunking_equals_one_chunk(model, seed, length):
    ids = ids_of(model, seed, length)
    whole, pieces = model.new_caches(), model.new_caches()
    expected = model.prefill(whole, ids, final=True, every_logit=True)
    argmax, start = [], 0
    for end in cuts_of(seed, length):
        found = model.prefill(pieces, ids[start:end], final=end == length, every_logit=True)
        argmax, start = [*argmax, *found.argmax], end
    assert_same_bits(found.logits, expected.logits, "last logits")
    assert argmax == expected.argmax.tolist()
    assert_goes_on_alike(model, pieces, whole, ids_of(model, seed + 1, 3))


@pytest.mark.parametrize("odd", [0, 1])
def test_lengths_around_the_window_by_prefill_equal_those_by_steps(model, odd):
    window = model.spec.sliding_window
    for length in (1 + odd, window - 1, window, window + 1, 2 * window + 1, 2 * window + odd):
        ids = ids_of(model, length, length)
        stepwise = prefilled(model, ids[:1])
        logits = stepped(model, stepwise, ids[1:]) if length > 1 else None
        caches = model.new_caches()
        found = model.prefill(caches, ids, final=True)
        if logits is not None:
            assert_same_bits(found.logits, logits[-1], f"logits at length {length}")
        assert_goes_on_alike(model, caches, stepwise, ids_of(model, 1, 2))


@FEW
@given(seed=seeds, start=st.integers(1, 70), rows=st.integers(1, 9))
def test_a_block_of_rows_equals_single_steps(model, seed, start, rows):
    ids = ids_of(model, seed, start + rows)
    block, single = prefilled(model, ids[:start]), prefilled(model, ids[:start])
    (logits,) = model.forward([Block(block, ids[start:])])
    model.commit(block, rows)
    assert_same_bits(logits, stepped(model, single, ids[start:]), "logits")
    assert_goes_on_alike(model, block, single, ids_of(model, seed + 1, 2))


@FEW
@given(seed=seeds, start=st.integers(1, 70), rows=st.integers(2, 9), data=st.data())
def test_rejected_rows_leave_no_trace(model, seed, start, rows, data):
    kept = data.draw(st.integers(1, rows - 1))
    ids = ids_of(model, seed, start + rows)
    tried, untouched = prefilled(model, ids[:start]), prefilled(model, ids[:start])
    model.forward([Block(tried, ids[start:])])
    assert tried.pending == rows
    assert_same_state(tried, untouched)
    model.forward([Block(tried, [ids[start], *ids_of(model, seed + 1, rows - 1)])])  # forgets the first attempt
    model.commit(tried, kept)
    model.forward([Block(untouched, [ids[start], *ids_of(model, seed + 1, rows - 1)][:kept])])
    model.commit(untouched, kept)
    assert_goes_on_alike(model, tried, untouched, ids_of(model, seed + 2, 3))


@FEW
@given(seed=seeds, start=st.integers(30, 60), back=st.integers(0, 24))
def test_rewound_and_continued_equals_never_gone_further(model, seed, start, back):
    ids = ids_of(model, seed, start + 2 * back)
    rewound, straight = prefilled(model, ids[:start]), prefilled(model, ids[:start])
    # Random blocks of which part is rejected, until `back` more positions are kept.
    rng = np.random.default_rng(seed)
    while rewound.length < start + back:
        rows = int(rng.integers(1, 7))
        kept = min(int(rng.integers(1, rows + 1)), start + back - rewound.length)
        model.forward([Block(rewound, ids_of(model, int(rng.integers(1 << 30)), rows))])
        model.commit(rewound, kept)
    model.rewind(rewound, start)
    assert_goes_on_alike(model, rewound, straight, ids_of(model, seed + 3, 5))


def test_rewind_refuses_more_than_it_keeps(model):
    caches = prefilled(model, ids_of(model, 1, 40))
    for length in (15, 41, -1):
        with pytest.raises(Exception, match="rewind from 40"):
            model.rewind(caches, length)


@FEW
@given(seed=seeds, rows=st.integers(1, 48), sequences=st.integers(1, 5))
def test_a_row_has_the_same_bits_alone_and_in_any_company(model, seed, rows, sequences):
    rng = np.random.default_rng(seed)
    sequences = min(rows, sequences)
    ends = np.sort(rng.choice(np.arange(1, rows), sequences - 1, replace=False)) if sequences > 1 else []
    counts = np.diff([0, *ends, rows])
    starts = [prefilled(model, ids_of(model, seed + i, int(rng.integers(1, 50)))) for i in range(sequences)]
    ids = [ids_of(model, seed + 100 + i, int(count)) for i, count in enumerate(counts)]
    alone = [twin(caches) for caches in starts]
    together = model.forward([Block(caches, run) for caches, run in zip(starts, ids, strict=True)])
    for caches, single, run, logits in zip(starts, alone, ids, together, strict=True):
        assert_same_bits(logits, stepped(model, single, run), "logits")
        model.commit(caches, len(run))
        assert_same_state(caches, single)
    requests = [DraftRequest(caches, 5) for caches in starts]
    for draft, single in zip(model.draft(requests), alone, strict=True):
        assert_same_bits(draft.logits, model.draft([DraftRequest(single, 5)])[0].logits, "draft logits")


@FEW
@given(seed=seeds, length=st.integers(1, 150))
def test_packed_pages_hold_everything(model, seed, length):
    if not model.numerics.quantise:
        assert model.new_caches(packed=True).pages is None
        return
    ids = ids_of(model, seed, length + 8)
    plain, packed, reread = (prefilled(model, ids[:length], packed=kind) for kind in (False, True, True))
    for token in ids[length:]:
        for entries in reread.entries.values():  # nothing but the pages may matter
            entries.latents[:], entries.keys[:] = np.nan, np.nan
        reread.reload_entries()
        for entries in reread.entries.values():
            np.nan_to_num(entries.latents, copy=False)
            np.nan_to_num(entries.keys, copy=False)
        expected = one_row(model, plain, token)
        assert_same_bits(one_row(model, packed, token), expected, "logits over packed pages")
        assert_same_bits(one_row(model, reread, token), expected, "logits over pages read back")
    assert_same_state(packed, reread)
    assert plain.pages is None and len(packed.pages.data) >= -(-packed.length // 128)


@FEW
@given(seed=seeds, mode=st.sampled_from(["exact", "truncated"]), offered=st.sampled_from(["own", "true", "mixed"]))
def test_greedy_tokens_are_the_same_with_and_without_drafts(model, seed, mode, offered):
    prompt, count = ids_of(model, seed, 29), 24
    plain = model.new_caches()
    truth = [int(np.argmax(model.prefill(plain, prompt, final=True, mode=mode).logits))]
    while len(truth) < count + 8:
        truth.append(int(np.argmax(one_row(model, plain, truth[-1]))))
    rng, caches = np.random.default_rng(seed), model.new_caches()
    tokens = [int(np.argmax(model.prefill(caches, prompt, final=True, mode=mode).logits))]
    while len(tokens) < count:
        (draft,) = model.draft([DraftRequest(caches, tokens[-1])])
        drafts, at = draft.tokens, len(tokens)
        if offered != "own":  # a synthetic checkpoint seldom agrees with its drafter
            drafts = truth[at : at + len(drafts)]
            if offered == "mixed":
                drafts[int(rng.integers(len(drafts)))] = 7
        drafts = drafts[: int(rng.integers(0, len(drafts) + 1))]
        (logits,) = model.forward([Block(caches, [tokens[-1], *drafts])])
        accepted, following = accept_greedy(drafts, np.argmax(logits, axis=-1))
        model.commit(caches, 1 + accepted)
        tokens += [*drafts[:accepted], following]
    assert tokens == truth[: len(tokens)]


def test_drafting_changes_no_cache(model):
    caches = prefilled(model, ids_of(model, 4, 33))
    before = twin(caches)
    first = model.draft([DraftRequest(caches, 9)])[0]
    assert_same_state(caches, before)
    assert_same_bits(model.draft([DraftRequest(caches, 9)])[0].logits, first.logits, "draft logits")


def test_the_chooser_decides_what_the_next_slot_follows(model):
    caches = prefilled(model, ids_of(model, 5, 20))
    seen = []

    def second_best(logits, slot):
        seen.append(slot)
        return int(np.argsort(-logits)[1])

    greedy, other = model.draft([DraftRequest(caches, 9), DraftRequest(caches, 9, second_best)])
    size = model.spec.dspark_block_size
    assert seen == list(range(size)) and len(other.tokens) == size
    assert_same_bits(other.logits[0], greedy.logits[0], "logits of slot 0")
    assert other.tokens[0] == int(np.argsort(-greedy.logits[0])[1])
    assert not np.array_equal(other.logits[1], greedy.logits[1])
