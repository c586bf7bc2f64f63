import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, multiple, rule

from dsuf.kv.arena import Arena
from dsuf.kv.entries import Store
from dsuf.kv.entry import NoRoom, State, Wanted
from dsuf.kv.names import Names

SLOT, SNAPSHOT = 256, 300  # a snapshot takes two slots
ALICE, BOB = (Names.of(b"k" * 32, b"ns", tenant) for tenant in ("alice", "bob"))


def conversation(seed, tokens):
    return np.random.default_rng(seed).integers(0, 1000, tokens, dtype=np.uint32)


def fill(store, entry, seed=0):
    """Write what the writer of an entry writes, and its digests."""
    for slot in entry.new_slots.tolist():
        store.arena.bytes_of(slot)[:] = np.random.default_rng([seed, slot]).bytes(SLOT)
        store.arena.digests[slot] = np.frombuffer(store.arena.digest(slot), np.uint8)


def save(store, ids, tokens=None, now=0.0, names=ALICE, **kinds):
    wanted = Wanted(names, ids, len(ids) if tokens is None else tokens, "engine", **kinds)
    entry = store.reserve(wanted, now)
    fill(store, entry)
    return store.ready(entry, now)


@pytest.fixture
def store():
    arena = Arena(100 * SLOT, SLOT, 128)
    yield Store(arena, SNAPSHOT)
    arena.close()


def test_an_entry_is_found_by_its_name_only_when_it_is_ready(store):
    ids = conversation(1, 300)
    entry = store.reserve(Wanted(ALICE, ids, 298, "engine"), 0.0)
    assert entry.name == ALICE.of_ids(ids[:298]) and len(entry.pages) == 3 and len(entry.snapshot) == 2
    assert store.find(entry.name) is None
    fill(store, entry)
    assert store.ready(entry, 0.0) is entry
    assert store.find(entry.name) is entry
    assert store.ids(entry).tolist() == ids[:298].tolist()
    assert store.ids(entry, 300).tolist() == ids.tolist(), "up to three ids more are known"
    store.check()


def test_full_pages_are_shared_and_the_last_partial_one_is_not(store):
    ids = conversation(1, 600)
    short, long = save(store, ids[:300]), save(store, ids[:500])
    assert long.pages[:2].tolist() == short.pages[:2].tolist()
    assert not set(long.pages[2:].tolist()) & set(short.pages.tolist())
    assert long.new_pages.tolist() == [2, 3]
    fork = ids.copy()
    fork[200] += 1
    assert save(store, fork[:300]).pages[0] == short.pages[0]
    assert save(store, ids[:300], names=BOB).new_pages.tolist() == [0, 1, 2], "never between tenants"
    store.check()


def test_a_base_gives_the_ids_before(store):
    ids = conversation(3, 700)
    base = save(store, ids[:300])
    whole = Names.of(b"k" * 32, b"ns", "alice").of_ids(ids[:600])
    entry = save(store, ids[300:603], tokens=600, base=base)
    assert entry.name == whole
    assert store.ids(entry, 603).tolist() == ids[:603].tolist()
    assert entry.new_pages.tolist() == [2, 3, 4]


def test_a_half_written_entry_is_freed_with_its_writer_and_a_ready_one_lives_on(store):
    ids = conversation(1, 400)
    ready = save(store, ids)
    store.reserve(Wanted(ALICE, conversation(2, 400), 400, "engine"), 0.0)
    other = store.reserve(Wanted(ALICE, conversation(3, 400), 400, "pull"), 0.0)
    assert store.drop_writer("engine") == 1
    assert store.find(ready.name) is ready and other.state is State.WRITING
    store.check()


def test_the_first_of_two_equal_entries_stays(store):
    ids = conversation(1, 400)
    late = store.reserve(Wanted(ALICE, ids, 400, "engine"), 0.0)
    early = save(store, ids)
    fill(store, late)
    assert store.ready(late, 1.0) is early and late.state is State.FREED
    store.check()


def test_memory_short_lets_go_of_copies_then_inner_points_then_the_longest_unused(store):
    a, b = save(store, conversation(1, 2560), now=1.0), save(store, conversation(2, 2560), now=2.0)
    inner = save(store, conversation(3, 1280), now=5.0, periodic=True)
    copy = save(store, conversation(4, 1280), now=9.0, fetched=True)
    gone = []
    store.on_freed = gone.append
    save(store, conversation(5, 2560), now=10.0)
    assert gone == []
    for number, expected in ((6, [copy]), (7, [copy, inner]), (8, [copy, inner, a])):
        save(store, conversation(number, 1280), now=10.0)
        assert gone == expected
    assert b.state is State.READY
    store.check()


def test_a_leased_entry_is_never_evicted_and_saving_is_refused_instead(store):
    entry = save(store, conversation(1, 8000))
    lease = store.lease(entry, "reader", 5.0, now=1.0)
    with pytest.raises(NoRoom):
        save(store, conversation(2, 8000))
    assert store.lapse(lease.id, 5.9) is None and store.lapse(lease.id, 6.0) is lease
    with pytest.raises(NoRoom):  # lapsed, but the reader has not been cut off yet
        save(store, conversation(2, 8000))
    store.unpin(lease.id, entry)
    save(store, conversation(2, 8000))
    assert entry.state is State.FREED
    store.check()


def test_a_pull_may_use_the_reserve(store):
    first = save(store, conversation(1, 128 * 91))  # 93 slots; 5 of the other 7 are the reserve
    store.lease(first, "reader", 5.0, now=0.0)
    with pytest.raises(NoRoom):
        save(store, conversation(2, 128))
    assert save(store, conversation(2, 128), fetched=True).state is State.READY


def test_a_lease_that_lapsed_is_not_renewed_and_does_not_count_at_its_end(store):
    entry = save(store, conversation(1, 256))
    lease = store.lease(entry, "reader", 2.0, now=0.0)
    assert store.renew(lease.id, 2.0, now=1.0)
    assert not store.renew(lease.id, 2.0, now=3.0)
    assert store.end(lease.id, now=3.0) is None
    store.unpin(lease.id, entry)
    assert not entry.leases


def test_a_segment_leads_to_its_entry_as_far_as_the_ids_are_known(store):
    ids = conversation(1, 303)
    entry = save(store, ids[:302], tokens=300)
    key = ALICE.segment(b"d" * 32)
    assert not store.add_key(entry, key, 303) and not store.add_key(entry, key, 299)
    assert not store.extend_ids(entry, 304, np.append(ids[:303], 1))
    assert not store.extend_ids(entry, 303, np.array([ids[301] + 1, ids[302]], np.uint32))
    assert store.extend_ids(entry, 303, ids[301:303])
    assert store.add_key(entry, key, 303) and store.find(key) is entry
    assert store.ids(entry, 303).tolist() == ids.tolist()
    store.drop(entry)
    assert store.find(key) is None
    store.check()


def test_a_flipped_bit_of_a_saved_page_is_found(store):
    entry = save(store, conversation(1, 300))
    assert store.damaged(entry) is None
    slot = int(entry.pages[1])
    store.arena.bytes_of(slot)[77] ^= 4
    assert store.damaged(entry) == slot


class Life(RuleBasedStateMachine):
    """Any order of saving, reading, dying and evicting: I1 (bytes are those saved), I2, I4, I7 at the end."""

    writing, ready, leased = Bundle("writing"), Bundle("ready"), Bundle("leased")

    def __init__(self):
        super().__init__()
        self.store, self.now, self.saved, self.readers = Store(Arena(40 * SLOT, SLOT, 128), SNAPSHOT), 0.0, {}, {}

    @rule(target=writing, seed=st.integers(0, 3), tokens=st.integers(1, 900), pull=st.booleans(), inner=st.booleans())
    def reserve(self, seed, tokens, pull, inner):
        ids = conversation(seed, 903)
        writer = "pull" if pull else "engine"
        wanted = Wanted(ALICE, ids[: tokens + 3], tokens, writer, fetched=pull, periodic=inner)
        try:
            return (self.store.reserve(wanted, self.now), seed)
        except NoRoom:
            return multiple()

    @rule(target=ready, one=consumes(writing))
    def publish(self, one):
        entry, seed = one
        if entry.state is not State.WRITING:
            return multiple()
        for index in entry.new_pages.tolist():  # a page's bytes depend on the ids up to its end alone
            end = min(128 * index + 128, entry.tokens)
            content = np.random.default_rng(conversation(seed, 903)[:end]).bytes(SLOT)
            self.store.arena.bytes_of(int(entry.pages[index]))[:] = content
        for slot in entry.snapshot.tolist():
            self.store.arena.bytes_of(slot)[:] = bytes([entry.tokens % 251]) * SLOT
        for slot in entry.new_slots.tolist():
            self.store.arena.digests[slot] = np.frombuffer(self.store.arena.digest(slot), np.uint8)
        return (self.store.ready(entry, self.now), seed)

    @rule(one=consumes(writing))
    def give_up(self, one):
        if one[0].state is State.WRITING:
            self.store.drop(one[0])

    @rule(writer=st.sampled_from(["engine", "pull"]))
    def writer_dies(self, writer):
        self.store.drop_writer(writer)

    @rule(target=leased, one=ready, ttl=st.sampled_from([0.5, 2.0, 1e9]))
    def lease(self, one, ttl):
        if one[0].state is not State.READY:
            return multiple()
        return (self.store.lease(one[0], "reader", ttl, self.now), one[1])

    @rule(one=leased)
    def read(self, one):
        lease, seed = one
        entry = lease.entry
        if lease.id not in entry.leases:
            return
        assert entry.state is State.READY
        for index, slot in enumerate(entry.pages.tolist()):
            end = min(128 * index + 128, entry.tokens)
            expected = np.random.default_rng(conversation(seed, 903)[:end]).bytes(SLOT)
            assert bytes(self.store.arena.bytes_of(slot)) == expected
        assert self.store.damaged(entry) is None

    @rule(one=consumes(leased))
    def release(self, one):
        lease, _ = one
        held = self.store.end(lease.id, self.now)
        assert (held is not None) == (self.now < lease.until_s) or lease.id not in lease.entry.leases
        self.store.unpin(lease.id, lease.entry)

    @rule(step=st.sampled_from([0.1, 1.0]))
    def time_passes(self, step):
        self.now += step
        for lease in list(self.store.leases.values()):
            if self.store.lapse(lease.id, self.now):
                self.store.unpin(lease.id, lease.entry)

    @invariant()
    def everything_is_accounted_for(self):
        self.store.check()

    def teardown(self):
        for lease_id, lease in list(self.store.leases.items()):
            self.store.end(lease_id, self.now)
            self.store.unpin(lease_id, lease.entry)
        for entry in list(self.store.entries.values()):
            self.store.drop(entry)
        assert self.store.slots.free == 40 and not self.store.leases
        self.store.check()
        self.store.arena.close()


TestLife = Life.TestCase
TestLife.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
