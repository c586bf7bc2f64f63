"""/demo in headless Chromium: needs `apt-get install chromium fonts-noto-color-emoji`."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import socket
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from dsuf.server.demo.page import POLICY
from dsuf.server.options import ServerOptions
from tests.support.browser import Browser
from tests.support.peer import Script
from tests.support.serving import encode, in_steps, running_server, says, v41_text, wait_until
from tests.support.tetris import Game, moved

pytestmark = pytest.mark.system

ROOT = Path(__file__).parents[2]
TETRIS = (ROOT / "recipes" / "toy" / "corpus" / "tetris.html").read_text(encoding="utf-8")
STEP_S, A_STEP = 0.004, 6
READ_PARENT = "(() => { try { return parent.document.title } catch (error) { return error.name } })()"
FETCH = "fetch({}).then(() => 'reached', (error) => error.name)"


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with Browser(width=1280, height=860) as opened:
        yield opened


def text(browser: Browser, name: str) -> str:
    return browser.evaluate(f"document.getElementById('{name}').textContent")


def ask(browser: Browser, url: str, prompt: str) -> None:
    browser.visit(f"{url}/demo")
    browser.evaluate(f"document.getElementById('prompt').value = {prompt!r}")
    browser.evaluate("document.getElementById('ask').requestSubmit()")


def has_ended(browser: Browser) -> bool:
    return browser.evaluate("document.getElementById('stop').disabled")


def said_to(listener: socket.socket) -> bytes:
    """What clients send within a while."""
    said = b""
    with contextlib.suppress(TimeoutError):
        while True:
            connection, _ = listener.accept()
            connection.settimeout(0.5)
            with connection, contextlib.suppress(TimeoutError):
                said += connection.recv(1000)
    return said


def test_the_page_is_one_file_under_a_closed_policy_and_needs_no_key() -> None:
    with running_server(says("x"), options=ServerOptions(api_keys=("right",), drain_delay_s=0)) as server:
        answer = httpx.get(server.url + "/demo")
    assert answer.status_code == 200 and answer.headers["content-security-policy"] == POLICY
    assert not re.search(r"https?://|@import|\bsrc=", answer.text)
    assert not re.search(r"localStorage|sessionStorage|indexedDB|document\.cookie|innerHTML", answer.text)
    recipe = tomllib.loads((ROOT / "recipes" / "tetris.toml").read_text(encoding="utf-8"))
    asked = recipe["args"]["request"]
    assert f">{asked['messages'][0]['content']}</textarea>" in answer.text
    assert asked["model"] in answer.text and asked["thinking"] == {"type": "disabled"}


def test_it_streams_measures_and_plays_tetris(browser: Browser, tmp_path: Path) -> None:
    ids = encode(TETRIS)
    script = Script([ids[:1], *in_steps(ids[1:], A_STEP)], step_s=STEP_S, prefill_s=0.2)
    with running_server(lambda request: script, v41_text(context_limit=20_000)) as server:
        browser.visit(f"{server.url}/demo?run")
        browser.wait(lambda: int(text(browser, "tokens").replace(",", "")) > len(ids) // 3)
        browser.screenshot(tmp_path / "streaming.png")
        assert not has_ended(browser) and float(text(browser, "rate").replace(",", "")) > 0
        assert TETRIS.startswith(text(browser, "answer"))
        assert browser.evaluate("document.getElementById('stage').offsetHeight") == 0
        browser.wait(lambda: has_ended(browser), 60)
        assert text(browser, "answer") == TETRIS
        status = re.fullmatch(
            r"(\d+) tokens at ([\d,]+) tokens/s \(first token after (.+) s\)", text(browser, "status")
        )
        assert status and int(status[1]) == len(ids) and float(status[3]) >= 0.2
        step_ms = float(text(browser, "step").removesuffix(" ms"))
        assert STEP_S * 1000 <= step_ms < 20 * STEP_S * 1000
        accepted = float(text(browser, "accepted"))
        assert abs(accepted - (len(ids) - 1) / len(script.steps)) < 0.01  # decode steps: all but the first, and the EOS
        rate = float(text(browser, "rate").replace(",", ""))
        assert rate == pytest.approx(1000 / step_ms * accepted, rel=0.02)
        asked = server.peer.requests[0]
        assert (asked.sampling.temperature, asked.prompt_ids[-1]) == (1.0, v41_text().vocabulary.think_end_id)

        browser.enter_frame()
        game = Game(browser)
        browser.wait(lambda: browser.evaluate("document.body.dataset.state") == "playing")
        start = game.look()[1]
        game.press("ArrowRight")  # the frame has the focus already
        browser.wait(lambda: game.look()[1] != start)
        assert game.look()[1] in [moved(start, 1, down) for down in range(3)]
        browser.screenshot(tmp_path / "playing.png")
        assert browser.errors == []

        for address in (f"'{server.url}/v1/models'", "'/v1/models'", f"'{server.url}/v1/chat/completions'"):
            assert browser.evaluate(FETCH.format(address)) == "TypeError"
        assert browser.evaluate(READ_PARENT) == "SecurityError"
        assert browser.evaluate("origin") == "null"
        with socket.create_server(("127.0.0.1", 0)) as elsewhere:
            elsewhere.settimeout(0.5)
            for leak in ("new Image().src =", "navigator.sendBeacon", "top.location.href =", "location.href ="):
                address = f"'http://127.0.0.1:{elsewhere.getsockname()[1]}/leak'"
                browser.evaluate(f"(() => {{ try {{ {leak} ({address}) }} catch {{}} }})()")
            assert said_to(elsewhere) == b""  # Chromium may open a connection ahead of its own checks, and says nothing
        browser.leave_frame()
        assert browser.evaluate("location.pathname") == "/demo"
        assert len(server.peer.requests) == 1


def test_any_prompt_is_answered_as_text_that_is_never_markup(browser: Browser) -> None:
    answer = "so</think>Not <b>bold</b> <script>document.title = 'owned'</script> 👋"
    with running_server(says(answer)) as server:
        browser.visit(f"{server.url}/demo")
        browser.evaluate("document.getElementById('thinking').checked = true")
        browser.evaluate("document.getElementById('ask').requestSubmit()")
        browser.wait(lambda: has_ended(browser))
        assert text(browser, "answer") == answer.replace("</think>", "")
        assert browser.evaluate("document.querySelectorAll('#answer b, #answer script, iframe').length") == 0
        assert browser.evaluate("document.querySelector('#answer .thought').textContent") == "so"
        assert browser.evaluate("document.title") == "dsuf demo"
        assert browser.errors == []


def test_a_fenced_page_runs_and_a_cut_one_does_not(browser: Browser) -> None:
    page = "<!DOCTYPE html>\n<title>x</title><script>document.title = 'ran'</script>"
    answers = iter([f"Here you are:\n```html\n{page}\n```\nEnjoy.", page])
    scripts = iter(["stop", "length"])

    def script(request):
        return Script(in_steps(encode(next(answers))), reason=next(scripts))

    with running_server(script) as server:
        ask(browser, server.url, "a page, please")
        browser.wait(lambda: has_ended(browser))
        browser.enter_frame()
        browser.wait(lambda: browser.evaluate("document.title") == "ran")
        ask(browser, server.url, "again")
        browser.wait(lambda: has_ended(browser))
        assert "cut at the limit" in text(browser, "status")
        assert browser.evaluate("document.querySelectorAll('iframe').length") == 0


def test_stop_ends_the_request(browser: Browser) -> None:
    script = Script(in_steps(encode("word " * 2000), 1), step_s=0.01)
    with running_server(lambda request: script) as server:
        ask(browser, server.url, "go on")
        browser.wait(lambda: "word" in text(browser, "answer"))
        browser.evaluate("document.getElementById('stop').click()")
        browser.wait(lambda: has_ended(browser))
        assert text(browser, "status") == "Stopped."
        assert server.request_end()["status"] == "cancelled"


def test_a_key_is_asked_for_used_and_forgotten(browser: Browser) -> None:
    with running_server(says("Hello"), options=ServerOptions(api_keys=("s3cret",), drain_delay_s=0)) as server:
        ask(browser, server.url, "hi")
        browser.wait(lambda: has_ended(browser))
        assert "API key" in text(browser, "status") and browser.evaluate("document.activeElement.id") == "key"
        browser.evaluate("document.getElementById('key').value = 's3cret'")
        browser.evaluate("document.getElementById('ask').requestSubmit()")
        browser.wait(lambda: text(browser, "answer") == "Hello")
        assert browser.evaluate("[localStorage.length, sessionStorage.length, document.cookie].join()") == "0,0,"
        assert "s3cret" not in browser.evaluate("location.href")
        browser.visit(f"{server.url}/demo?")
        assert browser.evaluate("document.getElementById('key').value") == ""


def test_errors_are_told(browser: Browser) -> None:
    failing = Script(in_steps(encode("Hello there, world")), reason="error", message="device fault", step_s=0.01)
    with running_server(lambda request: failing) as server:
        ask(browser, server.url, "hi")
        browser.wait(lambda: has_ended(browser))
        assert text(browser, "status") == "device fault"
        assert browser.evaluate("document.getElementById('status').className") == "bad"


def test_repro_opens_it_and_the_built_in_checkpoints_game_plays(browser: Browser, tmp_path: Path) -> None:
    shown, script = tmp_path / "page", tmp_path / "browser.sh"
    script.write_text(f'#!/bin/sh\necho "$1" > {shown}\n')
    script.chmod(0o700)
    tmp_path.chmod(0o700)
    process = subprocess.Popen(
        [sys.executable, "-m", "dsuf.cli.app", "repro", "tetris", "--open", "--ckpt", "toy"],
        env={**os.environ, "BROWSER": f"{script} %s", "XDG_RUNTIME_DIR": str(tmp_path)},
        start_new_session=True,
    )
    try:
        wait_until(lambda: shown.exists() and shown.read_text().endswith("\n"), 60)
        browser.visit(shown.read_text().strip())
        browser.wait(lambda: has_ended(browser), 600)
        browser.screenshot(tmp_path / "toy.png")
        assert text(browser, "answer").rstrip() == TETRIS.rstrip()
        assert float(text(browser, "accepted")) > 1
        browser.enter_frame()
        game = Game(browser)
        browser.wait(lambda: game.state() == "playing")
        start = game.look()[1]
        game.press("ArrowLeft")
        browser.wait(lambda: game.look()[1] != start)
        assert browser.errors == []
        process.send_signal(signal.SIGINT)
        assert process.wait(30) == 0
    finally:
        process.kill()
        process.wait()
