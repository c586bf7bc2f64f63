"""`dsuf repro tetris --open`: which page is shown, and that the server lives until Ctrl-C."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import webbrowser

import httpx
import pytest

from dsuf.cli.app import run_command
from tests.support.serving import wait_until


@pytest.fixture
def opened(monkeypatch):
    pages = []
    monkeypatch.setattr(webbrowser, "open", lambda page: not pages.append(page))
    return pages


@pytest.mark.parametrize("path", ["", "/", "/v1", "/v1/chat/completions"])
def test_the_page_of_the_given_server_is_shown(opened, capsys, path):
    assert run_command(["repro", "tetris", "--open", "--url", f"http://127.0.0.1:9{path}"]) == 0
    assert opened == ["http://127.0.0.1:9/demo?run"]
    assert capsys.readouterr().out == "http://127.0.0.1:9/demo?run\n"


def test_without_a_browser_the_address_is_told(monkeypatch, capsys):
    monkeypatch.setattr(webbrowser, "open", lambda page: False)
    assert run_command(["repro", "tetris", "--open", "--url", "http://127.0.0.1:9"]) == 0
    out, err = capsys.readouterr()
    assert out == "http://127.0.0.1:9/demo?run\n" and "no browser" in err


def test_its_own_server_lives_until_ctrl_c(tmp_path):
    page = tmp_path / "page"
    script = tmp_path / "browser.sh"
    script.write_text(f'#!/bin/sh\necho "$1" > {page}\n')
    script.chmod(0o700)
    tmp_path.chmod(0o700)
    environ = {**os.environ, "BROWSER": f"{script} %s", "XDG_RUNTIME_DIR": str(tmp_path), "DSUF_CACHE": str(tmp_path)}
    process = subprocess.Popen(
        [sys.executable, "-m", "dsuf.cli.app", "repro", "tetris", "--open", "--ckpt", "noise"],
        stdout=subprocess.PIPE,
        env=environ,
        start_new_session=True,
    )
    try:
        wait_until(lambda: page.exists() and page.read_text().endswith("\n"), 60)
        url = page.read_text().strip()
        assert httpx.get(url).status_code == 200
        process.send_signal(signal.SIGINT)
        out, _ = process.communicate(timeout=30)
        assert process.returncode == 0 and out.decode().strip() == url
        with pytest.raises(httpx.ConnectError):
            httpx.get(url)
    finally:
        process.kill()
        process.wait()
