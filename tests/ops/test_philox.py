"""Philox against the published Random123 known answers."""

from __future__ import annotations

import numpy as np
import pytest

from dsuf.ops.philox import Purpose, philox4x32, uniform

# Random123 kat_vectors, philox4x32 with 10 rounds: counter, key, result.
KNOWN = [
    ((0,) * 4, (0,) * 2, (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
    ((0xFFFFFFFF,) * 4, (0xFFFFFFFF,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
    (
        (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
        (0xA4093822, 0x299F31D0),
        (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
    ),
]


@pytest.mark.parametrize(("counter", "key", "result"), KNOWN)
def test_known_answers(counter, key, result):
    assert philox4x32(counter, key) == result


def test_a_number_is_a_word_of_the_generator():
    seed, position = 0x299F31D0_A4093822, 2**40 + 7
    words = philox4x32((7, 2**8, int(Purpose.RESIDUAL), 0), (0xA4093822, 0x299F31D0))
    np.testing.assert_array_equal(uniform(seed, position, Purpose.RESIDUAL, 4), np.array(words) / 2**32)


def test_numbers_differ_by_seed_position_and_purpose_and_not_by_count():
    base = uniform(1, 2, Purpose.DRAFT, 9)
    assert base.shape == (9,) and ((base >= 0) & (base < 1)).all()
    np.testing.assert_array_equal(uniform(1, 2, Purpose.DRAFT), base[:1])
    others = [uniform(2, 2, Purpose.DRAFT), uniform(1, 3, Purpose.DRAFT), uniform(1, 2, Purpose.BONUS)]
    assert len({float(x[0]) for x in [base, *others]}) == 4


def test_numbers_are_uniform():
    drawn = np.concatenate([uniform(5, p, Purpose.ACCEPT, 4) for p in range(5000)])
    counts = np.histogram(drawn, 20, (0, 1))[0]
    assert ((counts - 1000) ** 2 / 1000).sum() < 43.8  # chi-square, 19 degrees, p = 0.001
