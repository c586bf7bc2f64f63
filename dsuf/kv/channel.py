"""Authenticated frames between two servers over one stream socket.

    owner  -> reader  CHALLENGE  version, nonce
    reader -> owner   HELLO      nonce, sid, boot, ns, purpose, host id, offers     mac(reader role; all frames so far)
    owner  -> reader  WELCOME    sid, boot, host id, offers                         mac(owner role; all frames so far)

A mac is HMAC-SHA256 under a key of its role derived from the fleet key, over every byte said before it, so that neither
side's mac can be used as the other's and no part can be changed. Afterwards each frame carries a 16-byte mac over its
direction's counter, under keys made from the whole handshake: nothing can be replayed, reordered or mixed up. Nothing
but sizes is read from a frame before its mac was checked; a frame is at most 1 MiB, a stranger's at most 64 KiB.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import hmac
import secrets
import socket
import struct
from dataclasses import dataclass
from typing import Any, Literal

import msgspec

from dsuf.errors import EnvironmentProblem
from dsuf.kv.keys import derive

PROTOCOL = 1
MAX_FRAME_BYTES, MAX_STRANGER_BYTES = 1 << 20, 64 << 10
HANDSHAKE_S = 2.0
MAC_BYTES = 16
_PREFIX = struct.Struct("<I")
_COUNTER = struct.Struct("<Q")

Purpose = Literal["control", "tcp", "shm"]


class Refused(EnvironmentProblem):
    """The peer does not know the key, serves another namespace, or speaks another version."""


class ChannelBroken(EnvironmentProblem):
    """The connection ended, or carried something that its peer cannot have sent."""


class Challenge(msgspec.Struct, frozen=True, tag="challenge"):
    """The owner's first word."""

    version: int
    nonce: bytes


class Introduction(msgspec.Struct, frozen=True, tag="intro"):
    """Who speaks. `offers` are what each transport says of itself."""

    nonce: bytes
    sid: str
    boot: str
    host_id: str
    ns: bytes
    purpose: Purpose
    offers: dict[str, bytes] = {}


class Refusal(msgspec.Struct, frozen=True, tag="refusal"):
    """Instead of WELCOME: why not."""

    reason: str


@dataclass(frozen=True)
class Identity:
    """What a server says of itself in every handshake."""

    sid: str
    boot: str
    host_id: str
    ns: bytes

    def introduce(self, purpose: Purpose, offers: dict[str, bytes]) -> Introduction:
        """HELLO or WELCOME."""
        return Introduction(secrets.token_bytes(16), self.sid, self.boot, self.host_id, self.ns, purpose, offers)


class Channel:
    """One connection. `send` may be called by several tasks, `receive` by one; use `meet` or `greet` first."""

    def __init__(self, sock: socket.socket) -> None:
        sock.setblocking(False)
        if sock.family != socket.AF_UNIX:
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.sock = sock
        self.peer: Introduction | None = None
        self._loop = asyncio.get_running_loop()
        self._said = hashlib.sha256()
        self._keys: tuple[bytes, bytes] | None = None  # to send with, to receive with
        self._sent = self._received = 0
        self._sending = asyncio.Lock()
        self._encoder = msgspec.msgpack.Encoder()

    # ---- handshake

    async def meet(self, key: bytes, me: Identity, offers: dict[str, bytes], purpose: Purpose) -> Introduction:
        """Reader: introduce ourselves and check the owner. Raises Refused, ChannelBroken or TimeoutError."""
        async with asyncio.timeout(HANDSHAKE_S):
            challenge = await self._hear(Challenge)
            if challenge.version != PROTOCOL:
                raise Refused(f"the peer speaks version {challenge.version} of the protocol, this server {PROTOCOL}.")
            await self._say(me.introduce(purpose, offers), derive(key, "reader"))
            answer = await self._hear(Introduction | Refusal, derive(key, "owner"))
        if isinstance(answer, Refusal):
            raise Refused(f"the peer refused: {answer.reason}")
        if answer.ns != me.ns:
            raise Refused("the peer serves another model, layout or precision.")
        self._agree(key, reader=True)
        self.peer = answer
        return answer

    async def greet(self, key: bytes, me: Identity, offers: dict[str, bytes]) -> Introduction:
        """Owner: challenge whoever connected. Raises Refused, ChannelBroken or TimeoutError."""
        async with asyncio.timeout(HANDSHAKE_S):
            await self._say(Challenge(PROTOCOL, secrets.token_bytes(16)))
            try:
                hello = await self._hear(Introduction, derive(key, "reader"))
            except Refused as error:
                await self._refuse("the key is another one", None)
                raise error
            if hello.ns != me.ns:
                await self._refuse("it serves another model, layout or precision", derive(key, "owner"))
                raise Refused(f"{hello.sid} serves another model, layout or precision.")
            await self._say(me.introduce(hello.purpose, offers), derive(key, "owner"))
        self._agree(key, reader=False)
        self.peer = hello
        return hello

    async def _say(self, message: Any, key: bytes | None = None) -> None:
        payload = self._encoder.encode(message)
        self._said.update(_PREFIX.pack(len(payload)) + payload)
        mac = hmac.digest(key, self._said.digest(), "sha256") if key else b""
        self._said.update(mac)
        await self._write(_PREFIX.pack(len(payload) + len(mac)) + payload + mac)

    async def _hear(self, expected: Any, key: bytes | None = None) -> Any:
        """One frame of the handshake; with `key` its mac is checked before anything in it is read."""
        frame = await self._read_frame(MAX_STRANGER_BYTES)
        mac_bytes = 32 if key else 0
        if len(frame) < mac_bytes:
            raise ChannelBroken("the peer sent a frame that is too short.")
        payload, mac = frame[: len(frame) - mac_bytes], frame[len(frame) - mac_bytes :]
        self._said.update(_PREFIX.pack(len(payload)) + payload)
        if key and not hmac.compare_digest(mac, hmac.digest(key, self._said.digest(), "sha256")):
            raise Refused("the peer does not know the fleet key.")
        self._said.update(mac)
        return _decode(payload, expected)

    async def _refuse(self, reason: str, key: bytes | None) -> None:
        """Tell the peer why; without a common key the words are for its log alone and prove nothing."""
        with contextlib.suppress(ChannelBroken):
            await self._say(Refusal(reason), key or secrets.token_bytes(32))

    def _agree(self, key: bytes, *, reader: bool) -> None:
        said = self._said.digest()
        mine, theirs = derive(key, "reader frames", said), derive(key, "owner frames", said)
        self._keys = (mine, theirs) if reader else (theirs, mine)

    # ---- afterwards

    async def send(self, message: Any) -> None:
        """Send one message. Raises ChannelBroken."""
        payload = self._encoder.encode(message)
        if len(payload) + MAC_BYTES > MAX_FRAME_BYTES:
            raise ChannelBroken(f"a message of {len(payload)} bytes is too long to send.")
        async with self._sending:
            mac = self._mac(self._keys[0], self._sent, payload)
            self._sent += 1
            await self._write(_PREFIX.pack(len(payload) + MAC_BYTES) + payload + mac)

    async def receive(self, expected: Any) -> Any:
        """The next message. Raises ChannelBroken, also when the peer has closed."""
        frame = await self._read_frame(MAX_FRAME_BYTES)
        payload, mac = frame[:-MAC_BYTES], frame[-MAC_BYTES:]
        if not hmac.compare_digest(mac, self._mac(self._keys[1], self._received, payload)):
            raise ChannelBroken("a frame was changed, repeated or left out.")
        self._received += 1
        return _decode(payload, expected)

    def close(self) -> None:
        """Close at once; a task that reads or writes gets ChannelBroken."""
        with contextlib.suppress(OSError):
            self.sock.shutdown(socket.SHUT_RDWR)  # wakes whoever waits for the socket
        self._loop.call_soon(lambda: self._loop.call_soon(self.sock.close))

    @staticmethod
    def _mac(key: bytes, counter: int, payload: bytes) -> bytes:
        return hmac.digest(key, _COUNTER.pack(counter) + payload, "sha256")[:MAC_BYTES]

    async def _read_frame(self, most: int) -> bytes:
        (count,) = _PREFIX.unpack(await self._read(_PREFIX.size))
        if not MAC_BYTES <= count <= most:
            raise ChannelBroken(f"the peer announced a frame of {count} bytes, expected {MAC_BYTES} to {most}.")
        return await self._read(count)

    async def _read(self, count: int) -> bytes:
        buffer = bytearray(count)
        view, got = memoryview(buffer), 0
        while got < count:
            try:
                received = await self._loop.sock_recv_into(self.sock, view[got:])
            except (OSError, ValueError) as error:
                raise ChannelBroken(f"the connection broke: {error}") from None
            if not received:
                raise ChannelBroken("the peer closed the connection.")
            got += received
        return bytes(buffer)

    async def _write(self, data: bytes) -> None:
        try:
            await self._loop.sock_sendall(self.sock, data)
        except (OSError, ValueError) as error:
            raise ChannelBroken(f"the connection broke: {error}") from None


def _decode(payload: bytes, expected: Any) -> Any:
    try:
        return msgspec.msgpack.decode(payload, type=expected)
    except msgspec.DecodeError as error:
        raise ChannelBroken(f"the peer sent something else than expected: {error}") from None
