"""`python -m tests.support.serve_scripted FOLDER [DRAIN_DELAY_S]`: a server process over an endless scripted engine.

Prints its port, then one line when it is ready; ends with the exit code of the server.
"""

from __future__ import annotations

import sys
from pathlib import Path

from dsuf.server.admin import SOCKET_NAME
from dsuf.server.app import bind, build_app, run
from dsuf.server.link import EngineLink
from dsuf.server.options import ServerOptions
from tests.support.peer import Peer, Script
from tests.support.serving import encode, in_steps, v41_text


def main() -> int:
    path = Path(sys.argv[1]) / "engine.sock"
    options = ServerOptions(drain_delay_s=float(sys.argv[2]), drain_timeout_s=float(sys.argv[3]))
    sock = bind("127.0.0.1", 0)
    print(sock.getsockname()[1], flush=True)
    Peer(path, lambda request: Script(in_steps(encode("word " * 200), 1), reason="length", step_s=0.01))
    app = build_app(EngineLink(path), v41_text(), options)
    return run(app, sock, lambda: print("ready", flush=True), path.with_name(SOCKET_NAME))


if __name__ == "__main__":
    sys.exit(main())
