"""One end of a reliable RDMA connection: READs into our arena, and windows through which the peer may read it.

The arena's own registration has no remote access. A peer reads through a memory window (type 2) that is bound to its
queue pair over one range, or, on devices without windows, through a registration of just that range.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from dsuf.kv.transport.base import TransferFailed
from dsuf.kv.transport.rdma.messages import Hello
from dsuf.kv.transport.rdma.ports import Gid
from dsuf.kv.transport.rdma.verbs import DEPTH, Device

TIMEOUT_CODE = 14  # 4.096 us * 2**14 = 67 ms a try; adapters may stretch it
RETRIES = 6  # never 7: Soft-RoCE takes that for "for ever", and a dead owner is not noticed
RNR_RETRIES = 6
MIN_RNR_TIMER = 12
HOP_LIMIT = 64
BIND_BATCH = DEPTH // 2  # windows bound at once

# Completion statuses that mean something to us; verbs.h has them all (ibv_wc_status).
SUCCESS, LOCAL_OPERATION, FLUSHED, REMOTE_ACCESS = 0, 2, 5, 10
RETRIES_EXCEEDED, RNR_RETRIES_EXCEEDED, FATAL, RESPONSE_TIMEOUT, GENERAL = 12, 13, 19, 20, 21
STATUS_TEXT = {
    LOCAL_OPERATION: "this machine's adapter could not send",
    FLUSHED: "the connection had failed",
    REMOTE_ACCESS: "the owner refused the key or the range",
    RETRIES_EXCEEDED: "the owner did not answer",
    FATAL: "the adapter reported a fatal error",
}


class Window:
    """What makes a range readable: a bound memory window, or a registration. `rkey` is the key."""

    def __init__(self, pair: QueuePair, made: Any, rkey: int) -> None:
        self._pair, self._made, self.rkey = pair, made, rkey

    def close(self) -> None:
        """After this the key is refused, if need be because its queue pair has ended."""
        try:
            self._made.close()
        except self._pair.device.verbs.Error as error:
            self._pair.fail(f"a key could not be taken back: {error}")


class QueuePair:
    """One end of a reliable connection. Make, send `hello` to the peer, `join` with the peer's; made in the loop.

    `reason` is the first error, None while it works. Every posted request is called back once with its status.
    """

    def __init__(self, device: Device, port: str, number: int, serves: bool) -> None:
        self.device, self.port, self.reason = device, port, None
        self._verbs, self._number, self._serves = device.verbs, number, serves
        self._posted: dict[int, Callable[[int], None]] = {}
        self._last, self._psn = 0, random.getrandbits(24)
        self._loop = asyncio.get_running_loop()
        try:
            self.mtu = device.active_mtu(number)
            self._channel, self._queue, self._descriptor = device.make_queue()
            self._pair = self._make_pair()
        except self._verbs.Error as error:
            raise TransferFailed(f"{port} cannot make a queue pair: {error}") from None
        self._queue.req_notify()
        self._loop.add_reader(self._descriptor, self._on_event)

    def _make_pair(self) -> Any:
        qp, kind = self._verbs.qp, self._verbs.enums.IBV_QPT_RC
        segments = self.device.max_segments
        capacity = qp.QPCap(max_send_wr=DEPTH, max_recv_wr=1, max_send_sge=segments, max_recv_sge=1)
        wanted = qp.QPInitAttr(qp_type=kind, scq=self._queue, rcq=self._queue, cap=capacity, sq_sig_all=0)
        return qp.QP(self.device.domain, wanted)

    @property
    def room(self) -> int:
        """Requests that may still be posted; 0 once it failed."""
        return DEPTH - len(self._posted) if self.reason is None else 0

    @property
    def idle(self) -> bool:
        """Nothing is posted: no byte can arrive any more."""
        return not self._posted

    def hello(self, gid: Gid, lid: int) -> Hello:
        """What the peer must know to join."""
        return Hello(gid.kind, gid.address, lid, self._pair.qp_num, self._psn, self.mtu, self.device.reads_served)

    def join(self, gid: Gid, peer: Hello) -> None:
        """RESET -> INIT -> RTR -> RTS. `gid` is our own. Raises TransferFailed."""
        verbs = self._verbs
        attributes = verbs.qp.QPAttr(port_num=self._number)
        try:
            attributes.pkey_index = 0
            attributes.qp_access_flags = verbs.enums.IBV_ACCESS_REMOTE_READ if self._serves else 0
            self._pair.to_init(attributes)
            attributes.path_mtu = min(self.mtu, peer.mtu)
            attributes.dest_qp_num, attributes.rq_psn = peer.number, peer.psn
            attributes.max_dest_rd_atomic, attributes.min_rnr_timer = self.device.reads_served, MIN_RNR_TIMER
            route = verbs.addr.GlobalRoute(
                dgid=verbs.addr.GID(peer.gid), sgid_index=gid.index, hop_limit=HOP_LIMIT, traffic_class=0
            )
            attributes.ah_attr = verbs.addr.AHAttr(gr=route, is_global=1, dlid=peer.lid, port_num=self._number, sl=0)
            self._pair.to_rtr(attributes)
            attributes.sq_psn, attributes.timeout = self._psn, TIMEOUT_CODE
            attributes.retry_cnt, attributes.rnr_retry = RETRIES, RNR_RETRIES
            attributes.max_rd_atomic = min(self.device.reads_asked, peer.reads)
            self._pair.to_rts(attributes)
        except (verbs.Error, ValueError, OverflowError, TypeError) as error:
            raise TransferFailed(f"{self.port} cannot connect to {peer.gid}: {error}") from None

    def post_read(
        self, address: int, key: int, segments: Sequence[tuple[int, int]], done: Callable[[int], None]
    ) -> None:
        """READ from the peer's address into `segments` (offset, length) of our arena; `done(status)` ends it.

        No segment crosses a multiple of PIECE_BYTES. Raises TransferFailed when it cannot be posted.
        """
        verbs, device = self._verbs, self.device
        entries = [
            verbs.wr.SGE(device.address + offset, length, device.piece(offset).lkey) for offset, length in segments
        ]
        request = verbs.wr.SendWR(
            opcode=verbs.enums.IBV_WR_RDMA_READ,
            num_sge=len(entries),
            sg=entries,
            send_flags=verbs.enums.IBV_SEND_SIGNALED,
        )
        request.set_wr_rdma(key, address)
        try:
            self._post(request, done)
        finally:
            for entry in entries:
                entry.close()

    async def open_windows(self, ranges: Sequence[tuple[int, int]]) -> list[Window]:
        """Let the peer read these (offset, length) of the arena, each in one registered piece; a window for each.

        Raises TransferFailed, and then none of them is open.
        """
        windows: list[Window] = []
        try:
            for at in range(0, len(ranges), BIND_BATCH):
                bound = [self._open_window(*each, windows) for each in ranges[at : at + BIND_BATCH]]
                if any(status != SUCCESS for status in await asyncio.gather(*bound)):
                    raise TransferFailed(f"{self.port} cannot bind a window: {self.reason}")
        except self._verbs.Error as error:
            _close(windows)
            raise TransferFailed(f"{self.port} cannot make a key: {error}") from None
        except BaseException:
            _close(windows)
            raise
        return windows

    def _open_window(self, offset: int, length: int, windows: list[Window]) -> asyncio.Future[int]:
        """Add a window; the future tells with which status it was bound."""
        verbs, device = self._verbs, self.device
        read, start = verbs.enums.IBV_ACCESS_REMOTE_READ, device.address + offset
        bound = self._loop.create_future()
        if not device.has_windows:
            region = verbs.mr.MR(device.domain, length, read, address=start)
            windows.append(Window(self, region, region.rkey))
            bound.set_result(SUCCESS)
            return bound
        window = verbs.mr.MW(device.domain, verbs.enums.IBV_MW_TYPE_2)
        request = verbs.wr.SendWR(opcode=verbs.enums.IBV_WR_BIND_MW, send_flags=verbs.enums.IBV_SEND_SIGNALED)
        request.set_bind_wr(window, verbs.mr.MWBindInfo(device.piece(offset), start, length, read))
        windows.append(Window(self, window, request.rkey))
        self._post(request, lambda status: None if bound.done() else bound.set_result(status))
        return bound

    def fail(self, reason: str) -> None:
        """End it: what is posted comes back flushed, soon."""
        if self.reason is None:
            self.reason = reason
            attributes = self._verbs.qp.QPAttr(qp_state=self._verbs.enums.IBV_QPS_ERR)
            with contextlib.suppress(self._verbs.Error):
                self._pair.modify(attributes, self._verbs.enums.IBV_QP_STATE)

    def close(self) -> None:
        """Destroy it: no byte arrives afterwards. What was posted is called back as flushed."""
        if self._pair is None:
            return
        self.reason = self.reason or "closed"
        self._loop.remove_reader(self._descriptor)
        for made in (self._pair, self._queue, self._channel):
            with contextlib.suppress(self._verbs.Error):
                made.close()
        self._pair = None
        for done in list(self._posted.values()):
            done(FLUSHED)
        self._posted.clear()

    def _post(self, request: Any, done: Callable[[int], None]) -> None:
        self._last += 1
        request.wr_id = self._last
        self._posted[self._last] = done
        try:
            self._pair.post_send(request, None)
        except self._verbs.Error as error:
            del self._posted[self._last]
            raise TransferFailed(f"{self.port} cannot post a request: {error}") from None
        finally:
            request.close()

    def _on_event(self) -> None:
        # Take the event, arm again, and only then poll: a completion between a poll and the arming would be lost.
        with contextlib.suppress(self._verbs.Error):
            self._channel.get_cq_event(self._queue)
            self._queue.ack_events(1)
        self._queue.req_notify()
        for identity, status in self._completions():
            if status != SUCCESS and self.reason is None:  # the first names the cause, the rest is flushed
                self.reason = STATUS_TEXT.get(status, f"completion status {status}")
            done = self._posted.pop(identity, None)
            if done is not None:
                done(status)

    def _completions(self) -> Iterator[tuple[int, int]]:
        count = 64
        while count == 64 and self._pair is not None:
            count, completions = self._queue.poll(64)
            yield from ((completion.wr_id, completion.status) for completion in completions)


def _close(windows: Sequence[Window]) -> None:
    for window in windows:
        window.close()
