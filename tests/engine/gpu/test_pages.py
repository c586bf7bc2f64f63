"""Pages, slots and copies on the stand-in: what the CPU backend saved comes back, and goes out again, byte for byte."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest

from dsuf.engine.gpu.copies import Copies
from dsuf.engine.gpu.pages import RING_EXTRA, Pages, Sizes
from dsuf.errors import DeviceError, UsageError
from dsuf.kernels import catalogue
from dsuf.kernels.catalogue import CONFIGS
from dsuf.kernels.latents import window_row_bytes
from dsuf.layout import PageLayout, SnapshotLayout, pages_for
from dsuf.model.checkpoint import Checkpoint
from dsuf.model.reference import snapshot
from dsuf.model.reference.model import ReferenceModel
from dsuf.model.synthetic import load_config, write_checkpoint
from dsuf.spec import Spec
from tests.support.simt_device import SimtDevice

TINY = Spec.load(CONFIGS / "tiny.json")
PAGE, STATE = PageLayout.of(TINY).page_bytes, SnapshotLayout.of(TINY).snapshot_bytes


@pytest.fixture(autouse=True, scope="module")
def _catalogued():
    assert {"state.save", "state.restore"} <= {entry.name for entry in catalogue.entries()}


@pytest.fixture
def pages():
    return Pages(SimtDevice(), TINY, slots=3, count=12, most_pages=8)


@pytest.fixture(scope="module")
def caches(tmp_path_factory):
    """Sequences on the reference by length, prefilled as deployed, so that decoder rows begin late."""
    folder = tmp_path_factory.mktemp("tiny") / "ckpt"
    write_checkpoint(load_config("tiny"), folder)
    with Checkpoint.open(folder) as checkpoint:
        model = ReferenceModel.load(checkpoint, "qdq64", checkpoint.class_map())
        found = {}
        for length in (258, 300):
            found[length] = model.new_caches()
            ids = np.random.default_rng(length).integers(3, TINY.vocab_size, length).tolist()
            model.prefill(found[length], ids, final=True, mode="truncated")
        yield found


def saved(caches, position, length=300):
    pages = [bytearray(PAGE) for _ in range(pages_for(position))]
    state = bytearray(STATE)
    snapshot.save(caches[length], position, dict(enumerate(pages)), [state])
    return pages, state


class TestSizes:
    def test_a_page_of_the_real_model_is_445_times_256_and_windows_have_room_for_a_rewind(self):
        real = Sizes.of(Spec.load(CONFIGS / "v41-flash.json"))
        assert real.page == 113_920
        assert real.window_pitch == 43 * (128 + RING_EXTRA) * 528 and RING_EXTRA >= 36
        assert real.drafter_windows * 43 == real.window_pitch * 3


class TestPool:
    def test_a_slot_gets_pages_as_it_grows_and_the_device_sees_their_numbers(self, pages):
        slot = pages.open()
        pages.reserve(slot, 129)
        pages.reserve(slot, 130)
        pages.reserve(slot, 257)
        held = pages.pages_of(slot)
        assert len(set(held)) == 3 and pages.free == 9
        row = pages.device.download(pages.table + 4 * slot * pages.most_pages, 12).view(np.uint32)
        assert row.tolist() == held
        assert pages.address(slot, 2) == pages.pool + held[2] * PAGE

    def test_released_memory_is_used_again(self, pages):
        for _ in range(5):
            first, second = pages.open(), pages.open()
            pages.reserve(first, 8 * 128)
            pages.reserve(second, 4 * 128)
            pages.release(first)
            pages.release(second)
        assert pages.free == 12

    def test_more_than_there_is_raises(self, pages):
        slots = [pages.open() for _ in range(3)]
        with pytest.raises(DeviceError, match="all 3 sequence slots are taken"):
            pages.open()
        with pytest.raises(DeviceError, match=r"1025 tokens need 9 pages, a sequence has at most 8"):
            pages.reserve(slots[0], 1025)
        pages.reserve(slots[0], 8 * 128)
        with pytest.raises(DeviceError, match=r"5 pages are needed and 4 of 12 are free"):
            pages.reserve(slots[1], 5 * 128)

    def test_every_layer_and_stage_has_a_ring(self, pages):
        layers = TINY.num_hidden_layers + TINY.num_nextn_predict_layers
        row = window_row_bytes(TINY.head_dim)
        assert pages.ring_of(layers) - pages.ring_of(0) == pages.window_pitch
        assert pages.ring_of(1) - pages.ring_of(0) == (TINY.sliding_window + RING_EXTRA) * row


class TestCopies:
    @pytest.mark.parametrize(
        ("length", "position"), [(300, 300), (300, 294), (300, 280), (258, 258), (258, 256), (258, 252)]
    )
    def test_what_the_cpu_saved_comes_back_byte_for_byte(self, pages, caches, length, position):
        copies, (kept, state) = Copies(pages), saved(caches, position, length)
        slot, dirty = pages.open(), pages.open()
        pages.reserve(dirty, 8 * 128)  # pages that others left full of their entries
        for number in range(8):
            pages.device.upload(pages.address(dirty, number), np.full(PAGE, 0xAB, np.uint8))
        pages.release(dirty)
        pages.reserve(slot, position + 12)
        number, decoder_start = copies.restore(slot, position, kept, [state[:100], state[100:]])
        assert copies.progress() == number == 1
        assert decoder_start == min(length - TINY.sliding_window, position)
        got = [bytearray(PAGE) for _ in kept]
        parts = [bytearray(77) for _ in range(STATE // 77)] + [bytearray(STATE % 77)]
        last = copies.snapshot(slot, position, decoder_start, dict(enumerate(got)), parts)
        assert copies.progress() == last == 2
        assert b"".join(parts) == state
        for mine, expected in zip(got, kept, strict=True):
            assert mine == expected

    def test_window_rows_stand_where_attention_reads_them(self, pages, caches):
        copies, (kept, state) = Copies(pages), saved(caches, 300)
        slot = pages.open()
        pages.reserve(slot, 300)
        copies.restore(slot, 300, kept, [state])
        copies.land(slot)
        layout, row = SnapshotLayout.of(TINY), pages.row_bytes
        rows = np.frombuffer(state, np.uint8)[: layout.windows_bytes].reshape(layout.window_layers, -1, 66)
        for layer, position in ((0, 292), (3, 299), (14, 295)):
            at = pages.ring_of(layer) + slot * pages.window_pitch + position % pages.ring * row
            assert np.array_equal(pages.device.download(at, 66), rows[layer, position - 292])

    def test_rows_that_no_later_token_sees_are_zero(self, pages, caches):
        copies, (kept, state) = Copies(pages), saved(caches, 300)
        slot = pages.open()
        pages.reserve(slot, 300)
        copies.restore(slot, 300, kept, [state])
        out = bytearray(STATE)
        copies.snapshot(slot, 300, 298, {}, [out])
        layout = SnapshotLayout.of(TINY)
        rows = np.frombuffer(out, np.uint8)[: layout.windows_bytes].reshape(layout.window_layers, -1, 66)
        decoder = TINY.decoder_start_layer
        assert rows[:decoder].any(axis=-1).all()
        assert not rows[decoder:, :6].any() and rows[decoder:, 6:].any(axis=-1).all()

    def test_wrong_sizes_change_nothing(self, pages, caches):
        copies, (kept, state) = Copies(pages), saved(caches, 300)
        slot = pages.open()
        pages.reserve(slot, 300)
        for wrong, match in (((kept[:1], [state]), "1 pages for 300"), ((kept, [state[:50]]), "a snapshot of 50")):
            with pytest.raises(UsageError, match=match):
                copies.restore(slot, 300, *wrong)
        with pytest.raises(UsageError, match="page 3 wanted"):
            copies.snapshot(slot, 300, 0, {3: bytearray(PAGE)}, [bytearray(STATE)])
        assert copies.progress() == 0

    def test_pages_of_a_released_slot_are_kept_until_its_copies_have_ended(self, pages, caches):
        copies, (kept, state) = Copies(pages), saved(caches, 300)
        slot = pages.open()
        pages.reserve(slot, 300)
        copies.restore(slot, 300, kept, [state])
        pages.copied = 0  # as if the copy were under way
        pages.release(slot)
        assert slot not in pages._free_slots
        copies.progress()
        assert slot in pages._free_slots

    def test_waiting_for_a_slot_takes_back_none_whose_work_goes_on(self, caches):
        pages = Pages(SimtDevice(), TINY, slots=2, count=12, most_pages=8)
        copies, (kept, state) = Copies(pages), saved(caches, 300)
        first, second = pages.open(), pages.open()
        pages.reserve(first, 300)
        copies.restore(first, 300, kept, [state])
        pages.copied = 0  # as if the copy were under way
        pages.release(first)
        pages.release(second)
        pages._leaving[1].event = SimpleNamespace(done=lambda: False, wait=lambda: pytest.fail("waited for the second"))
        assert pages.open() == first
        assert [left.slot for left in pages._leaving] == [second]
