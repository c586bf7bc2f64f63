"""I1 to I10 of the protocol, for any order of saves, turns, cancels, crashes and faults, in virtual time."""

import asyncio
import contextlib
from collections import Counter

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule, run_state_machine_as_test

from dsuf.kv import messages as m
from dsuf.kv.desk import Desk
from dsuf.kv.entry import State
from dsuf.kv.fetch import Fetcher
from tests.kv.fleet import Node, conversation, digest
from tests.kv.simulated import SimulatedAgent, Table, VirtualLoop, Wires

NAMES = "abc"
CONVERSATIONS = [conversation(seed, 1002) for seed in range(2)]
LENGTHS = (130, 256, 500, 768, 1000)
SEEN = Counter()
LONGEST_S = 10.0  # a turn: connect, lease, pull with its deadline, twice for two holders

nodes_ = st.sampled_from(NAMES)
talks = st.integers(0, len(CONVERSATIONS) - 1)


def text(talk, tokens):
    return digest(f"{talk}:{tokens}")


class Fleet(RuleBasedStateMachine):
    def __init__(self):
        super().__init__()
        self.loop = VirtualLoop()
        self.table, self.wires = Table(), Wires()
        self.wires.delay_s = 0.001
        self.boots = dict.fromkeys(NAMES, 0)
        self.nodes, self.turns, self.ended, self.number = {}, {}, 0, 0
        for name in NAMES:
            self.do(self.start(name))

    def do(self, coroutine):
        return self.loop.run_until_complete(coroutine)

    async def start(self, name):
        self.boots[name] += 1
        self.nodes[name] = Node(SimulatedAgent(name, self.boots[name], self.table, self.wires))

    # ---- what users do

    @rule(name=nodes_, talk=talks, tokens=st.sampled_from(LENGTHS), periodic=st.booleans())
    def save(self, name, talk, tokens, periodic):
        ids = CONVERSATIONS[talk][: tokens + 2]
        segments = [(tokens + 2, text(talk, tokens))]
        self.do(self.nodes[name].save(ids, tokens, segments=segments, periodic=periodic, request=f"save {name}"))

    @rule(owner=nodes_, name=nodes_, talk=talks, tokens=st.sampled_from(LENGTHS), ticks=st.integers(0, 60))
    def save_here_and_go_on_there(self, owner, name, talk, tokens, ticks):
        self.save(owner, talk, tokens, False)
        self.begin_turn(name, talk, tokens)
        self.a_little_happens(ticks)

    @rule(
        owner=nodes_,
        name=nodes_,
        talk=talks,
        tokens=st.sampled_from(LENGTHS),
        seconds=st.integers(1, 60).map(lambda n: n / 2000),
        what=st.sampled_from(["cut", "stall", "restart", "evict", "cancel", "forget"]),
    )
    def something_happens_in_the_middle(self, owner, name, talk, tokens, seconds, what):
        self.save_here_and_go_on_there(owner, name, talk, tokens, 0)
        self.time_passes(seconds)
        if what in ("cancel", "forget"):
            self.abandon_turn(-1, what)
        else:
            {
                "cut": self.connections_break,
                "stall": lambda owner: self.wire_stalls(owner, True),
                "restart": self.server_restarts,
                "evict": lambda owner: self.memory_is_used_for_something_else(owner, 1 - talk),
            }[what](owner)

    @rule(ticks=st.integers(1, 60))
    def a_little_happens(self, ticks):
        async def tick():
            for _ in range(ticks):
                await asyncio.sleep(0)

        self.do(tick())
        self.reap_turns()

    @rule(name=nodes_, talk=talks, tokens=st.sampled_from(LENGTHS))
    def begin_turn(self, name, talk, tokens):
        self.number += 1
        request = f"turn {self.number}"

        async def turn():
            begin = self.loop.time()
            texts = [text(talk, length) for length in sorted(LENGTHS, reverse=True) if length <= tokens]
            got = await self.nodes[name].held_turn(texts, request=request, owner=f"web {self.number}")
            assert self.loop.time() - begin < LONGEST_S, "I5: every request ends in time"
            assert got.source != "none" or got.why
            SEEN[got.source + got.why] += 1
            self.nodes[name].forget(request)
            self.ended += 1

        self.turns[request] = (name, self.loop.create_task(turn()))

    @rule(pick=st.integers(0, 9), how=st.sampled_from(["cancel", "forget"]))
    def abandon_turn(self, pick, how):
        if self.turns:
            request = list(self.turns)[pick % len(self.turns)]
            name, task = self.turns[request]
            if how == "cancel":
                task.cancel()
            self.nodes[name].forget(request)

    @rule(seconds=st.sampled_from([0.0, 0.0005, 0.01, 0.3, 3.0]))
    def time_passes(self, seconds):
        self.do(asyncio.sleep(seconds))
        self.reap_turns()

    def memory_is_used_for_something_else(self, name, talk):
        self.memory_is_wanted(name, 60)
        for tokens in LENGTHS:
            self.save(name, talk, tokens, False)

    @rule(name=nodes_, slots=st.integers(1, 60))
    def memory_is_wanted(self, name, slots):
        self.nodes[name].agent.store.make_room(slots, self.loop.time(), pull=False)

    @rule(name=nodes_, talk=talks)
    def engine_dies_while_it_writes(self, name, talk):
        node = self.nodes[name]
        node.desk.reserve(m.Reserve(1, "half", "", 900, CONVERSATIONS[talk][:900].tobytes()), "dead")
        node.agent.store.drop_writer("dead")
        node.forget("half")

    # ---- what goes wrong

    @rule(name=nodes_)
    def server_restarts(self, name):
        node = self.nodes[name]
        self.wires.cut(node.agent.address)
        for turn_name, task in self.turns.values():
            if turn_name == name:
                task.cancel()
        self.do(node.agent.close())
        self.do(self.start(name))
        self.reap_turns()

    @rule(name=nodes_)
    def connections_break(self, name):
        self.wires.cut(self.nodes[name].agent.address)

    @rule(name=nodes_, stall=st.booleans())
    def wire_stalls(self, name, stall):
        address = self.nodes[name].agent.address
        (self.wires.stalled.add if stall else self.wires.stalled.discard)(address)

    @rule(delay_s=st.sampled_from([0.0, 0.001, 0.04]))
    def wires_are_slow(self, delay_s):
        self.wires.delay_s = delay_s

    @rule(down=st.booleans(), stale=st.booleans())
    def redis_is_troubled(self, down, stale):
        self.table.down, self.table.stale = down, stale

    @rule()
    def redis_restarts_empty(self):
        self.table.clear()
        self.heartbeat()

    # ---- what must hold

    @invariant()
    def memory_is_accounted_for(self):
        for node in getattr(self, "nodes", {}).values():
            node.agent.store.check()

    @invariant()
    def what_is_announced_is_ready(self):
        for node in getattr(self, "nodes", {}).values():
            store = node.agent.store
            for entry in node.agent.directory.announced:
                assert store.entries[entry].state is State.READY, "I8"
            assert {e.id for e in store.ready_entries()} <= set(node.agent.directory.announced), "I8"

    def reap_turns(self):
        for request, (_, task) in list(self.turns.items()):
            if task.done():
                del self.turns[request]
                if not task.cancelled():
                    task.result()

    def heartbeat(self):
        if not self.table.down:
            for node in self.nodes.values():
                node.agent.directory.announce_all()

    def teardown(self):
        try:
            self.do(self.quiet())
        finally:
            for node in self.nodes.values():
                self.do(node.agent.close())
            self.do(self.wires.close())
            self.loop.close()

    async def quiet(self):
        """All faults off: everything ends (I5), nothing is held (I7, I10), and what is saved is found (I6)."""
        self.wires.stalled.clear()
        self.wires.delay_s = 0.0
        self.table.down = self.table.stale = False
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.gather(*(task for _, task in self.turns.values()), return_exceptions=True)
        self.reap_turns()
        assert not self.turns
        for node in self.nodes.values():
            for request in list(node.desk.visits):
                node.forget(request)
        await asyncio.sleep(70.0)  # circuits close, leases lapse
        self.heartbeat()
        for node in self.nodes.values():
            await node.settled()
        for talk in range(len(CONVERSATIONS)):
            saved = {
                length
                for node in self.nodes.values()
                for length in LENGTHS
                if node.agent.store.find(node.desk._names("").segment(text(talk, length)))
            }
            texts = [text(talk, length) for length in sorted(LENGTHS, reverse=True)]
            for node in self.nodes.values():
                got = await node.turn(texts)
                assert got.tokens == max(saved, default=0), "I6: the longest that is saved anywhere is found"


TestFleet = Fleet.TestCase
TestFleet.settings = settings(
    max_examples=40, stateful_step_count=30, deadline=None, suppress_health_check=list(HealthCheck)
)


def no_undo(monkeypatch):
    async def leave_it(self, granted, entry):
        await granted.link.abort()

    monkeypatch.setattr(Fetcher, "_undo", leave_it)


def no_forget(monkeypatch):
    monkeypatch.setattr(Desk, "_let_go", lambda self, visit: None)


def no_withdrawal(monkeypatch):
    monkeypatch.setattr(Desk, "_freed", lambda self, entry: None)


@pytest.mark.parametrize("remove", [no_undo, no_forget, no_withdrawal])
def test_a_safeguard_removed_breaks_an_invariant(remove, monkeypatch):
    remove(monkeypatch)
    quick = settings(
        parent=TestFleet.settings, max_examples=200, phases=[Phase.generate], derandomize=True, database=None
    )
    with pytest.raises((AssertionError, BaseExceptionGroup, KeyError)):
        run_state_machine_as_test(Fleet, settings=quick)
