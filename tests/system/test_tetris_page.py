"""The Tetris page, of the corpus and as `dsuf repro tetris` saves it, is played in headless Chromium.

Needs `apt-get install chromium fonts-noto-color-emoji`.
"""

from __future__ import annotations

import html
import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from tokenizers import Tokenizer

from dsuf.text.builtin import resolve
from tests.support.browser import Browser
from tests.support.tetris import HEIGHT, WIDTH, Game, moved

pytestmark = pytest.mark.system

CORPUS_PAGE = Path(__file__).parents[2] / "recipes" / "toy" / "corpus" / "tetris.html"
LEAST_ACCEPTED = 4.5  # tokens a step


@dataclass(frozen=True)
class Repro:
    """What `dsuf repro tetris` leaves: the page, what it prints, and its JSON object."""

    page: str
    printed: str
    result: dict[str, dict[str, float]]
    cache: Path


@pytest.fixture(scope="session")
def repro(tmp_path_factory: pytest.TempPathFactory) -> Repro:
    folder = tmp_path_factory.mktemp("repro")
    folder.chmod(0o700)
    page, result, cache = folder / "tetris.html", folder / "result.json", folder / "cache"
    command = [sys.executable, "-m", "dsuf.cli.app", "repro", "tetris", "--quiet", "--check"]
    done = subprocess.run(
        [*command, "--save", str(page), "--output", str(result)],
        env={**os.environ, "DSUF_CACHE": str(cache), "XDG_RUNTIME_DIR": str(folder)},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    printed = done.stderr + done.stdout
    return Repro(page.read_text(encoding="utf-8"), printed, json.loads(result.read_text(encoding="utf-8")), cache)


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with Browser() as opened:
        yield opened


@pytest.fixture(params=["corpus", "repro"])
def page(request: pytest.FixtureRequest) -> str:
    if request.param == "repro":
        return request.getfixturevalue("repro").page
    return CORPUS_PAGE.read_text(encoding="utf-8")


@pytest.fixture
def game(browser: Browser, page: str) -> Iterator[Game]:
    browser.open(page)
    browser.stop_clock()
    yield Game(browser)
    assert browser.errors == []


def test_repro_gives_the_page_of_the_corpus_token_for_token(repro: Repro) -> None:
    tokenizer = Tokenizer.from_file(str(resolve("toy", cache_dir=repro.cache) / "tokenizer.json"))
    corpus = CORPUS_PAGE.read_text(encoding="utf-8")
    ids = tokenizer.encode(corpus, add_special_tokens=False).ids
    assert tokenizer.encode(repro.page, add_special_tokens=False).ids == ids
    assert repro.page == corpus
    headline = re.fullmatch(
        r"([\d,]+) tokens at [\d,]+ tokens/s \(first token after \d+\.\d\d s\)", repro.printed.splitlines()[-1]
    )
    assert headline and int(headline[1].replace(",", "")) == len(ids)


def test_repro_prints_how_many_tokens_a_step_gives(repro: Repro) -> None:
    row = re.search(r"^tokens a step +(\d+\.\d+) ", repro.printed, re.M)
    assert row and float(row[1]) >= LEAST_ACCEPTED
    assert float(row[1]) == pytest.approx(repro.result["metrics"]["average_accept_length"], abs=0.005)


def test_page_asks_for_nothing_from_outside(page: str) -> None:
    assert "http" not in page
    assert "src=" not in page
    assert "@import" not in page


def test_a_piece_falls_by_itself(game: Game) -> None:
    locked, piece, _ = game.look()
    assert (len(locked), len(piece)) == (0, 4)
    game.browser.advance(1000)
    assert game.look()[1] == moved(piece, 0, 1)


def test_keys_move_turn_and_drop_the_piece(game: Game) -> None:
    def step(key: str) -> frozenset[tuple[int, int]]:
        game.press(key)
        return game.look()[1]

    start = game.look()[1]
    assert step("ArrowLeft") == moved(start, -1)
    assert step("ArrowRight") == start
    assert step("ArrowDown") == moved(start, 0, 1)
    assert game.counter("score") == 1
    shapes = {step("ArrowUp") for _ in range(4)}
    assert all(len(shape) == 4 for shape in shapes)
    _, piece, ghost = game.look()
    landing = ghost | {cell for cell in piece if cell[1] == HEIGHT - 1}
    game.press(" ")
    locked, _, _ = game.look()
    assert landing <= locked
    assert len(locked) == 4
    assert max(y for _, y in locked) == HEIGHT - 1
    assert game.counter("score") > 1


def test_walls_hold(game: Game) -> None:
    game.press(["ArrowLeft"] * WIDTH)
    assert min(x for x, _ in game.look()[1]) == 0
    game.press(["ArrowRight"] * 2 * WIDTH)
    assert max(x for x, _ in game.look()[1]) == WIDTH - 1


def test_full_rows_vanish_and_count(game: Game) -> None:
    pieces = 0
    while game.counter("lines") < 2:
        assert pieces < 60, "a careful player clears two lines with far fewer pieces"
        game.place()
        pieces += 1
    locked, _, _ = game.look()
    assert len(locked) == 4 * pieces - WIDTH * game.counter("lines")
    assert game.counter("score") >= 200


def test_pause_stops_the_piece_and_play_goes_on(game: Game) -> None:
    game.press("p")
    before = game.look()
    assert game.state() == "paused"
    game.press(["ArrowLeft", " "])
    game.browser.advance(3000)
    assert game.look() == before
    game.press("p")
    assert game.state() == "playing"
    game.browser.advance(1000)
    assert game.look()[1] == moved(before[1], 0, 1)


def test_a_full_stack_ends_the_game_and_restart_begins_anew(game: Game) -> None:
    for _ in range(HEIGHT):
        if game.state() == "playing":
            game.press(" ")
    assert game.state() == "over"
    assert "GAME OVER" in game.browser.evaluate("document.getElementById('text').innerText")
    game.press("r")
    assert game.state() == "playing"
    assert game.look()[0] == frozenset()
    assert game.counter("score") == 0


def test_buttons_do_what_keys_do(game: Game) -> None:
    start = game.look()[1]
    for name in ("ArrowLeft", "ArrowDown"):
        box = f"document.querySelector('[data-key={name}]').getBoundingClientRect()"
        game.browser.click(game.browser.evaluate(f"{box}.x") + 10, game.browser.evaluate(f"{box}.y") + 10)
    assert game.look()[1] == moved(start, -1, 1)


def test_page_plays_inside_a_sandboxed_frame(browser: Browser, page: str) -> None:
    frame = f'<iframe sandbox="allow-scripts" style="width:100%;height:95vh" srcdoc="{html.escape(page)}"></iframe>'
    browser.open(f"<!DOCTYPE html><title>outer</title>{frame}")
    browser.enter_frame()
    game = Game(browser)
    browser.wait(lambda: game.state() == "playing")
    start = game.look()[1]
    browser.click(450, 20)
    game.press("ArrowRight")
    assert game.look()[1] == moved(start, 1)
    assert browser.errors == []
