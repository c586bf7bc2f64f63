"""`dsuf drain`: tell a server of this user to let its streams end and then to stop; ends when it has stopped."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from dsuf.cli.live import say
from dsuf.config import read_environment
from dsuf.errors import EnvironmentProblem, UsageError

if TYPE_CHECKING:
    from dsuf import wire
    from dsuf.server.admin import State


def drain(
    port: Annotated[int | None, typer.Option("--port", help="Of the server. Needed when several run.")] = None,
    now: Annotated[bool, typer.Option("--now", help="Break off running streams instead of waiting for them.")] = False,
) -> None:
    """Let a server's streams end, then stop it.

    New calls are refused meanwhile.
    """
    from dsuf.server.admin import Order

    state, connection = _choose(port)
    connection.send(Order("stop" if now else "drain"))
    waited_for = None
    while (told := connection.receive()) is not None:
        if told.open_requests != waited_for:
            waited_for = told.open_requests
            say(f"{told.address}: {told.state}, open requests: {waited_for}")
    print(f"the server on {state.address} has stopped", flush=True)


def _choose(port: int | None) -> tuple[State, wire.Connection]:
    """The one running server, or that on `port`. Raises EnvironmentProblem for none, UsageError for several."""
    found = [server for path in _sockets() if (server := _ask(path)) is not None]
    if port is not None:
        found = [server for server in found if server[0].address.rpartition(":")[2] == str(port)]
    if not found:
        where = f" on port {port}" if port is not None else ""
        raise EnvironmentProblem(f"No server of this user runs{where}. Start one with `dsuf serve`.")
    if len(found) > 1:
        addresses = ", ".join(state.address for state, _ in found)
        raise UsageError(f"Several servers run: {addresses}. Name one with --port.")
    return found[0]


def _sockets() -> list[Path]:
    from dsuf.server.admin import SOCKET_NAME

    return sorted(read_environment().runtime_dir.glob(f"serve-*/{SOCKET_NAME}"))


def _ask(path: Path) -> tuple[State, wire.Connection] | None:
    """State of the server behind a socket; None when nobody is there any more."""
    from dsuf import wire
    from dsuf.server.admin import Order, State

    try:
        connection = wire.connect(path, State, timeout_s=0)
        connection.send(Order("state"))
        state = connection.receive()
    except (wire.WireError, OSError):
        return None
    return None if state is None else (state, connection)
