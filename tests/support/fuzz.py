"""`python -m tests.support.fuzz [SECONDS [SEED]]`: the long run of tests/server/test_fuzz.py's bodies.

Prints how often each path gave each status, what was not as it should be, and memory and gauges at the end.
"""

from __future__ import annotations

import json
import random
import re
import sys
import time
import zlib
from collections import Counter
from pathlib import Path

import httpx

from dsuf.engine.messages import Request
from tests.support.bodies import ANSWERS, PATHS, check, draw
from tests.support.peer import Script
from tests.support.serving import Server, encode, in_steps, running_server, wait_until


def answered(request: Request) -> Script:
    """An answer that depends on the prompt alone, in steps of 1 to 7 tokens."""
    chance = random.Random(zlib.crc32(repr(request.prompt_ids).encode()))
    reason = "stop" if chance.random() < 0.8 else "length"
    return Script(in_steps(encode(chance.choice(ANSWERS)), chance.randint(1, 7)), reason=reason)


def send(server: Server, client: httpx.Client, path: str, seed: int, spoiled: float) -> int:
    """One body; the status. Raises AssertionError for an answer that is not as it should be."""
    body = draw(random.Random(seed), path, spoiled)
    try:
        answer = client.post(server.url + path, content=json.dumps(body).encode(), timeout=20)
        check(path, body, answer)
    except Exception as error:
        raise AssertionError(f"seed {seed}: {json.dumps(body)}\n{type(error).__name__}: {error}") from error
    return answer.status_code


def resident_mb() -> int:
    """Memory of this process: server, scripted engine and client."""
    return int(re.search(r"VmRSS:\s+(\d+)", Path("/proc/self/status").read_text()).group(1)) // 1024


def main() -> None:
    seconds = float(sys.argv[1]) if len(sys.argv) > 1 else 300.0
    seed = int(sys.argv[2]) if len(sys.argv) > 2 else 0
    statuses: dict[str, Counter[int]] = {path: Counter() for path in PATHS}
    wrong: Counter[str] = Counter()
    memory: list[int] = []
    with running_server(answered) as server, httpx.Client() as client:
        begin = last = time.monotonic()
        while time.monotonic() - begin < seconds:
            for path in PATHS:
                seed += 1
                try:
                    statuses[path][send(server, client, path, seed, spoiled=0.5)] += 1
                except AssertionError as error:
                    wrong[path] += 1
                    print(error, file=sys.stderr)
            if time.monotonic() - last > seconds / 10:
                last = time.monotonic()
                memory.append(resident_mb())
            server.forget()
        wait_until(lambda: server.service.admission.open == 0)
        assert not server.peer.running and not server.service.link.calls
    print(json.dumps({"statuses": statuses, "wrong": wrong, "resident_mb": memory, "last_seed": seed}))


if __name__ == "__main__":
    main()
