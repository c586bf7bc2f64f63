"""Copies over registered memory on the stand-in: the same bytes without staging, whatever is registered when."""

from __future__ import annotations

import mmap
import threading

import numpy as np
import pytest

from dsuf.engine.gpu.copies import LANDINGS, PLACES, Copies
from dsuf.engine.gpu.mover import MOVED, TABLES, Mover
from dsuf.engine.gpu.pages import Pages
from dsuf.engine.gpu.staging import spread
from dsuf.engine.shared import NumberedPages, SharedPages, address_of
from dsuf.errors import DeviceError
from dsuf.kernels.catalogue import CONFIGS
from dsuf.layout import PageLayout, SnapshotLayout, pages_for
from dsuf.model.checkpoint import Checkpoint
from dsuf.model.reference import snapshot
from dsuf.model.reference.model import ReferenceModel
from dsuf.model.synthetic import load_config, write_checkpoint
from dsuf.spec import Spec
from tests.engine.gpu.late import LateDevice
from tests.support.simt_device import SimtDevice

TINY = Spec.load(CONFIGS / "tiny.json")
PAGE, STATE = PageLayout.of(TINY).page_bytes, SnapshotLayout.of(TINY).snapshot_bytes
CUT, PIECE, SLOTS = 4096, 8192, 24


class Arena:
    """Slots of a page's size, as an agent lends them."""

    def __init__(self, slots=SLOTS):
        self.map = mmap.mmap(-1, -(-slots * PAGE // PIECE) * PIECE)
        self.view = memoryview(self.map)

    def pages(self, *slots):
        return SharedPages(self.view, PAGE, np.array(slots, np.uint32))

    def state(self, first, count):
        """Parts of a snapshot that lie in slots from `first` on, the last byte in a part of its own."""
        begin, size = first * PAGE, count * PAGE
        return [self.view[begin : begin + STATE - 1], self.view[begin + size - 8 : begin + size]]


@pytest.fixture(scope="module")
def cached(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tiny") / "ckpt"
    write_checkpoint(load_config("tiny"), folder)
    with Checkpoint.open(folder) as checkpoint:
        model = ReferenceModel.load(checkpoint, "qdq64", checkpoint.class_map())
        caches = model.new_caches()
        ids = np.random.default_rng(300).integers(3, TINY.vocab_size, 300).tolist()
        model.prefill(caches, ids, final=True, mode="truncated")
        yield caches


@pytest.fixture
def device():
    return SimtDevice()


@pytest.fixture(params=[0, MOVED], ids=["copied", "moved"])
def copies(device, request):
    pages = Pages(device, TINY, slots=8, count=40, most_pages=8)
    made = Copies(pages, cut=CUT, piece=PIECE, moved=request.param)
    yield made
    made.close()


def put(arena, caches, position, pages, state):
    """What the CPU backend saves of a prefix, in the arena; (its pages, its state) as bytes."""
    snapshot.save(caches, position, dict(enumerate(pages)), state)
    return [bytes(page) for page in pages], b"".join(bytes(part) for part in state)


def shared_prefix(copies, caches):
    """A shared arena with the prefix of 300 tokens in slots 0 to 3: (the arena, its pages, its state)."""
    arena = Arena()
    pages, state = arena.pages(0, 1, 2), arena.state(3, 1)
    put(arena, caches, 300, pages, state)
    copies.share(arena.view).settle()
    return arena, pages, state


def without_staging(copies):
    copies._staging = None


def restored(copies, position, pages, state):
    slot = copies.pages.open()
    copies.pages.reserve(slot, position + 12)
    number, decoder_start = copies.restore(slot, position, pages, state)
    return slot, number, decoder_start


class TestRegistered:
    @pytest.mark.parametrize("position", [300, 294, 280])
    def test_bytes_come_and_go_without_staging_whatever_slots_they_lie_in(self, copies, cached, position):
        arena = Arena()
        pages, state = arena.pages(*[7, 2, 3][: pages_for(position)]), arena.state(10, 1)
        kept, kept_state = put(arena, cached, position, pages, state)
        copies.share(arena.view).settle()
        without_staging(copies)
        slot, number, decoder_start = restored(copies, position, pages, state)
        assert copies.progress() == number == 1
        got = NumberedPages(np.arange(len(pages)), arena.pages(*[15, 13, 14][: len(pages)]))
        out = arena.state(20, 1)
        assert copies.snapshot(slot, position, decoder_start, got, out) == copies.progress() == 2
        assert b"".join(bytes(part) for part in out) == kept_state
        assert [bytes(got[number]) for number in range(len(kept))] == kept
        assert not any(arena.view[16 * PAGE : 20 * PAGE])  # nothing beside them

    def test_only_the_wanted_pages_are_written(self, copies, cached):
        arena = Arena()
        pages, state = arena.pages(0, 1, 2), arena.state(3, 1)
        kept, _ = put(arena, cached, 300, pages, state)
        copies.share(arena.view).settle()
        without_staging(copies)
        slot, _, start = restored(copies, 300, pages, state)
        wanted = NumberedPages(np.array([1]), arena.pages(9))
        copies.snapshot(slot, 300, start, wanted, arena.state(11, 1))
        copies.snapshot(slot, 300, start, NumberedPages(np.array([], np.int64), arena.pages()), arena.state(13, 1))
        copies.finish(3)
        assert bytes(wanted[1]) == kept[1] and not any(arena.view[10 * PAGE : 11 * PAGE])
        assert arena.state(11, 1)[0] == arena.state(13, 1)[0] == state[0]

    def test_memory_that_is_not_registered_goes_through_staging(self, copies, cached):
        arena, other = Arena(), Arena()
        pages, state = other.pages(0, 4, 2), other.state(8, 1)
        kept, kept_state = put(other, cached, 300, pages, state)
        copies.share(arena.view).settle()
        slot, _, start = restored(copies, 300, pages, state)
        got, out = NumberedPages(np.arange(3), other.pages(12, 13, 14)), other.state(20, 1)
        copies.finish(copies.snapshot(slot, 300, start, got, out))
        assert [bytes(got[number]) for number in range(3)] == kept
        assert b"".join(bytes(part) for part in out) == kept_state

    @pytest.mark.parametrize("error", [DeviceError("OUT_OF_MEMORY."), RuntimeError("OUT_OF_MEMORY: none.")])
    def test_a_machine_that_refuses_is_told_of_and_the_rest_goes_through_staging(
        self, copies, cached, device, capsys, error
    ):
        register, before = device.register, [0]

        def some(address, nbytes):
            before[0] += 1
            if before[0] > 5:
                raise error
            register(address, nbytes)

        device.register = some
        arena = Arena()
        registered = copies.share(arena.view)
        registered.settle()
        assert registered.end - registered.begin == 5 * PIECE
        said = capsys.readouterr().err
        assert "0.0 of 0.0 GiB of cache memory are page-locked, no more can be: OUT_OF_MEMORY" in said
        assert "--kv-host-bytes" in said and said.count("\n") == 1
        position = 280
        lent = arena.pages(5, 6, 7), arena.state(8, 1)
        kept, kept_state = put(arena, cached, position, *lent)
        slot, _, start = restored(copies, position, *lent)
        got, out = NumberedPages(np.arange(3), arena.pages(0, 1, 12)), arena.state(14, 1)
        copies.finish(copies.snapshot(slot, position, start, got, out))
        assert [bytes(got[number]) for number in range(3)] == kept
        assert b"".join(bytes(part) for part in out) == kept_state

    def test_another_agents_memory_takes_the_place_of_the_old_which_stays_mapped_until_unregistered(
        self, copies, cached, device
    ):
        first, second = Arena(), Arena()
        copies.share(first.view).settle()
        hold, unregister = threading.Event(), device.unregister
        device.unregister = lambda address: (hold.wait(), unregister(address))
        new = copies.share(second.view)
        begin, mapped = address_of(first.view), first.map
        del first
        with pytest.raises(BufferError):
            mapped.close()
        hold.set()
        new.settle()
        mapped.close()
        assert not any(begin <= buffer.first < begin + PIECE for buffer in device.global_memory.buffers)
        pages, state = second.pages(3, 4, 5), second.state(8, 1)
        put(second, cached, 300, pages, state)
        without_staging(copies)
        _, number, _ = restored(copies, 300, pages, state)
        copies.finish(number)

    def test_registering_ends_where_its_memory_is_replaced(self, copies, device):
        begun, go, register = threading.Event(), threading.Event(), device.register
        device.register = lambda *args: (begun.set(), go.wait(), register(*args))
        first, second = Arena(), Arena()
        old = copies.share(first.view)
        begun.wait()
        new = copies.share(second.view)
        go.set()
        new.settle()
        assert old.begin == old.end and new.covers(address_of(second.view), address_of(second.view) + SLOTS * PAGE)
        one, other = (range(address_of(arena.view), address_of(arena.view) + SLOTS * PAGE) for arena in (first, second))
        there = [buffer.first for buffer in device.global_memory.buffers]
        assert not any(address in one for address in there) and sum(address in other for address in there) >= 20


class TestTurns:
    @pytest.fixture
    def device(self):
        return LateDevice()

    def test_a_restore_lands_once_its_bytes_are_there_and_nobody_waits_meanwhile(self, copies, cached, device):
        _, pages, state = shared_prefix(copies, cached)
        slot, number, _ = restored(copies, 300, pages, state)
        launched = device.log["state.restore"]
        assert not copies.land(slot, wait=False) and copies.progress() == 0
        assert device.log["state.restore"] == launched
        device.ended = device.recorded
        assert copies.progress() == number  # the bytes are free before they land
        assert copies.land(slot, wait=False) and copies.land(slot, wait=False)
        assert device.log["state.restore"] == launched + 1

    def test_who_needs_it_now_lets_the_device_wait(self, copies, cached, device):
        _, pages, state = shared_prefix(copies, cached)
        slot, _, _ = restored(copies, 300, pages, state)
        waited = []
        device.wait = waited.append
        assert copies.land(slot) and len(waited) == 1 and not waited[0].done()

    def test_more_restores_than_places_land_the_oldest_first(self, copies, cached, device):
        _, pages, state = shared_prefix(copies, cached)
        slots = [restored(copies, 300, pages, state)[0] for _ in range(LANDINGS + 1)]
        assert device.log["state.restore"] == 1 and slots[0] not in copies._landings
        copies.forget(slots[1])  # a request that was cancelled
        copies.pages.release(slots[1])
        assert slots[1] not in copies.pages._free_slots
        copies.finish(3)
        device.ended = device.recorded
        copies.progress()
        assert slots[1] in copies.pages._free_slots and len(copies._arrivals) == LANDINGS - 1

    def test_a_copy_has_ended_when_all_before_it_have(self, copies, cached, device):
        arena, pages, state = shared_prefix(copies, cached)
        slot, first, start = restored(copies, 300, pages, state)
        copies.finish(first)
        late = copies.snapshot(slot, 300, start, NumberedPages(np.arange(3), arena.pages(5, 6, 7)), arena.state(8, 1))
        saved = copies._jobs[-1]
        _, soon, _ = restored(copies, 300, pages, state)
        copies._jobs[-1].advance = lambda: True  # the other direction is faster
        assert copies.progress() == first and copies._jobs == [saved]
        copies.finish(late)
        assert copies.progress() == soon == late + 1

    def test_what_lies_after_the_position_is_left_out_when_the_bytes_have_arrived(self, copies, cached, device):
        arena, pages, state = shared_prefix(copies, cached)
        slot, number, _ = restored(copies, 300, pages, state)
        copies.finish(number)
        device.upload(copies.pages.address(slot, 2), np.full(PAGE, 0xEE, np.uint8))
        wanted, out = NumberedPages(np.array([2]), arena.pages(9)), arena.state(8, 1)
        number = copies.snapshot(slot, 300, 299, wanted, out)
        assert bytes(wanted[2]) == b"\xee" * PAGE
        copies.finish(number)
        expected = np.full(PAGE, 0xEE, np.uint8)
        for source in copies.pages.layout.sources:
            snapshot.blank(expected, source, 300 // source.ratio - source.first_entry(2))
        assert bytes(wanted[2]) == expected.tobytes() and not expected.all()
        assert b"".join(map(bytes, out))[STATE - 8 : STATE] == (299).to_bytes(8, "little")

    def test_the_places_of_snapshots_are_used_again_once_their_state_has_left(self, copies, cached, device):
        arena, pages, state = shared_prefix(copies, cached)
        slot, number, start = restored(copies, 300, pages, state)
        copies.finish(number)
        none = NumberedPages(np.array([], np.int64), arena.pages())
        for turn in range(PLACES):
            copies.snapshot(slot, 300, start, none, arena.state(5 + 2 * turn, 1))
        assert copies.progress() == number
        copies.snapshot(slot, 300, start, none, arena.state(20, 1))
        assert copies.progress() == number + 1

    def test_addresses_are_kept_until_the_kernel_has_read_them(self):
        device = LateDevice()
        mover, here = Mover(device, PAGE, STATE), device.allocate(2 * PAGE, "pages")
        device.zero(here, 2 * PAGE)
        first, second, before = np.array([here]), np.array([here + PAGE]), device.recorded
        for _ in range(TABLES):
            mover.move([], first, second)
        assert device.ended <= before
        mover.move([], first, second)
        assert device.ended == before + 1


@pytest.mark.parametrize("streams", [True, False])
def test_a_kernel_takes_no_processors_from_streams(device, cached, streams):
    copies = Copies(Pages(device, TINY, slots=2, count=10, most_pages=8), lambda: streams, cut=CUT, piece=PIECE)
    _, pages, state = shared_prefix(copies, cached)
    slot, number, start = restored(copies, 300, pages, state)
    copies.finish(number)
    copies.finish(copies.snapshot(slot, 300, start, NumberedPages(np.arange(3), pages), state))
    assert device.log["pieces.move"] == (0 if streams else 2)
    copies.close()


def test_a_kernel_takes_only_what_is_soon_over_and_made_of_whole_words():
    mover = Mover(SimtDevice(), PAGE, STATE, most=5)
    words = [(1 << 20, 1 << 30, 7936)]
    assert mover.takes(words, 3) and not mover.takes(words, 4)
    for at in range(3):
        for wrong in (1, 8):
            part = [1 << 20, 1 << 30, 7936]
            part[at] += wrong
            assert not mover.takes([tuple(part)], 1)


def test_parts_of_a_row_of_buffers_by_offset():
    state, data = [bytearray(5), bytearray(3), bytearray(9)], np.arange(1, 8, dtype=np.uint8)
    for source, target in spread(data, state, into=True, at=4):
        target[:] = source
    assert b"".join(state) == bytes(4) + bytes(data) + bytes(6)
    back = np.zeros(7, np.uint8)
    for source, target in spread(back, state, into=False, at=4):
        target[:] = source
    assert np.array_equal(back, data)


def test_free_pages_are_taken_side_by_side_for_many_and_from_the_end_for_a_few(device):
    pages = Pages(device, TINY, slots=4, count=40, most_pages=24)
    first, second, third = pages.open(), pages.open(), pages.open()
    for step in range(1, 11):  # they grow by turns
        for slot in (first, second):
            pages.reserve(slot, 128 * step)
    pages.release(first)
    pages.release(second)
    pages.reserve(third, 128 * 20)
    assert np.array_equal(np.diff(pages.addresses(third)), np.full(19, PAGE))
    pages.reserve(third, 128 * 21)
    assert pages.pages_of(third)[-1] == 39
