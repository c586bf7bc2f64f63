"""`dsuf repro tetris --open`: the server's page in the user's browser, which sends the request by itself."""

from __future__ import annotations

import contextlib
import threading
import urllib.parse
import webbrowser

from dsuf.cli.client import chat_url
from dsuf.cli.live import say
from dsuf.cli.own_server import own_server
from dsuf.errors import ConfigError

SHOWN = "tetris"  # the recipe whose prompt the page has


def show_in_browser(name: str, url: str | None, serve_flags: list[str]) -> None:
    """Open the page of the server at `url` and return, or of one's own and wait for Ctrl-C.

    Raises ConfigError for another recipe, and what `own_server` raises.
    """
    if name != SHOWN:
        raise ConfigError(f"--open is for {SHOWN}, whose request the page sends; found {name}. Leave it out.")
    if url:
        _open(chat_url(url))
        return
    with own_server(serve_flags) as address:
        _open(address)
        say("Ctrl-C stops the server.")
        with contextlib.suppress(KeyboardInterrupt):
            threading.Event().wait()


def _open(address: str) -> None:
    page = urllib.parse.urlunsplit(urllib.parse.urlsplit(address)._replace(path="/demo", query="run", fragment=""))
    print(page, flush=True)
    if not webbrowser.open(page):
        say("There is no browser here that could be started; open the address above in one.")
