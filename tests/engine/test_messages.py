"""Requests as the engine takes them."""

from __future__ import annotations

import msgspec
import pytest

from dsuf.engine.messages import LEAST_TEMPERATURE, Sampling


@pytest.mark.parametrize("temperature", [5e-324, 1e-39, 1e-7])
def test_a_temperature_that_is_nothing_in_single_precision_is_greedy(temperature):
    assert Sampling(temperature).temperature == 0
    assert msgspec.structs.replace(Sampling(), temperature=temperature).temperature == 0
    assert msgspec.msgpack.decode(msgspec.msgpack.encode({"temperature": temperature}), type=Sampling) == Sampling(0.0)


def test_other_temperatures_stay():
    assert [Sampling(t).temperature for t in (0, LEAST_TEMPERATURE, 2.0)] == [0, LEAST_TEMPERATURE, 2.0]
