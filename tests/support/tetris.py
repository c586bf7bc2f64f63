"""A player of the toy's Tetris page, who sees only what is on the screen: the cells' classes and the counters' text."""

from __future__ import annotations

from itertools import pairwise

from tests.support.browser import Browser

WIDTH, HEIGHT = 10, 20
Cells = frozenset[tuple[int, int]]  # (x, y), y downwards


class Game:
    """An open Tetris page."""

    def __init__(self, browser: Browser) -> None:
        self.browser = browser

    def press(self, keys: str | list[str]) -> None:
        """Press one key, or several in order."""
        for key in [keys] if isinstance(keys, str) else keys:
            self.browser.press(key)

    def state(self) -> str:
        """playing, paused or over."""
        return self.browser.evaluate("document.body.dataset.state")

    def counter(self, name: str) -> int:
        """score, lines or level."""
        return int(self.browser.evaluate(f"document.getElementById('{name}').textContent"))

    def look(self) -> tuple[Cells, Cells, Cells]:
        """Cells that are locked, of the falling piece, and of its ghost."""
        classes = self.browser.evaluate("[...document.querySelectorAll('#board i')].map((cell) => cell.className)")
        assert len(classes) == WIDTH * HEIGHT
        found: dict[str, set[tuple[int, int]]] = {"": set(), "on": set(), "ghost": set()}
        for i, name in enumerate(classes):
            if name:
                found[name.partition(" ")[2]].add((i % WIDTH, i // WIDTH))
        return frozenset(found[""]), frozenset(found["on"]), frozenset(found["ghost"])

    def place(self) -> None:
        """Turn, move and drop the falling piece where it leaves the best stack."""
        candidates = []
        for turns in range(4):
            locked, piece, _ = self.look()
            left = min(x for x, _ in piece)
            span = max(x for x, _ in piece) - left + 1
            candidates += [(stack_cost(locked, moved(piece, x - left)), turns, x) for x in range(WIDTH - span + 1)]
            self.press("ArrowUp")
        _, turns, target = min(candidates)
        self.press(["ArrowUp"] * turns)
        _, piece, _ = self.look()
        steps = target - min(x for x, _ in piece)
        self.press(["ArrowLeft" if steps < 0 else "ArrowRight"] * abs(steps) + [" "])


def moved(piece: Cells, right: int, down: int = 0) -> Cells:
    """The piece elsewhere."""
    return frozenset((x + right, y + down) for x, y in piece)


def stack_cost(locked: Cells, piece: Cells) -> float:
    """How bad the stack is after dropping `piece` straight down: holes, height, and rows that are not full."""
    down = 0
    while all(y + down + 1 < HEIGHT and (x, y + down + 1) not in locked for x, y in piece):
        down += 1
    stack = locked | moved(piece, 0, down)
    full = [y for y in range(HEIGHT) if all((x, y) in stack for x in range(WIDTH))]
    heights = [HEIGHT - min((y for y in range(HEIGHT) if (x, y) in stack), default=HEIGHT) for x in range(WIDTH)]
    holes = sum(heights) - len(stack)
    bumps = sum(abs(a - b) for a, b in pairwise(heights))
    return 0.5 * sum(heights) + 4 * holes + 0.3 * bumps - 8 * len(full)
