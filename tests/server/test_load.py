"""Many streams, many calls: what an event costs beside bare stacks, that nobody starves, that nothing is left over."""

from __future__ import annotations

from collections import Counter

import pytest

from tests.support.load import compare
from tests.support.soak import soak


@pytest.mark.parametrize(("streams", "rate"), [(1, 370.0), (64, 100.0), (256, 30.0)])
def test_an_event_costs_little_more_than_on_a_bare_stack_and_no_stream_starves(streams, rate):
    # 0.9 to 1.3 of uvicorn with Starlette on a quiet machine; other work on the same two cores spoils caches
    found = compare(streams, rate, seconds=1.0, rounds=3, stacks=("starlette", "dsuf"))
    assert min(ours / bare for ours, bare in zip(found["dsuf"], found["starlette"], strict=True)) < 2.0


def test_after_many_calls_of_all_kinds_nothing_is_left():
    outcomes, looks, log = soak(requests=600, at_once=32)
    assert {outcome.partition(" ")[2] for outcome in outcomes} == {"ok"}, outcomes
    assert outcomes.total() == 600
    assert not any(looks[-1].gauges.values())
    assert looks[-1].resident_mb < looks[0].resident_mb * 1.05 + 2
    assert looks[-1].files <= looks[0].files + 2
    ends = [line for line in log if line["event"] == "request_end"]
    assert len(ends) == 600 and {line["event"] for line in log} == {"request_end"}
    statuses = Counter(line["http_status"] for line in ends)
    assert set(statuses) <= {200, 400, 499} and statuses[400] == 60
