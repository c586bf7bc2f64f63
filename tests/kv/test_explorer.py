import pytest

from tests.kv.explorer import SAFEGUARDS, explore


def test_with_all_safeguards_no_interleaving_is_bad():
    states, bad, way = explore(SAFEGUARDS)
    assert bad is None, way
    assert states > 3000


@pytest.mark.parametrize(
    ("without", "expected"),
    [
        ({"expire"}, "LEAK"),
        ({"fence", "held", "digest"}, "TORN"),
        ({"lease", "held", "digest"}, "TORN"),
        ({"boot", "digest"}, "WRONG"),
        ({"entry", "digest"}, "WRONG"),
    ],
)
def test_each_safeguard_removed_has_a_counterexample(without, expected):
    _, bad, way = explore(SAFEGUARDS - without)
    assert bad == expected, way
    assert 2 <= len(way) <= 12


@pytest.mark.parametrize("without", [{"digest"}, {"held"}, {"fence"}, {"fence", "held"}, {"fence", "digest"}])
def test_what_is_a_second_net_is_not_needed_alone(without):
    # shared memory has no fence: the digest, or the question at the end, holds there
    assert explore(SAFEGUARDS - without)[1] is None
