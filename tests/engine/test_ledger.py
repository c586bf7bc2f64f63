"""The ledger against the worst case: whatever it granted, everybody can get all they were promised, in some order."""

from hypothesis import given, settings
from hypothesis import strategies as st

from dsuf.engine.backend import Limits
from dsuf.engine.ledger import Ledger
from dsuf.engine.messages import Request
from dsuf.engine.sequence import Sequence
from dsuf.layout import PAGE_TOKENS, pages_for

LIMITS = Limits("test", 10, 8 * PAGE_TOKENS - 12, 5, cache_pages=8, page_bytes=10, snapshot_bytes=5, resume_step=2)


def sequence(id, prompt_pages, budget_pages):
    length = prompt_pages * PAGE_TOKENS - 20
    budget = min(budget_pages * PAGE_TOKENS, LIMITS.max_context - length)
    return Sequence(Request(id, [1] * length, budget), budget, False, None, None)


def pages(one):
    return pages_for(one.prompt_len + len(one.emitted) + LIMITS.lookahead)


class Machine:
    """Sequences over a ledger, as the scheduler would move them, but in any order."""

    def __init__(self, park_bytes):
        self.ledger = Ledger(LIMITS, park_bytes)
        self.device, self.parked = {}, {}
        self.granted = {}

    def start(self, one):
        if self.ledger.start(one):
            self.device[one.id], self.granted[one.id] = one, pages(one)
        self.check()

    def grow(self, id):
        """One page further, or to the end."""
        one = self.device[id]
        before = list(one.emitted)
        one.emitted += [1] * min(PAGE_TOKENS, one.budget - len(one.emitted))
        grown = self.ledger.grow(one)
        if grown:
            self.granted[id] = max(self.granted[id], pages(one))
        else:
            one.emitted = before
        self.check()
        return grown

    def park(self, id):
        parked = self.ledger.park(self.device[id])
        if parked:
            self.parked[id] = self.device.pop(id)
        self.check()
        return parked

    def resume(self, id):
        resumed = self.ledger.resume(self.parked[id], 0)
        if resumed:
            self.device[id] = self.parked.pop(id)
            self.granted[id] = max(self.granted[id], pages(self.device[id]))
        self.check()
        return resumed

    def end(self, id):
        one = self.device.pop(id, None) or self.parked.pop(id)
        self.ledger.drop(one)

    def check(self):
        assert self.ledger.pages == sum(self.granted[id] for id in self.device) <= LIMITS.cache_pages
        assert self.ledger.parked_bytes == sum(self.granted[id] * 10 + 5 for id in self.parked)
        assert self.ledger.parked_bytes <= self.ledger.park_bytes

    def run_out(self):
        """Everybody wants all of their budget: grow, park or bring back whoever can be, until all have ended."""
        while self.device or self.parked:
            ended = [id for id, one in self.device.items() if len(one.emitted) == one.budget]
            for id in ended:
                self.end(id)
            moved = bool(ended)
            for id in list(self.device):
                moved |= self.grow(id)
            moved = moved or any(self.park(id) for id in list(self.device)[::-1])
            moved = moved or any(self.resume(id) for id in list(self.parked))
            assert moved, "nobody can go on"


actions = st.lists(
    st.tuples(st.sampled_from(["start", "start", "grow", "grow", "park", "resume", "end"]), st.integers(0, 99)),
    max_size=40,
)


@given(actions, st.sampled_from([0, 25, 60, 10_000]), st.lists(st.tuples(st.integers(1, 4), st.integers(1, 7))))
@settings(max_examples=300, deadline=None)
def test_whatever_was_granted_all_can_end(actions, park_bytes, sizes):
    machine, sizes = Machine(park_bytes), iter(sizes)
    for number, (action, choice) in enumerate(actions):
        if action == "start":
            if (size := next(sizes, None)) is not None:
                machine.start(sequence(f"s{number}", *size))
            continue
        among = machine.parked if action == "resume" else machine.device
        if among:
            getattr(machine, action)(sorted(among)[choice % len(among)])
    machine.run_out()
    assert (machine.ledger.pages, machine.ledger.parked_bytes) == (0, 0)


def test_more_is_promised_than_there_is_as_long_as_there_is_a_way_out():
    machine = Machine(park_bytes=0)
    for number in range(3):
        machine.start(sequence(f"s{number}", 1, 5))
    assert len(machine.device) == 3, "18 pages at most, 8 there are"
    assert [machine.grow("s0"), machine.grow("s1"), machine.grow("s2")] == [True, False, False]


def test_without_a_bound_everything_is_granted_and_nothing_parked():
    ledger = Ledger(Limits("test", 10, 4096, 5, page_bytes=10, snapshot_bytes=5), 1000)
    one = sequence("a", 4, 7)
    assert ledger.start(one) and ledger.grow(one) and not ledger.park(one)
