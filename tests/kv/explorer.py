"""Every interleaving of the pull protocol on a small instance: one owner, one slot of memory, two readers.

The owner may evict the slot and refill it with another conversation at any step, and may restart with other content
under a new boot id. The directory may answer with any record it ever had. A transfer is two steps, so it can be torn,
and a reader may stall for ever after its lease was granted. Bad states:

    WRONG   a reader restores bytes that are not those of the prefix it asked for
    TORN    a reader restores a mix of two contents
    LEAK    only dead readers hold leases, and nothing can be evicted any more

`explore(safeguards)` gives the number of states, what is bad, and the shortest way there.
"""

from collections import deque
from typing import NamedTuple

READERS = 2
SAFEGUARDS = frozenset({"lease", "expire", "fence", "boot", "entry", "held", "digest"})


class Reader(NamedTuple):
    """idle -> found -> reading (got 0, 1, 2 halves) -> done or fell back."""

    at: str = "idle"
    record: tuple = ()  # (boot, entry) that the directory named
    got: tuple = ()  # halves received
    kept: bool = True  # its lease has been held without a gap
    dead: bool = False


class World(NamedTuple):
    boot: int = 1
    entry: int = 1
    slot: tuple = ("A", "A")  # conversation A is what the readers want
    filling: str = ""  # content being written, its first half is in
    leases: tuple = (False,) * READERS
    fenced: tuple = (False,) * READERS
    records: frozenset = frozenset({(1, 1)})
    readers: tuple = (Reader(),) * READERS
    refills: int = 0
    restarts: int = 0


def explore(safeguards):
    """(states, what is bad or None, labels on the way there)."""
    start = World()
    came, todo = {start: None}, deque([start])
    while todo:
        world = todo.popleft()
        following = list(steps(world, safeguards))
        bad = badness(world) or leak(world, following)
        if bad:
            return len(came), bad, way(came, world)
        for label, after in following:
            if after not in came:
                came[after] = (label, world)
                todo.append(after)
    return len(came), None, []


def steps(world, safeguards):
    """All that may happen next, as (label, world)."""
    yield from owner_steps(world, safeguards)
    for i in range(READERS):
        if not world.readers[i].dead:
            yield from reader_steps(world, i, safeguards)


def owner_steps(world, safeguards):
    if not world.filling and world.refills < 2 and not ("lease" in safeguards and any(world.leases)):
        other = "B" if world.slot[0] == "A" else "A"
        slot = (other, world.slot[1])
        yield (
            f"owner evicts and begins to write {other}",
            world._replace(filling=other, slot=slot, entry=world.entry + 1, refills=world.refills + 1),
        )
    if world.filling:
        done = world._replace(slot=(world.filling,) * 2, filling="")
        if world.filling == "A":
            done = done._replace(records=world.records | {(world.boot, world.entry)})
        yield "owner finishes writing", done
    if world.restarts < 1 and not world.filling:
        # connections die with the process; memory comes back with other content under the same entry number
        cut = tuple(reader.at == "reading" or was for reader, was in zip(world.readers, world.fenced, strict=True))
        gone = tuple(reader._replace(kept=False) for reader in world.readers)
        yield (
            "owner restarts with other content",
            world._replace(
                boot=2, entry=1, slot=("B", "B"), leases=(False,) * READERS, fenced=cut, readers=gone, restarts=1
            ),
        )
    for i, reader in enumerate(world.readers):
        if world.leases[i] and "expire" in safeguards:
            after = world._replace(
                leases=put(world.leases, i, False), readers=put(world.readers, i, reader._replace(kept=False))
            )
            if "fence" in safeguards:
                after = after._replace(fenced=put(world.fenced, i, True))
            yield f"lease of reader {i} lapses", after


def reader_steps(world, i, safeguards):
    reader = world.readers[i]

    def become(**changes):
        return world._replace(readers=put(world.readers, i, reader._replace(**changes)))

    if reader.at == "idle":
        for record in sorted(world.records):
            yield f"reader {i} finds record {record}", become(at="found", record=record)
    elif reader.at == "found":
        boot, entry = reader.record
        fits = ("boot" not in safeguards or boot == world.boot) and ("entry" not in safeguards or entry == world.entry)
        if fits and not world.filling:
            yield (
                f"reader {i} gets a lease",
                become(at="reading", kept=True)._replace(leases=put(world.leases, i, True)),
            )
        else:
            yield f"reader {i} is refused and recomputes", become(at="fell back")
    elif reader.at == "reading":
        yield f"reader {i} dies", become(dead=True)
        if len(reader.got) == 2:
            yield judge(world, i, safeguards)
        elif world.fenced[i]:
            yield f"read of reader {i} fails, it recomputes", become(at="fell back")
        else:
            half = world.slot[len(reader.got)]
            yield f"reader {i} reads a half of {half}", become(got=(*reader.got, half))


def judge(world, i, safeguards):
    """Everything is here: is it to be believed?"""
    reader = world.readers[i]
    wrong = (reader.got != ("A", "A") and "digest" in safeguards) or ("held" in safeguards and not reader.kept)
    after = world._replace(leases=put(world.leases, i, False))
    end = "fell back" if wrong else "done"
    label = f"reader {i} {'recomputes' if wrong else f'restores {reader.got}'}"
    return label, after._replace(readers=put(world.readers, i, reader._replace(at=end)))


def badness(world):
    for reader in world.readers:
        if reader.at == "done" and reader.got != ("A", "A"):
            return "TORN" if len(set(reader.got)) > 1 else "WRONG"
    return None


def leak(world, following):
    ended = all(reader.dead or reader.at in ("done", "fell back") for reader in world.readers)
    stuck = not any("lapses" in label for label, _ in following)
    return "LEAK" if any(world.leases) and ended and stuck else None


def way(came, world):
    labels = []
    while came[world]:
        label, world = came[world]
        labels.append(label)
    return labels[::-1]


def put(items, i, value):
    return (*items[:i], value, *items[i + 1 :])
