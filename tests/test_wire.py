"""Frames over a Unix socket: whole, limited, typed, from threads and from asyncio."""

import asyncio
import re
import socket
import struct
import threading
from itertools import pairwise
from types import SimpleNamespace

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dsuf import wire
from dsuf.errors import DsufError

anything = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.text(max_size=20) | st.binary(max_size=300),
    lambda inner: st.lists(inner, max_size=5) | st.dictionaries(st.text(max_size=5), inner, max_size=5),
    max_leaves=20,
)


class Point(msgspec.Struct):
    x: int


@pytest.fixture
def ends():
    a, b = socket.socketpair()
    yield a, b
    a.close()
    b.close()


@given(st.lists(anything, max_size=5))
@settings(max_examples=50, deadline=None)
def test_what_is_sent_arrives(messages):
    a, b = socket.socketpair()
    near, far = wire.Connection(a, object), wire.Connection(b, object)
    for message in messages:
        near.send(message)
    near.close()
    assert [far.receive() for _ in messages] == messages
    assert far.receive() is None
    far.close()


def test_a_large_frame_passes_in_pieces(ends):
    near, far = wire.Connection(ends[0], list[int]), wire.Connection(ends[1], list[int])
    ids = list(range(1_000_000))
    sender = threading.Thread(target=near.send, args=(ids,))
    sender.start()
    assert far.receive() == ids
    sender.join()


def test_a_frame_over_the_limit_is_refused_by_both_sides(ends):
    near, far = wire.Connection(ends[0], bytes, max_bytes=100), wire.Connection(ends[1], bytes, max_bytes=50)
    with pytest.raises(wire.WireError, match=r"102 bytes to send, at most 100"):
        near.send(b"x" * 100)
    near.send(b"x" * 60)
    with pytest.raises(wire.WireError, match=r"62 bytes announced by the peer, at most 50"):
        far.receive()


def test_an_announced_size_allocates_nothing_before_the_check(ends):
    far = wire.Connection(ends[1], bytes)
    ends[0].sendall(struct.pack("<I", 0xFFFFFFFF))
    with pytest.raises(wire.WireError, match="4294967295 bytes"):
        far.receive()


@pytest.mark.parametrize("payload", [b"", b"\xc1", msgspec.msgpack.encode({"x": "one"}), msgspec.msgpack.encode([1])])
def test_what_is_not_the_expected_message_is_refused(ends, payload):
    far = wire.Connection(ends[1], Point)
    ends[0].sendall(struct.pack("<I", len(payload)) + payload)
    with pytest.raises(wire.WireError, match="not the expected message"):
        far.receive()


@pytest.mark.parametrize("sent", [b"\x05", struct.pack("<I", 5), struct.pack("<I", 5) + b"abc"])
def test_a_peer_that_closes_inside_a_frame_is_told_from_one_that_ends(ends, sent):
    far = wire.Connection(ends[1], object)
    ends[0].sendall(sent)
    ends[0].close()
    with pytest.raises(wire.WireError, match="closed after"):
        far.receive()


def test_closing_wakes_a_waiting_receive(ends):
    far, got = wire.Connection(ends[1], object), []
    waiting = threading.Thread(target=lambda: got.append(far.receive()))
    waiting.start()
    far.close()
    waiting.join(timeout=5)
    assert got == [None]


def test_sending_to_a_closed_peer_is_an_os_error(ends):
    near = wire.Connection(ends[0], object)
    ends[1].close()
    with pytest.raises(OSError):
        for _ in range(2):
            near.send(b"x")


def served(tmp_path, sent, pieces=None):
    """(messages, how it ended) that `serve_frames` sees of a client that sends `sent` in `pieces` and hangs up."""
    path, seen = tmp_path / "pipe", []
    path.unlink(missing_ok=True)

    def client():
        with socket.socket(socket.AF_UNIX) as sock:
            sock.connect(str(path))
            for piece in pieces or [sent]:
                sock.sendall(piece)

    async def main():
        ended = asyncio.get_running_loop().create_future()

        def accepted(peer):
            peer.on_message, peer.on_end = seen.append, ended.set_result

        server = await wire.serve_frames(path, Point, accepted)
        await asyncio.to_thread(client)
        failure = await asyncio.wait_for(ended, 5)
        server.close()
        return failure

    return seen, asyncio.run(main())


def test_frames_are_served_without_a_task_to_a_blocking_client(tmp_path):
    path, seen = tmp_path / "pipe", []

    def client():
        near = wire.connect(path, list[int])
        near.send(Point(3))
        seen.append(near.receive())
        near.close()

    async def main():
        ended = asyncio.Event()

        def accepted(peer):
            peer.on_message = lambda message: peer.send([message.x, message.x + 1])
            peer.on_end = lambda failure: ended.set()

        server = await wire.serve_frames(path, Point, accepted)
        await asyncio.gather(asyncio.to_thread(client), asyncio.wait_for(ended.wait(), 5))
        server.close()

    asyncio.run(main())
    assert seen == [[3, 4]]


@given(st.lists(st.integers(0, 2**40), max_size=5), st.lists(st.integers(0, 60), max_size=6))
def test_frames_arrive_whole_in_any_pieces(numbers, cuts):
    sent = b"".join(wire.Codec(object).frame(Point(number)) for number in numbers)
    edges = sorted({0, len(sent), *(min(cut, len(sent)) for cut in cuts)})
    peer = wire.FramePeer(Point, lambda peer: None)
    seen, ends = [], []
    peer.on_message, peer.on_end = seen.append, ends.append
    peer.connection_made(SimpleNamespace(is_closing=lambda: False))
    for begin, end in pairwise(edges):
        peer.data_received(sent[begin:end])
    peer.connection_lost(None)
    assert seen == [Point(number) for number in numbers] and ends == [None]


def test_served_frames_end_with_what_was_wrong(tmp_path):
    frame = wire.Codec(object).frame(Point(7))
    assert served(tmp_path, frame) == ([Point(7)], None)
    assert served(tmp_path, b"") == ([], None)
    for sent, words in (
        (frame[:2], "inside a frame"),
        (frame + frame[:-1], "inside a frame"),
        (frame + b"\xff" * 4, "announced"),
        (frame + wire.Codec(object).frame("other"), "not the expected message"),
    ):
        seen, failure = served(tmp_path, sent)
        assert len(seen) == (len(sent) > len(frame)) and re.search(words, str(failure))


def test_sending_to_a_frame_peer_that_is_gone_is_an_os_error():
    peer = wire.FramePeer(Point, lambda peer: None)
    peer.connection_made(SimpleNamespace(is_closing=lambda: True))
    with pytest.raises(OSError):
        peer.send([1])


def test_asyncio_tells_an_end_a_cut_and_a_bad_frame(tmp_path):
    async def receive(sent):
        path = tmp_path / "pipe"
        path.unlink(missing_ok=True)
        with wire.listen(path) as listener:
            near = await wire.connect_async(path, Point)
            peer, _ = listener.accept()
            peer.sendall(sent)
            peer.close()
            try:
                return await near.receive()
            finally:
                await near.close()

    assert asyncio.run(receive(b"")) is None
    frame = wire.Codec(object).frame(Point(7))
    assert asyncio.run(receive(frame)) == Point(7)
    for sent, words in ((frame[:2], "closed after"), (frame[:-1], "closed after"), (b"\xff" * 4, "announced")):
        with pytest.raises(wire.WireError, match=words):
            asyncio.run(receive(sent))


def test_connect_waits_for_the_listener_and_then_gives_up(tmp_path):
    path = tmp_path / "late"
    opened = []
    late = threading.Timer(0.1, lambda: opened.append(wire.listen(path)))
    late.start()
    wire.connect(path, object, timeout_s=5).close()
    opened[0].close()
    with pytest.raises(wire.WireError, match="nobody listens"):
        wire.connect(tmp_path / "never", object, timeout_s=0.05)


def test_a_socket_is_for_its_user_only_and_paths_are_checked(tmp_path):
    path = tmp_path / "pipe"
    with wire.listen(path):
        assert path.stat().st_mode & 0o777 == 0o600
        with pytest.raises(wire.WireError, match="cannot listen"):
            wire.listen(path)
    with pytest.raises(wire.WireError, match="at most 107"):
        wire.listen(tmp_path / ("x" * 200))
    assert issubclass(wire.WireError, DsufError)
