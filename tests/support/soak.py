"""`python -m tests.support.soak [REQUESTS] [AT_ONCE]`: many calls; some abort, some are invalid, some read slowly.

Tells what every call saw and what the server's process looks like before and after: gauges, memory, open files.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
import re
import sys
import time
import urllib.request
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

from tests.support.load import server

TOKENS = 60
CHAT = "/v1/chat/completions"
HI = {"model": "deepseek-chat", "max_tokens": TOKENS, "messages": [{"role": "user", "content": "hi"}]}
INVALID = (
    b"{",
    b"[1, 2]",
    json.dumps({**HI, "model": "gpt-5"}).encode(),
    json.dumps({**HI, "temperature": 9}).encode(),
    json.dumps({**HI, "messages": []}).encode(),
    json.dumps({**HI, "max_tokens": -1}).encode(),
    json.dumps({**HI, "stop": ["x"] * 99, "stream": True}).encode(),
    b"\xff\xfe" + json.dumps(HI).encode(),
)
GAUGES = ("num_requests_running", "num_requests_waiting", "waiting_tokens")


def kind_of(number: int) -> str:
    """10 % abort, 10 % are invalid, 5 % read slowly; the rest is half streamed, half not."""
    return {0: "abort", 1: "abort", 2: "invalid", 3: "invalid", 4: "slow"}.get(
        number % 20, ("stream", "whole")[number % 2]
    )


async def call(port: int, number: int, rng: random.Random) -> str:
    """One call; what became of it, `ok` when it was as it should be."""
    kind = kind_of(number)
    body = rng.choice(INVALID) if kind == "invalid" else json.dumps({**HI, "stream": kind != "whole"}).encode()
    reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=4096 if kind == "slow" else 1 << 16)
    head = f"POST {CHAT} HTTP/1.1\r\nhost: x\r\nconnection: close\r\ncontent-length: {len(body)}\r\n\r\n".encode()
    try:
        writer.write(head + body[: rng.randrange(len(body))] if kind == "abort" and rng.random() < 0.2 else head + body)
        if kind == "abort":
            await asyncio.sleep(rng.random() * 0.1)
            if rng.random() < 0.5:
                with contextlib.suppress(TimeoutError):  # nothing comes for half a body
                    await asyncio.wait_for(reader.read(100), 0.5)
            return "abort ok"
        data = b""
        while part := await asyncio.wait_for(reader.read(512 if kind == "slow" else 1 << 16), 60):
            data += part
            if kind == "slow":
                await asyncio.sleep(0.02)
    finally:
        writer.transport.abort()
    return f"{kind} {verdict(kind, data)}"


def verdict(kind: str, data: bytes) -> str:
    """`ok`, or what is wrong with an answer."""
    status = data.split(b" ", 2)[1:2]
    if kind == "invalid":
        return "ok" if status == [b"400"] and b'"invalid_request_error"' in data else f"{status} {data[-200:]!r}"
    if status != [b"200"]:
        return f"{status} {data[-200:]!r}"
    complete = b"[DONE]" in data if kind != "whole" else b'"finish_reason":"length"' in data
    return "ok" if complete and data.count(b'"completion_tokens":%d' % TOKENS) == 1 else f"cut: {data[-200:]!r}"


@dataclass(frozen=True)
class Process:
    """One look at the server."""

    resident_mb: float
    files: int
    gauges: dict[str, float]
    metrics: str


def look(pid: int, port: int) -> Process:
    """Memory, files and gauges now."""
    resident = int(re.search(r"VmRSS:\s+(\d+)", Path(f"/proc/{pid}/status").read_text()).group(1)) / 1024
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics") as answer:
        metrics = answer.read().decode()
    gauges = {name: float(re.search(rf"^dsuf_{name}{{.*}} (\S+)$", metrics, re.M).group(1)) for name in GAUGES}
    return Process(resident, len(list(Path(f"/proc/{pid}/fd").iterdir())), gauges, metrics)


def settled(pid: int, port: int) -> Process:
    """The same once nothing runs; the last look if that does not come."""
    deadline = time.monotonic() + 10
    while any(look(pid, port).gauges.values()) and time.monotonic() < deadline:
        time.sleep(0.05)
    time.sleep(0.3)
    return look(pid, port)


async def calls(port: int, first: int, count: int, at_once: int) -> Counter[str]:
    """`count` calls, `at_once` at a time; how often each outcome came."""
    outcomes: Counter[str] = Counter()
    numbers = iter(range(first, first + count))

    async def worker() -> None:
        for number in numbers:
            try:
                outcomes[await call(port, number, random.Random(number))] += 1
            except (OSError, TimeoutError) as error:
                outcomes[f"{kind_of(number)} {error!r}"] += 1

    await asyncio.gather(*(worker() for _ in range(at_once)))
    return outcomes


def soak(requests: int, at_once: int, rate: float = 200.0) -> tuple[Counter[str], list[Process], list[dict]]:
    """(outcomes, looks at the server: after a quarter as warm-up, then after each further one; log lines)."""
    with server("dsuf", rate) as running:
        outcomes, looks = Counter(), []
        for part in range(4):
            outcomes += asyncio.run(calls(running.port, part * requests // 4, requests // 4, at_once))
            looks.append(settled(running.pid, running.port))
        return outcomes, looks, [json.loads(line) for line in running.log.read_text().splitlines()]


def main() -> None:
    requests = int(sys.argv[1]) if len(sys.argv) > 1 else 10_000
    at_once = int(sys.argv[2]) if len(sys.argv) > 2 else 64
    begin = time.monotonic()
    outcomes, looks, log = soak(requests, at_once)
    for outcome, count in sorted(outcomes.items()):
        print(f"{count:7} {outcome}")
    print("resident MB", [round(one.resident_mb, 1) for one in looks], "files", [one.files for one in looks])
    print("gauges", looks[-1].gauges, "log", Counter(line["event"] for line in log))
    print("status", Counter(line["http_status"] for line in log if line["event"] == "request_end"))
    print(f"{time.monotonic() - begin:.0f} s")


if __name__ == "__main__":
    main()
