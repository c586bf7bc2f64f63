"""The measured parts of `bench kv`: an engine with an agent in this process, two processes for paths, Redis alone."""

from __future__ import annotations

import asyncio
import functools
import secrets
import tempfile
import time
from pathlib import Path

import numpy as np

from dsuf.cli.bench.gpu_decode import card_of
from dsuf.cli.bench.prefilling import prompt_ids
from dsuf.cli.kv import KvFlags, agent_options
from dsuf.cli.live import progress
from dsuf.cli.session import Session, open_session
from dsuf.config import BenchOptions, read_environment
from dsuf.engine.kv_tier import connect_tier
from dsuf.engine.messages import Finished, Request, Sampling
from dsuf.engine.options import EngineOptions
from dsuf.errors import EngineGone, PromptError
from dsuf.kv.client import EngineClient
from dsuf.kv.directory import Announcement, Directory, Server
from dsuf.kv.embedded import Embedded
from dsuf.kv.measure import measure_paths
from dsuf.kv.process import AgentThread

PAGE_BYTES = 113_920  # of the released model; what moves is whole pages
LOOK_UPS, CANDIDATES = 200, 300
STATUS_S = 10.0


def restored_and_computed(
    ckpt: str, engine: EngineOptions, lengths: tuple[int, ...], bench: BenchOptions
) -> tuple[list[dict[str, float]], dict[str, str | int], str, dict[str, str | int] | None]:
    """(samples, model, backend, gpu). One sample a repeat: for each length the first token without and with a saved
    prefix, and how much was saved.

    Raises PromptError for a length that the checkpoint's context does not hold.
    """
    samples = []
    with tempfile.TemporaryDirectory(prefix="dsuf-bench-") as name:
        folder = Path(name)
        environment = read_environment({"XDG_RUNTIME_DIR": name})
        environment.runtime_dir.mkdir(mode=0o700)
        kept = agent_options(KvFlags(host_bytes="1g"), engine, folder, environment)
        agent = AgentThread(kept)
        agent.start()
        try:
            client = EngineClient(kept.socket_path)
            client.connect()
            session = open_session(ckpt, engine, tier=functools.partial(connect_tier, kept.socket_path))
            longest = session.engine.limits.max_context - 1
            if max(lengths) > longest:
                raise PromptError(f"--tokens has {max(lengths):,}; this checkpoint takes up to {longest:,} tokens.")
            with progress("bench kv", "prompts") as update:
                turns = bench.warmup + bench.repeat
                for turn in range(turns):
                    sample = {}
                    for place, length in enumerate(lengths):
                        number = turn * len(lengths) + place + 1
                        sample |= _miss_and_hit(session, client, length, number, bench.seed)
                        update(number, turns * len(lengths))
                    if turn >= bench.warmup:
                        samples.append(sample)
            client.close()
        finally:
            agent.stop()
    return samples, session.model(), session.engine.limits.backend, card_of(session.engine)


def _miss_and_hit(session: Session, client: EngineClient, length: int, number: int, seed: int) -> dict[str, float]:
    """The same prompt twice; each `number` has one that begins in another way, so that none finds a part of another."""
    ids, _ = prompt_ids(session, length)
    ids = [*ids[number:], *ids[:number]]
    times = {}
    for kind in ("miss", "hit"):
        request = Request(f"{kind} {number}", ids, 1, Sampling(temperature=0.0, seed=seed))
        events = list(session.engine.generate(request))  # to the end of its copies
        (finished,) = (event for event in events if isinstance(event, Finished))
        if finished.reason == "error" or (finished.stats.cached_tokens > 0) != (kind == "hit"):
            raise EngineGone(f"the {kind} of {length} tokens was none: {finished.message or finished.stats}")
        while client.status().result(STATUS_S).numbers["writing"]:  # what was copied is found once it is digested
            time.sleep(0.001)
        times[f"{kind}_{length}_s"] = finished.stats.ttft_s
        times[f"cached_{length}"] = finished.stats.cached_tokens
    return {**times, f"hit_over_miss_{length}": times[f"hit_{length}_s"] / times[f"miss_{length}_s"]}


def path_rates(nbytes: int) -> dict[str, float]:
    """Rates of the paths and of what they are held against."""
    rates = measure_paths(nbytes, PAGE_BYTES)
    figures = {f"{name}_gb_per_s": rate / 1e9 for name, rate in rates.items()}
    shares = {
        "tcp_over_raw_socket": rates["tcp"] / rates["raw_socket"],
        "shm_over_memcpy": rates["shm"] / rates["memcpy"],
    }
    return {**figures, **shares}


def look_ups() -> dict[str, float]:
    """Round trips to a Redis of our own: a hit, many candidates of which none is there, an announcement."""
    with tempfile.TemporaryDirectory(prefix="dsuf-bench-") as name:
        return asyncio.run(_look_ups(Path(name)))


async def _look_ups(folder: Path) -> dict[str, float]:
    server = Embedded(folder)
    await server.open()
    ns = secrets.token_bytes(32)
    owner, reader = (Directory(server.url, ns, Server(name, name, "127.0.0.1:1", name)) for name in ("owner", "reader"))
    for directory in (owner, reader):
        await directory.open()
    keys = [secrets.token_bytes(20) for _ in range(CANDIDATES)]
    own = Announcement(1, (secrets.token_bytes(20),), 1, 1)
    await owner.announce(own).wait()
    times: dict[str, list[float]] = {"find_hit_us": [], "find_300_misses_us": [], "announce_us": []}
    for number in range(LOOK_UPS):
        for what, work in (
            ("find_hit_us", lambda: reader.find(own.keys)),
            ("find_300_misses_us", lambda: reader.find(keys)),
            ("announce_us", functools.partial(_announced, owner, Announcement(number, own.keys, 1, 1))),
        ):
            begin = time.perf_counter()
            await work()
            times[what].append((time.perf_counter() - begin) * 1e6)
    for directory in (owner, reader):
        await directory.close()
    await server.close()
    return {what: float(np.median(values)) for what, values in times.items()}


async def _announced(directory: Directory, said: Announcement) -> None:
    await directory.announce(said).wait()
