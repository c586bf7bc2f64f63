import asyncio
import contextlib
import socket
import struct

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dsuf.kv.channel import Channel, ChannelBroken, Identity, Refused
from dsuf.kv.frames import Held, Release, ToOwner, ToReader

KEY = b"k" * 32
OWNER, READER = (Identity(name, f"boot-{name}", "host", b"n" * 32) for name in ("owner", "reader"))


@pytest.fixture(autouse=True)
def short_handshakes(monkeypatch):
    monkeypatch.setattr("dsuf.kv.channel.HANDSHAKE_S", 0.2)


async def pair(reader_key=KEY, owner_key=KEY, reader=READER, owner=OWNER, offers=None, between=None):
    """Channels after a handshake over a socket pair; `between` relays frames and may change them."""
    left, right = socket.socketpair()
    if between is not None:
        left, middle_left = socket.socketpair()
        middle_right, right = socket.socketpair()
        relay = asyncio.create_task(between(middle_left, middle_right))
    reading, owning = Channel(left), Channel(right)
    results = await asyncio.gather(
        reading.meet(reader_key, reader, offers or {}, "control"),
        owning.greet(owner_key, owner, {"tcp": b"owner's"}),
        return_exceptions=True,
    )
    if between is not None:
        relay.cancel()
    return reading, owning, results


async def frames(sock):
    """Frames from a non-blocking socket, prefix included."""
    loop = asyncio.get_running_loop()
    sock.setblocking(False)
    buffer = b""
    while True:
        while len(buffer) < 4 or len(buffer) < 4 + struct.unpack("<I", buffer[:4])[0]:
            data = await loop.sock_recv(sock, 1 << 16)
            if not data:
                return
            buffer += data
        end = 4 + struct.unpack("<I", buffer[:4])[0]
        yield buffer[:end]
        buffer = buffer[end:]


def relay(change):
    """A man in the middle: `change(direction, number, frame)` gives the frame that is handed on."""

    async def between(left, right):
        async def one(source, target, direction):
            number = 0
            async for frame in frames(source):
                target.setblocking(False)
                await asyncio.get_running_loop().sock_sendall(target, change(direction, number, frame))
                number += 1
            target.shutdown(socket.SHUT_WR)

        await asyncio.gather(one(left, right, "up"), one(right, left, "down"))

    return between


def test_both_sides_know_each_other_after_the_handshake():
    async def story():
        reading, owning, (owner, reader) = await pair(offers={"rdma": b"ports"})
        assert (owner.sid, owner.boot, owner.offers) == ("owner", "boot-owner", {"tcp": b"owner's"})
        assert (reader.sid, reader.purpose, reader.offers) == ("reader", "control", {"rdma": b"ports"})
        await reading.send(Release(1, 77))
        assert await owning.receive(ToOwner) == Release(1, 77)
        await owning.send(Held(1, True))
        assert await reading.receive(ToReader) == Held(1, True)
        reading.close()
        with pytest.raises(ChannelBroken):
            await owning.receive(ToOwner)

    asyncio.run(story())


def test_another_key_is_refused_by_both_sides_and_nothing_is_told():
    async def story():
        _, _, (at_reader, at_owner) = await pair(reader_key=b"x" * 32)
        assert isinstance(at_owner, Refused) and isinstance(at_reader, Refused)

    asyncio.run(story())


def test_another_namespace_is_refused_by_name():
    async def story():
        other = Identity("reader", "boot", "host", b"m" * 32)
        _, _, (at_reader, at_owner) = await pair(reader=other)
        assert isinstance(at_owner, Refused)
        assert isinstance(at_reader, Refused) and "another model" in str(at_reader)

    asyncio.run(story())


def flip(frame, at):
    changed = bytearray(frame)
    changed[4 + at % (len(frame) - 4)] ^= 1
    return bytes(changed)


@pytest.mark.parametrize(("direction", "number"), [("down", 0), ("up", 0), ("down", 1)])
@pytest.mark.parametrize("at", [0, 9, 33, 60, -1, -40])
def test_every_byte_of_the_handshake_is_covered(direction, number, at):
    def change(way, count, frame):
        return flip(frame, at) if (way, count) == (direction, number) else frame

    async def story():
        _, _, results = await pair(between=relay(change))
        assert any(isinstance(result, Refused | ChannelBroken) for result in results)
        if direction == "down":
            assert isinstance(results[0], Refused | ChannelBroken), "the reader trusts nothing that was changed"

    asyncio.run(story())


def test_one_role_cannot_answer_with_the_mac_of_the_other():
    # a reflection: whoever has no key connects twice and hands the owner's own words back to it
    async def story():
        left, right = socket.socketpair()
        owning = Channel(right)
        task = asyncio.create_task(owning.greet(KEY, OWNER, {}))
        stream = frames(left)
        challenge = await anext(stream)
        left2, right2 = socket.socketpair()
        second = Channel(left2)  # our side pretends to be an owner towards a reader of the fleet
        reader = asyncio.create_task(second.meet(KEY, READER, {}, "control"))
        right2.setblocking(False)
        loop = asyncio.get_running_loop()
        await loop.sock_sendall(right2, challenge)
        hello = await anext(frames(right2))
        await loop.sock_sendall(right2, hello)  # back to the reader, as if it were WELCOME
        with pytest.raises((Refused, ChannelBroken)):
            await reader
        task.cancel()

    asyncio.run(story())


@pytest.mark.parametrize("attack", ["repeat", "swap", "flip", "reflect"])
def test_frames_cannot_be_repeated_swapped_changed_or_reflected(attack):
    held = []

    def change(way, number, frame):
        if way == "down" or number == 0:
            return frame
        if attack == "flip":
            return flip(frame, 3)
        held.append(frame)
        if attack == "repeat":
            return frame + frame
        return frame if attack == "reflect" else (b"" if len(held) == 1 else held[1] + held[0])

    async def story():
        left, middle_left = socket.socketpair()
        middle_right, right = socket.socketpair()
        task = asyncio.create_task(relay(change)(middle_left, middle_right))
        reading, owning = Channel(left), Channel(right)
        await asyncio.gather(reading.meet(KEY, READER, {}, "control"), owning.greet(KEY, OWNER, {}))
        await reading.send(Release(1, 1))
        await reading.send(Release(2, 2))
        if attack == "reflect":
            assert await owning.receive(ToOwner) == Release(1, 1)
            await asyncio.get_running_loop().sock_sendall(middle_left, held[0])
            with pytest.raises(ChannelBroken):
                await reading.receive(ToOwner)
        else:
            with pytest.raises(ChannelBroken):
                for _ in range(3):
                    await owning.receive(ToOwner)
        task.cancel()

    asyncio.run(story())


def test_a_stranger_that_says_nothing_is_left_alone_soon():
    async def story():
        _, right = socket.socketpair()
        with pytest.raises(TimeoutError):
            await Channel(right).greet(KEY, OWNER, {})

    asyncio.run(story())


def test_a_message_too_long_is_not_sent():
    async def story():
        reading, _, _ = await pair()
        with pytest.raises(ChannelBroken, match="too long"):
            await reading.send(b"x" * (1 << 20))

    asyncio.run(story())


@settings(max_examples=150, deadline=None)
@given(st.lists(st.binary(max_size=200), max_size=4), st.booleans(), st.integers(0, 2**32 - 1))
def test_no_bytes_of_a_stranger_get_past_the_owner(parts, framed, announced):
    async def story():
        left, right = socket.socketpair()
        owning = Channel(right)
        task = asyncio.create_task(owning.greet(KEY, OWNER, {}))
        left.setblocking(False)
        loop = asyncio.get_running_loop()
        with contextlib.suppress(OSError):
            for part in parts:
                await loop.sock_sendall(left, (struct.pack("<I", len(part)) if framed else b"") + part)
            await loop.sock_sendall(left, struct.pack("<I", announced))
            left.shutdown(socket.SHUT_WR)
        with pytest.raises((Refused, ChannelBroken)):
            await task
        owning.close()
        left.close()

    asyncio.run(story())


@settings(max_examples=150, deadline=None)
@given(st.binary(max_size=300))
def test_a_peer_that_knows_the_key_but_sends_nonsense_is_cut_off(payload):
    class Raw:
        @staticmethod
        def encode(message):
            return message

    async def story():
        reading, owning, _ = await pair()
        reading._encoder = Raw
        await reading.send(payload)
        with contextlib.suppress(ChannelBroken):
            assert isinstance(await owning.receive(ToOwner), ToOwner)
        reading.close()
        owning.close()
        await asyncio.sleep(0)
        await asyncio.sleep(0)

    asyncio.run(story())
