"""Pages in memory that others map: by place and by number."""

from __future__ import annotations

import numpy as np
import pytest

from dsuf.engine.shared import NumberedPages, SharedPages, address_of


@pytest.fixture
def memory():
    return memoryview(bytearray(range(40)))


def test_pages_by_place_are_the_memory_itself(memory):
    pages = SharedPages(memory, 8, np.array([4, 0], np.uint32))
    assert len(pages) == 2 and [bytes(page) for page in pages] == [bytes(range(32, 40)), bytes(range(8))]
    pages[0][:] = b"new here"
    assert bytes(memory[32:]) == b"new here"
    assert (pages.addresses - address_of(memory)).tolist() == [32, 0]


def test_pages_by_number_are_a_mapping(memory):
    pages = NumberedPages(np.array([3, 7]), SharedPages(memory, 8, np.array([1, 2], np.uint32)))
    assert dict(pages) == {3: bytes(range(8, 16)), 7: bytes(range(16, 24))}
    assert list(pages) == [3, 7] and 5 not in pages and len(pages) == 2
    with pytest.raises(KeyError):
        pages[5]
