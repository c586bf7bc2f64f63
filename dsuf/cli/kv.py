"""The cache tier on the command line: its flags, and the agent process of one server, started again when it dies."""

from __future__ import annotations

import asyncio
import multiprocessing.process
import re
import signal
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from dsuf import wire
from dsuf.cli.child import own_process, start_deaf
from dsuf.cli.live import say
from dsuf.cli.machine import memory_bytes
from dsuf.config import Environment
from dsuf.errors import ConfigError, DsufError, EnvironmentProblem

if TYPE_CHECKING:
    from dsuf.engine.options import EngineOptions
    from dsuf.kv.agent import AgentOptions

HostBytes = Annotated[
    str | None,
    typer.Option(
        "--kv-host-bytes",
        help="Host memory for caches of earlier calls, such as 64g; 0 for none. Default: a quarter of what is free.",
        metavar="BYTES",
    ),
]
Listen = Annotated[
    str | None,
    typer.Option(
        "--kv-listen",
        help="Address that servers on other machines reach, and port: they can then take over conversations.",
        metavar="ADDRESS:PORT",
    ),
]
KeyFile = Annotated[
    Path | None,
    typer.Option(
        "--kv-key-file",
        help="Secret of all servers that share caches. Default: DSUF_KV_KEY_FILE, else this user's own.",
    ),
]
RequireRdma = Annotated[
    bool, typer.Option("--kv-require-rdma", help="Refuse to start when caches cannot be read by RDMA.")
]
Transport = Annotated[
    str, typer.Option("--kv-transport", help="How caches are read from others: auto, or some of shm,rdma,tcp.")
]
RdmaPorts = Annotated[
    str | None,
    typer.Option("--kv-rdma-ports", help="RDMA ports to use, such as mlx5_0:1,mlx5_1. Default: all.", metavar="PORTS"),
]

MOST_BY_DEFAULT = 64 << 30
FIRST_WAIT_S, LONGEST_WAIT_S = 1.0, 16.0
STOP_WITHIN_S = 5.0
ASK_EVERY_S, ASKED_IN_VAIN = 5.0, 6  # an agent that has answered before and leaves so many questions unanswered hangs
_LOOK_EVERY_S = 0.05
_PATHS = ("shm", "rdma", "tcp")
_UNITS = {"": 1, "k": 1 << 10, "m": 1 << 20, "g": 1 << 30, "t": 1 << 40}


@dataclass(frozen=True)
class KvFlags:
    """The flags as given."""

    host_bytes: str | None = None
    listen: str | None = None
    key_file: Path | None = None
    require_rdma: bool = False
    transport: str = "auto"
    rdma_ports: str | None = None


def parse_bytes(flag: str, text: str) -> int:
    """`64g` as bytes (k, m, g and t are powers of 1,024). Raises ConfigError for anything else."""
    found = re.fullmatch(r"(\d+)\s*([kmgt]?)i?b?", text.strip().lower())
    if found is None:
        raise ConfigError(f"{flag} is {text!r}; expected bytes such as 64g or 500m, or 0.")
    return int(found[1]) * _UNITS[found[2]]


def parse_paths(text: str) -> tuple[str, ...]:
    """--kv-transport as paths in the order in which they are tried."""
    if text == "auto":
        return _PATHS
    given = tuple(part.strip() for part in text.split(","))
    if not given or not set(given) <= set(_PATHS) or len(set(given)) < len(given):
        raise ConfigError(f"--kv-transport is {text!r}; expected auto, or some of {', '.join(_PATHS)}.")
    return given


def agent_options(flags: KvFlags, engine: EngineOptions, folder: Path, environment: Environment) -> AgentOptions | None:
    """Options of the agent for one server; None where caches are not kept. Raises ConfigError, CheckpointError."""
    from dsuf.engine.engine import backend_of
    from dsuf.kv.agent import AgentOptions
    from dsuf.kv.names import namespace
    from dsuf.layout import PageLayout, SnapshotLayout
    from dsuf.model.checkpoint import Checkpoint
    from dsuf.model.fingerprint import fingerprint
    from dsuf.ops.numerics import NUMERICS

    host_bytes = _default_bytes() if flags.host_bytes is None else parse_bytes("--kv-host-bytes", flags.host_bytes)
    paths = parse_paths(flags.transport)
    if host_bytes == 0 or not NUMERICS[engine.numerics].quantise:
        return None
    with Checkpoint.open(engine.ckpt) as checkpoint:
        page_bytes = PageLayout.of(checkpoint.spec).page_bytes
        snapshot_bytes = SnapshotLayout.of(checkpoint.spec).snapshot_bytes
        name = namespace(
            checkpoint=fingerprint(checkpoint),
            # Several GPUs add up parts that are rounded, so that their bytes are not those of one.
            backend=backend_of(engine) if len(engine.gpus) < 2 else f"{backend_of(engine)}/{len(engine.gpus)}",
            numerics=engine.numerics,
            # In truncated mode the points inside a prompt change what is computed, so they are part of it.
            prefill=engine.prefill if engine.prefill == "exact" else f"truncated/{engine.resume_every}",
            page_bytes=page_bytes,
            snapshot_bytes=snapshot_bytes,
        )
    return AgentOptions(
        host_bytes=host_bytes,
        slot_bytes=page_bytes,
        snapshot_bytes=snapshot_bytes,
        namespace=name,
        runtime_dir=environment.runtime_dir,
        socket_path=folder / "kv.sock",
        backend=backend_of(engine),
        key_file=flags.key_file or environment.kv_key_file,
        redis_url=environment.redis_url,
        listen=flags.listen or "127.0.0.1:0",
        paths=paths,
        require_rdma=flags.require_rdma,
        rdma_ports=tuple(port.strip() for port in flags.rdma_ports.split(",")) if flags.rdma_ports else None,
        resume_tokens=engine.resume_every,
    )


class AgentProcess:
    """Runs `serve_agent`; a server whose agent dies goes on and computes what it would have found."""

    def __init__(self, options: AgentOptions) -> None:
        self.options = options
        self.failure: DsufError | None = None  # it could not start at all
        self._process: multiprocessing.process.BaseProcess | None = None

    def start(self) -> None:
        """Start it; clients connect when it listens."""
        from dsuf.kv.process import serve_agent

        process = own_process("dsuf-kv-agent", serve_agent, self.options)
        self._process = process  # before it is there: an interrupt on the way leaves one that `stop` can end
        start_deaf(process)  # it goes on until the server has drained

    async def watch(self, draining: Callable[[], bool]) -> None:
        """Start it anew whenever it dies, unless the server is `draining`; ends the server when it never came up."""
        wait_s, was_up = FIRST_WAIT_S, False
        while True:
            was_up = await self._ended(was_up)
            status = self._process.exitcode
            if draining():
                return
            if not was_up:
                kind = ConfigError if status == ConfigError.exit_code else EnvironmentProblem
                self.failure = kind(
                    "The kv agent could not start; its message is above. --kv-host-bytes 0 does without."
                )
                signal.raise_signal(signal.SIGTERM)
                return
            say(f"the kv agent ended with exit status {status}; it is started again in {wait_s:.0f} s")
            await asyncio.sleep(wait_s)
            if draining():
                return
            wait_s = min(2 * wait_s, LONGEST_WAIT_S)
            self.start()

    async def kill_when_silent(self, answers: Callable[[float], Awaitable[bool]]) -> None:
        """Ask now and then; kill an agent that hangs, so that nobody waits for it and `watch` starts another."""
        heard, in_vain = False, 0
        while True:
            await asyncio.sleep(ASK_EVERY_S)
            answered = await answers(ASK_EVERY_S)
            heard, in_vain = heard or answered, 0 if answered else in_vain + 1
            if heard and in_vain >= ASKED_IN_VAIN and self._process.is_alive():
                say(f"the kv agent hung: it left {in_vain} questions unanswered, and was killed")
                self._process.kill()
                heard = False

    def stop(self) -> None:
        """End it: by SIGTERM, else by SIGKILL."""
        if self._process is None or self._process.pid is None:
            return
        for end in (self._process.terminate, self._process.kill):
            end()
            self._process.join(STOP_WITHIN_S)
            if self._process.exitcode is not None:
                return

    async def _ended(self, was_up: bool) -> bool:
        """Wait for its end; whether it, or one before it, listened."""
        ended = asyncio.create_task(wire.readable(self._process.sentinel))
        try:
            while not ended.done():
                was_up = was_up or self.options.socket_path.exists()
                await asyncio.wait({ended}, timeout=None if was_up else _LOOK_EVERY_S)
        finally:
            ended.cancel()
        self._process.join()
        return was_up


def _default_bytes() -> int:
    """A quarter of the memory that is free to this process; with a GPU all of it is taken soon after the start."""
    return min(memory_bytes()[1] // 4, MOST_BY_DEFAULT)
