import mmap
import os

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dsuf.errors import EnvironmentProblem
from dsuf.kv.arena import Arena, Slots, runs


def test_an_arena_is_one_piece_of_memory_that_another_process_can_map():
    arena = Arena(10 * 4096 + 5, 4096, 128)
    assert arena.slots == 10 and arena.nbytes % (2 << 20) == 0
    arena.bytes_of(3)[:4] = b"page"
    other = mmap.mmap(arena.fd, arena.nbytes)
    assert other[3 * 4096 : 3 * 4096 + 4] == b"page"
    arena.close()
    arena.close()


def test_a_read_only_descriptor_cannot_be_mapped_for_writing():
    arena = Arena(4096, 4096, 128)
    fd = arena.read_only_fd()
    assert mmap.mmap(fd, arena.nbytes, prot=mmap.PROT_READ)[0] == 0
    with pytest.raises(PermissionError):
        mmap.mmap(fd, arena.nbytes)
    os.close(fd)
    arena.close()


def test_an_arena_without_room_for_a_page_is_refused():
    with pytest.raises(EnvironmentProblem, match="kv-host-bytes"):
        Arena(4095, 4096, 128)


def test_a_digest_sees_every_byte_of_its_slot_and_no_other():
    arena = Arena(3 * 512, 512, 128)
    before = arena.digest(1)
    arena.view[511] = arena.view[1024] = 1
    assert arena.digest(1) == before
    for at in (512, 1023):
        arena.view[at] ^= 1
        assert arena.digest(1) != before
        arena.view[at] ^= 1


def test_slots_come_as_one_run_when_there_is_one():
    slots = Slots(100)
    first, second = slots.take(10), slots.take(20)
    slots.give(first)
    assert runs(second) == [(10, 20)]
    assert runs(slots.take(5)) == [(0, 5)], "the shortest run that fits"
    assert runs(slots.take(50)) == [(30, 50)]
    assert runs(slots.take(25)) == [(80, 20), (5, 5)]
    assert slots.take(1) is None and slots.free == 0


@given(st.lists(st.tuples(st.integers(0, 2), st.integers(1, 9), st.integers(0, 30)), max_size=60))
def test_free_runs_are_exactly_the_slots_without_a_reference(moves):
    slots, held = Slots(40), []
    for kind, count, pick in moves:
        if kind == 0:
            free = slots.free
            taken = slots.take(count)
            assert (taken is None) == (count > free)
            if taken is not None:
                held.append(taken)
        elif held and kind == 1:
            slots.share(held[pick % len(held)])
            held.append(held[pick % len(held)])
        elif held:
            slots.give(held.pop(pick % len(held)))
        slots.check()
    expected = np.zeros(40, int)
    for taken in held:
        expected[taken] += 1
    assert slots.counts.tolist() == expected.tolist()


def test_runs_keep_the_order():
    assert runs([]) == [] and runs([7]) == [(7, 1)]
    assert runs([3, 4, 5, 1, 2, 9, 8]) == [(3, 3), (1, 2), (9, 1), (8, 1)]
