"""`python -m tests.support.fuzz [SECONDS [SEED]]`: the long run of what tests/server/test_fuzz.py sends.

Three kinds of bodies by turns: as clients send them, half of them spoiled (`bodies`); wild ones (`wild`); and drawn
from the server's own description; and bytes that are nearly HTTP (`raw_http`). Prints how often each path gave each
status, what was not as it should be, and memory and gauges at the end; exit status 1 when anything was not. Without a
seed every run draws others.
"""

from __future__ import annotations

import json
import random
import re
import secrets
import sys
import time
import zlib
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import seed as seeded
from schemathesis import GenerationMode
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_schema_conformance,
    status_code_conformance,
)

from dsuf.engine.messages import Request
from dsuf.server.openapi import description
from tests.support.bodies import ANSWERS, PATHS, check, draw
from tests.support.peer import Script
from tests.support.raw_http import send_raw
from tests.support.serving import Server, encode, in_steps, running_server, wait_until
from tests.support.wild import headers, wild

CHECKS = [not_a_server_error, status_code_conformance, content_type_conformance, response_schema_conformance]
POSITIVE, NEGATIVE = GenerationMode.POSITIVE, GenerationMode.NEGATIVE
Operation = tuple[str, str, GenerationMode]
OPERATIONS: list[Operation] = [
    (path, method, mode)
    for path, item in description()["paths"].items()
    for method, operation in item.items()
    for mode in (POSITIVE, NEGATIVE)
    if mode is POSITIVE or "requestBody" in operation
]
_SHOWN = 20_000  # characters of a body in a report


def answered(request: Request) -> Script:
    """An answer that depends on the prompt alone, in steps of 1 to 7 tokens."""
    chance = random.Random(zlib.crc32(repr(request.prompt_ids).encode()))
    reason = "stop" if chance.random() < 0.8 else "length"
    return Script(in_steps(encode(chance.choice(ANSWERS)), chance.randint(1, 7)), reason=reason)


def send(server: Server, client: httpx.Client, path: str, seed: int, spoiled: float) -> int:
    """One body; the status. Raises AssertionError for an answer that is not as it should be."""
    body = draw(random.Random(seed), path, spoiled)
    return _post(server, client, path, json.dumps(body).encode(), seed, {}, body)


def send_wild(server: Server, client: httpx.Client, path: str, seed: int) -> int:
    """`send` of a body that no client would send."""
    rng = random.Random(seed)
    return _post(server, client, path, wild(rng, path), seed, headers(rng), None)


def send_described(server: Server, operation: Operation, examples: int, seed: int) -> None:
    """Calls drawn from the description. Raises AssertionError for an answer that the description does not allow."""
    path, method, mode = operation
    described = schemathesis.openapi.from_dict(description())[path][method]

    @seeded(seed)
    @settings(
        max_examples=examples,
        deadline=None,
        database=None,
        phases=[Phase.generate, Phase.shrink],
        suppress_health_check=list(HealthCheck),
    )
    @given(described.as_strategy(generation_mode=mode))
    def all_answered(case: Any) -> None:
        if mode is POSITIVE and isinstance(case.body, dict) and "model" in case.body:
            case.body["model"] = "deepseek-chat"  # else nearly all of them end at the name
        try:
            case.validate_response(case.call(base_url=server.url, timeout=20), checks=CHECKS)
        except Exception as error:
            raise AssertionError(_report(f"{method} {path}", repr(case.body), error)) from None

    all_answered()


def _post(
    server: Server,
    client: httpx.Client,
    path: str,
    raw: bytes,
    seed: int,
    headers: dict[str, str],
    body: dict[str, Any] | None,
) -> int:
    try:
        answer = client.post(server.url + path, content=raw, headers=headers, timeout=20)
        check(path, body, answer)
    except Exception as error:
        raise AssertionError(_report(f"{path} seed {seed} {headers or ''}", repr(raw), error)) from None
    return answer.status_code


def _report(what: str, body: str, error: Exception) -> str:
    cut = f" ... and {len(body) - _SHOWN} characters more" if len(body) > _SHOWN else ""
    return f"{what}: {body[:_SHOWN]}{cut}\n{type(error).__name__}: {error}"


def resident_mb() -> int:
    """Memory of this process: server, scripted engine and client."""
    return int(re.search(r"VmRSS:\s+(\d+)", Path("/proc/self/status").read_text()).group(1)) // 1024


class _Run:
    """What a long run has seen."""

    def __init__(self, server: Server, client: httpx.Client) -> None:
        self.statuses: dict[str, Counter[str]] = {}
        self.wrong: Counter[str] = Counter()
        self._server, self._client = server, client

    def round(self, seed: int) -> None:
        """A body of each kind on every path."""
        for path in PATHS:
            self._one(path, send, path, seed, spoiled=0.5)
            self._one(f"{path} wild", send_wild, path, seed)
        self._one("nearly HTTP", lambda server, client: send_raw(server.port, seed))

    def described(self, seed: int) -> None:
        """Some calls from the description."""
        operation = random.Random(seed).choice(OPERATIONS)
        self._one(f"{operation[1]} {operation[0]}", _send_some, operation, seed)

    def _one(self, name: str, call: Callable[..., int | str], *arguments: Any, **options: Any) -> None:
        try:
            status = call(self._server, self._client, *arguments, **options)
            assert not self._server.log("fault"), (name, arguments, self._server.log("fault"))
            self.statuses.setdefault(name, Counter())[str(status)] += 1
        except AssertionError as error:
            self.wrong[name] += 1
            print(error, file=sys.stderr, flush=True)
        self._server.forget()


def _send_some(server: Server, client: httpx.Client, operation: Operation, seed: int) -> str:
    send_described(server, operation, 25, seed)
    return "25 as described"


def main() -> int:
    seconds = float(sys.argv[1]) if len(sys.argv) > 1 else 300.0
    first = seed = int(sys.argv[2]) if len(sys.argv) > 2 else secrets.randbits(32)
    memory: list[int] = []
    with running_server(answered) as server, httpx.Client() as client:
        run, begin = _Run(server, client), time.monotonic()
        while (spent := time.monotonic() - begin) < seconds:
            seed += 1
            run.round(seed)
            if seed % 25 == 0:
                run.described(seed)
            if spent > seconds / 10 * len(memory):
                memory.append(resident_mb())
        wait_until(lambda: server.service.admission.open == 0)
        assert not server.peer.running and not server.service.link.calls
    print(json.dumps({"statuses": run.statuses, "wrong": run.wrong, "resident_mb": memory, "seeds": [first, seed]}))
    return int(bool(run.wrong))


if __name__ == "__main__":
    sys.exit(main())
