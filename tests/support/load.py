"""`python -m tests.support.load [SECONDS] [ROUNDS]`: processor time of one streamed event, ours beside bare stacks.

For each shape of serving.md 9 the three servers are measured in turn, round after round, because the machine's speed
drifts; the ratios are medians over the rounds of one round's values.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from tests.support.load_servers import PATH

ROOT = Path(__file__).parents[2]
STACKS = ("raw", "starlette", "dsuf")
SHAPES = ((1, 370.0), (64, 100.0), (256, 30.0))
BODY = json.dumps(
    {
        "model": "deepseek-chat", "stream": True, "max_tokens": 300_000,
        "messages": [{"role": "user", "content": "hi"}],
    }
).encode()  # fmt: skip
HEAD = b"POST %b HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n" % (PATH.encode(), len(BODY))


class Reader(asyncio.Protocol):
    """One stream: counts its events as they arrive."""

    def __init__(self) -> None:
        self.events = 0

    def connection_made(self, transport: asyncio.Transport) -> None:
        self.transport = transport
        transport.write(HEAD + BODY)

    def data_received(self, data: bytes) -> None:
        self.events += data.count(b"data: ")


def cpu_seconds(pid: int) -> float:
    """Processor time of all threads of a process so far."""
    tasks = Path(f"/proc/{pid}/task").iterdir()
    return sum(int((task / "schedstat").read_text().split()[0]) for task in tasks) / 1e9


async def measure(pid: int, port: int, streams: int, seconds: float) -> tuple[float, list[int]]:
    """(seconds of processor time an event, events of each stream) while `streams` run; they are cut off then."""
    loop = asyncio.get_running_loop()
    readers = [(await loop.create_connection(Reader, "127.0.0.1", port))[1] for _ in range(streams)]
    while any(reader.events < 5 for reader in readers):
        await asyncio.sleep(0.05)
    before, spent = [reader.events for reader in readers], cpu_seconds(pid)
    await asyncio.sleep(seconds)
    spent = cpu_seconds(pid) - spent
    counts = [reader.events - earlier for reader, earlier in zip(readers, before, strict=True)]
    for reader in readers:
        reader.transport.abort()
    return spent / sum(counts), counts


@dataclass(frozen=True)
class Running:
    """One server process."""

    pid: int
    port: int
    log: Path  # its stderr


@contextlib.contextmanager
def server(stack: str, rate: float) -> Iterator[Running]:
    """One running server; gone at the end of the block."""
    with tempfile.TemporaryDirectory(prefix="dsuf-load-") as folder:
        command = [sys.executable, "-m", "tests.support.load_servers", stack, folder, str(rate)]
        log = Path(folder) / "log"
        with log.open("wb") as written:
            process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=written, cwd=ROOT)
        try:
            yield Running(process.pid, int(process.stdout.readline()), log)
        finally:
            process.terminate()
            process.wait()


def compare(
    streams: int, rate: float, seconds: float, rounds: int, stacks: tuple[str, ...] = STACKS
) -> dict[str, list[float]]:
    """Microseconds an event of each stack, one value a round. No stream may starve."""
    found: dict[str, list[float]] = {stack: [] for stack in stacks}
    with contextlib.ExitStack() as running:
        servers = {stack: running.enter_context(server(stack, rate)) for stack in stacks}
        for _ in range(rounds):
            for stack, one in servers.items():
                spent, counts = asyncio.run(measure(one.pid, one.port, streams, seconds))
                found[stack].append(spent * 1e6)
                assert min(counts) > 0.5 * statistics.median(counts), (stack, sorted(counts)[:5])
    return found


def main() -> None:
    seconds = float(sys.argv[1]) if len(sys.argv) > 1 else 2.0
    rounds = int(sys.argv[2]) if len(sys.argv) > 2 else 3
    for streams, rate in SHAPES:
        found = compare(streams, rate, seconds, rounds)
        ratio = statistics.median(a / b for a, b in zip(found["dsuf"], found["starlette"], strict=True))
        values = "  ".join(f"{stack} {statistics.median(values):6.1f} us" for stack, values in found.items())
        print(f"{streams:4} x {rate:3.0f}/s  {values}  dsuf/starlette {ratio:.2f}", flush=True)


if __name__ == "__main__":
    main()
