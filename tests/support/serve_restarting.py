"""`python -m tests.support.serve_restarting FOLDER [DRAIN_TIMEOUT_S [SILENCE_S]] [fast]`: it restarts its engine.

As `dsuf serve` does it, but the engine is a scripted one: 32 tokens of a prompt and one token of an answer take 10 ms,
eight requests run at once. It restarts after half a second and more, with `fast` at once, and only one time.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from pathlib import Path

from dsuf.cli import engine_process
from dsuf.engine.engine import Engine
from dsuf.engine.options import EngineOptions
from dsuf.errors import DsufError
from dsuf.server.app import bind
from dsuf.server.options import ServerOptions
from tests.support.scripted import ScriptedBackend, scripted_engine
from tests.support.serving import encode, v41_text

WORD = encode(" word")[0]


def word(request: object, index: int) -> int:
    """Every answer is the same word again and again."""
    return WORD


def open_scripted(options: EngineOptions, kv_socket: Path | None, progress: Callable[[str, float], None]) -> Engine:
    """The engine process's factory."""
    backend = ScriptedBackend(
        vocab_size=129_280, max_context=100_000, chunk=32, chunk_s=0.01, step_s=0.01, sleep=time.sleep, script=word
    )
    backend.load(progress)
    return scripted_engine(backend, max_sequences=8)


class Process(engine_process.EngineProcess):
    """Starts the scripted engine."""

    def start(self) -> None:
        engine_process._open = open_scripted
        super().start()


def main() -> int:
    folder = Path(sys.argv[1])
    engine_process.FIRST_WAIT_S = 0.5
    if "fast" in sys.argv:
        engine_process.FIRST_WAIT_S = engine_process.LONGEST_WAIT_S = 0.05
        engine_process.RESTARTS = 1
    drain_timeout_s = float(sys.argv[2]) if len(sys.argv) > 2 else 20.0
    server = ServerOptions(drain_delay_s=0, drain_timeout_s=drain_timeout_s, keepalive_s=60)
    silence_s = float(sys.argv[3]) if len(sys.argv) > 3 and sys.argv[3] != "fast" else 0.0
    process = Process(folder / "engine.sock", EngineOptions(ckpt=Path("scripted")), silence_s=silence_s)
    with bind("127.0.0.1", 0) as sock:
        ready = f"ready on http://127.0.0.1:{sock.getsockname()[1]}"
        try:
            return engine_process.serve_with_engine(process, v41_text(context_limit=100_000), server, sock, ready)
        except DsufError as error:
            print(error, file=sys.stderr, flush=True)
            return error.exit_code


if __name__ == "__main__":
    sys.exit(main())
