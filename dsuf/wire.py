"""Length-prefixed msgpack frames over a Unix socket, for a thread or for asyncio.

A frame is a little-endian u32 count of payload bytes, then one msgpack object. The receiver states the type that it
expects and the largest frame it takes; anything else closes the connection with a WireError.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import struct
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec

from dsuf.errors import EnvironmentProblem

MAX_FRAME_BYTES = 64 << 20  # a 1 M token prompt is 5 MB
_PREFIX = struct.Struct("<I")
_PREFIX_BYTES = _PREFIX.size
_PATH_BYTES = 107  # sun_path of sockaddr_un less its final zero


class WireError(EnvironmentProblem):
    """A frame that is too large, cut short, or not the expected message."""


class Codec:
    """Encode any message; decode one expected type. `receives` is anything that msgspec accepts as a type."""

    def __init__(self, receives: Any, max_bytes: int = MAX_FRAME_BYTES) -> None:
        self.max_bytes = max_bytes
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder = msgspec.msgpack.Decoder(receives)

    def frame(self, message: Any) -> bytes:
        """The message with its length prefix. Raises WireError above the limit."""
        payload = self._encoder.encode(message)
        self.check(len(payload), "to send")
        return _PREFIX.pack(len(payload)) + payload

    def decode(self, payload: bytes | memoryview) -> Any:
        """Raises WireError when the payload is not the expected type."""
        try:
            return self._decoder.decode(payload)
        except msgspec.DecodeError as error:
            raise WireError(
                f"a frame of {len(payload)} bytes is not the expected message: {error}. "
                "Both ends must be the same version of dsuf."
            ) from None

    def check(self, count: int, what: str = "announced by the peer") -> None:
        """Raises WireError when a frame of `count` bytes is over the limit."""
        if count > self.max_bytes:
            raise WireError(
                f"a frame of {count} bytes {what}, at most {self.max_bytes} are allowed. Send it in smaller parts."
            )


class Connection:
    """Blocking side. One thread may send while another receives."""

    def __init__(self, sock: socket.socket, receives: Any, max_bytes: int = MAX_FRAME_BYTES) -> None:
        self._socket = sock
        self._codec = Codec(receives, max_bytes)
        self._closed = False

    def send(self, message: Any) -> None:
        """Send one frame; waits for the peer to take it. Raises OSError when the peer is gone."""
        self._socket.sendall(self._codec.frame(message))

    def receive(self) -> Any | None:
        """The next message, or None when the peer has closed. Raises WireError for a bad or half frame."""
        prefix = self._read(_PREFIX.size)
        if not prefix:
            return None
        (count,) = _PREFIX.unpack(prefix)
        self._codec.check(count)
        payload = self._read(count)
        if count and not payload:
            raise _cut_short(0, count)
        return self._codec.decode(payload)

    def close(self) -> None:
        """Close both directions; a `receive` in another thread then returns None."""
        self._closed = True
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()

    def _read(self, count: int) -> bytes:
        """Exactly `count` bytes, or b"" when the peer closed before the first one."""
        buffer = bytearray(count)
        view, got = memoryview(buffer), 0
        while got < count:
            try:
                n = self._socket.recv_into(view[got:])
            except ConnectionResetError:
                n = 0
            except OSError:
                if not self._closed:
                    raise
                n = 0
            if n == 0:
                if got == 0:
                    return b""
                raise _cut_short(got, count)
            got += n
        return bytes(buffer)


class AsyncConnection:
    """asyncio side as streams; one task receives, sends may come from several tasks of the same loop."""

    def __init__(
        self,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        receives: Any,
        max_bytes: int = MAX_FRAME_BYTES,
    ) -> None:
        self._reader, self._writer = reader, writer
        self._codec = Codec(receives, max_bytes)

    async def send(self, message: Any) -> None:
        """Queue one frame whole, then wait while the peer is slow. Raises OSError when the peer is gone."""
        self._writer.write(self._codec.frame(message))
        await self._writer.drain()

    async def receive(self) -> Any | None:
        """The next message, or None when the peer has closed. Raises WireError for a bad or half frame."""
        try:
            prefix = await self._reader.readexactly(_PREFIX.size)
            (count,) = _PREFIX.unpack(prefix)
            self._codec.check(count)
            payload = await self._reader.readexactly(count)
        except asyncio.IncompleteReadError as error:
            if error.expected == _PREFIX.size and not error.partial:
                return None
            raise _cut_short(len(error.partial), error.expected or 0) from None
        except ConnectionResetError:
            return None
        return self._codec.decode(payload)

    async def close(self) -> None:
        """Close both directions."""
        self._writer.close()
        with contextlib.suppress(OSError):
            await self._writer.wait_closed()


class FramePeer(asyncio.Protocol):
    """asyncio side without a task or a copy between: `on_message` runs for each frame as soon as it has arrived.

    `on_end` runs once, with None when the peer closed or with the WireError of a bad frame. Both are set by the
    `accepted` of `serve_frames`; a peer that it does not want is closed there.
    """

    def __init__(self, receives: Any, accepted: Callable[[FramePeer], None], max_bytes: int = MAX_FRAME_BYTES) -> None:
        self.on_message: Callable[[Any], None] | None = None
        self.on_end: Callable[[WireError | None], None] | None = None
        self._codec, self._accepted = Codec(receives, max_bytes), accepted
        self._rest = bytearray()  # the beginning of a frame
        self._failure: WireError | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:
        """The peer is there."""
        self._transport = transport
        self._accepted(self)

    def data_received(self, data: bytes) -> None:
        """Hand on every whole frame, keep the rest."""
        if self._transport.is_closing():
            return
        if self._rest:
            self._rest += data
            data = bytes(self._rest) if self._holds_frame() else b""
            if not data:
                return
        begin = 0
        while len(data) - begin >= _PREFIX_BYTES:
            (count,) = _PREFIX.unpack_from(data, begin)
            end = begin + _PREFIX_BYTES + count
            try:
                if end > len(data):
                    self._codec.check(count)
                    break
                message = self._codec.decode(memoryview(data)[begin + _PREFIX_BYTES : end])
            except WireError as error:
                self._failure = error
                self._transport.abort()
                break
            begin = end
            self.on_message(message)
        if begin < len(data):
            self._rest = bytearray(data[begin:])
        elif self._rest:
            self._rest = bytearray()

    def connection_lost(self, error: Exception | None) -> None:
        """The peer has closed, or we have."""
        if self._rest and self._failure is None:
            self._failure = WireError("the peer closed inside a frame.")
        if self.on_end is not None:
            self.on_end(self._failure)

    def send(self, message: Any) -> None:
        """Queue one frame whole. Raises OSError when the peer is gone, WireError when the message is too large."""
        if self._transport.is_closing():
            raise ConnectionResetError("the peer is gone")
        self._transport.write(self._codec.frame(message))

    def close(self) -> None:
        """Close both directions, after what was queued."""
        self._transport.close()

    def _holds_frame(self) -> bool:
        """Whether the kept bytes hold a whole frame, or one whose length is refused."""
        if len(self._rest) < _PREFIX.size:
            return False
        (count,) = _PREFIX.unpack_from(self._rest)
        return len(self._rest) - _PREFIX.size >= min(count, self._codec.max_bytes)


def listen(path: Path) -> socket.socket:
    """A listening socket at `path`, readable by this user only. Raises WireError when the path is too long or taken."""
    _check_path(path)
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        sock.bind(str(path))
        path.chmod(0o600)
        sock.listen()
    except OSError as error:
        sock.close()
        raise WireError(f"cannot listen on {path}: {error.strerror}. Choose a free path.") from None
    return sock


def connect(path: Path, receives: Any, timeout_s: float = 10.0) -> Connection:
    """Connect to a listener, waiting up to `timeout_s` for it to appear. Raises WireError when it does not."""
    _check_path(path)
    deadline = time.monotonic() + timeout_s
    while True:
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            sock.connect(str(path))
            return Connection(sock, receives)
        except OSError as error:
            sock.close()
            if time.monotonic() >= deadline:
                raise WireError(f"nobody listens on {path} ({error.strerror}); waited {timeout_s:g} s.") from None
        time.sleep(0.02)


async def serve_frames(path: Path, receives: Any, accepted: Callable[[FramePeer], None]) -> asyncio.Server:
    """Listen on `path` in the running loop; `accepted` sets up every peer that connects."""
    loop = asyncio.get_running_loop()
    return await loop.create_unix_server(lambda: FramePeer(receives, accepted), sock=listen(path))


async def connect_async(path: Path, receives: Any) -> AsyncConnection:
    """Connect to a listener from asyncio. Raises WireError when nobody listens."""
    _check_path(path)
    try:
        reader, writer = await asyncio.open_unix_connection(str(path))
    except OSError as error:
        raise WireError(f"nobody listens on {path} ({error.strerror}).") from None
    return AsyncConnection(reader, writer, receives)


async def readable(fd: int) -> None:
    """Wait in the running loop until a descriptor can be read, such as that of a process that ends."""
    loop, ready = asyncio.get_running_loop(), asyncio.Event()
    loop.add_reader(fd, ready.set)
    try:
        await ready.wait()
    finally:
        loop.remove_reader(fd)


def _check_path(path: Path) -> None:
    length = len(str(path).encode())
    if length > _PATH_BYTES:
        raise WireError(f"the socket path {path} has {length} bytes, at most {_PATH_BYTES} work. Use a shorter folder.")


def _cut_short(got: int, count: int) -> WireError:
    return WireError(f"the peer closed after {got} of {count} bytes of a frame.")
