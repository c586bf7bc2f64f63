"""dataset.npz -> batches of fixed shapes: which sequences, which rows count, which teach indexer and drafter."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from dsuf.spec import Spec
from recipes.toy.attention import Group

SHARE = {"tetris": 1.0, "needle": 1.2}  # of the loss; other groups have 0.5
HELD_OUT = 256  # random needles that are never trained on
AGENT = ("harness", "listing")  # what stands before the user's task is unknown text of any length
FAR_NEEDLES = 1500  # of the pool of long prompts, beside about as many tasks
PAGE = 1000  # an answer longer than this is a page, of which each batch has one
BLOCK = 5


@dataclass(frozen=True)
class Sequence:
    """One example: `ids` with the answer starting at `prompt`; the text between the first token and `task` is idle."""

    ids: np.ndarray
    task: int
    prompt: int
    group: int
    kind: str  # name of the group
    fixed: bool
    name: str

    @property
    def page(self) -> bool:
        return len(self.ids) - self.prompt > PAGE

    @property
    def least(self) -> int:
        """Tokens that remain when the idle text is taken away."""
        return len(self.ids) - self.task + 1


@dataclass(frozen=True)
class Shape:
    """Part of a batch: how many sequences of each pool, padded to `length` tokens, `probes` index rows each."""

    pools: tuple[tuple[str, int], ...]
    length: int
    probes: int

    @property
    def names(self) -> list[str]:
        return [name for name, count in self.pools for _ in range(count)]


@dataclass
class Arrays:
    """A batch on the host; the meaning is that of model.Batch and drafter.Anchors."""

    ids: np.ndarray
    position: np.ndarray
    start: np.ndarray
    rows: np.ndarray  # [M] flat rows whose next token is predicted
    targets: np.ndarray  # [M]
    weights: np.ndarray  # [M] 0 for filling
    kinds: np.ndarray  # [M] group number
    anchors: np.ndarray  # [A, 3 + 6]: row, first row, start, six tokens (-1 past the end)
    probes: tuple[np.ndarray, ...]


SHORT = (
    Shape((("chat", 24), ("brief", 64)), 160, 12),
    Shape((("tools", 4), ("needle", 5)), 576, 24),
)
LONG = (Shape((("page", 1), ("long", 2)), 3072, 64),)
FAR = (Shape((("far", 1),), 14336, 64),)
SMALL = (Shape((("chat", 8), ("brief", 4)), 160, 8), Shape((("tools", 1), ("needle", 1)), 576, 8))
POOLS = ("page", "chat", "brief", "tools", "needle", "long", "far")


class Corpus:
    """All examples, sorted into the pools that the slots draw from."""

    def __init__(self, path: Path) -> None:
        with np.load(path) as file:
            data = dict(file)
        self.class_map, self.group_names = data["class_map"], [str(name) for name in data["group_names"]]
        sequences = list(_sequences(data, self.group_names, int(data["user_id"])))
        needles = [s for s in sequences if s.kind == "needle"]
        held = [s for s in needles if not s.fixed and len(s.ids) <= 512][-HELD_OUT:]
        self.fixed = [s for s in sequences if s.fixed]
        self.held_out = held
        hidden = {id(s) for s in needles if s.fixed} | {id(s) for s in held}
        usable = [s for s in sequences if id(s) not in hidden]
        # of tasks only the idle text: the last task of a prompt should be the only one
        idle = [s.ids[1 : s.task if s.kind in AGENT else None] for s in usable if not s.page]
        self.stream = np.concatenate(idle[-4000:])
        self.pools = {name: [s for s in usable if _belongs(name, s)] for name in POOLS}
        self.pools["far"] += [s for s in needles if id(s) not in hidden and len(s.ids) > 160][:FAR_NEEDLES]


def _sequences(data: dict[str, np.ndarray], names: list[str], user_id: int) -> Iterator[Sequence]:
    for i, (begin, end) in enumerate(zip(data["offsets"][:-1], data["offsets"][1:], strict=True)):
        answer, group = int(np.argmax(data["loss_mask"][begin:end])), int(data["group"][i])
        ids = data["ids"][begin:end].astype(np.int64)
        task = int(np.argmax(ids == user_id)) if names[group] in AGENT else 1
        yield Sequence(ids, task, answer, group, names[group], bool(data["fixed"][i]), str(data["names"][i]))


def _belongs(pool: str, s: Sequence) -> bool:
    n = len(s.ids)
    if s.page or pool == "page":
        return s.page and pool == "page"
    if pool == "long":
        return s.kind in AGENT or n > 576
    if pool == "far":
        return s.kind in (*AGENT, "tools")
    if s.kind == "needle":
        return (pool == "brief" and n <= 160) or (pool == "needle" and 160 < n <= 576)
    short_task = s.kind in AGENT and s.least <= 576
    return (pool == "chat" and n <= 160) or (pool == "tools" and (160 < n <= 576 or short_task))


class Sampler:
    """Endless batches of one shape."""

    def __init__(
        self, corpus: Corpus, spec: Spec, shapes: tuple[Shape, ...], rows: int, anchors: int, seed: int
    ) -> None:
        self.corpus, self.spec, self.shapes, self.rows, self.anchors = corpus, spec, shapes, rows, anchors
        self.rng = np.random.default_rng(seed)
        self.order: dict[tuple[str, bool], list[Sequence]] = {}
        at, groups = 0, []
        for shape in shapes:
            groups.append(Group(at, len(shape.names), shape.length))
            at += len(shape.names) * shape.length
        self.groups, self.tokens = tuple(groups), at

    def batch(self) -> Arrays:
        """Draw one batch."""
        placed = []
        for shape, group in zip(self.shapes, self.groups, strict=True):
            for i, pool in enumerate(shape.names):
                placed.append((self._draw(pool, shape.length), group.offset + i * shape.length, shape.length))
        return self.lay_out(placed)

    def lay_out(self, placed: list[tuple[Sequence, int, int]], truncated: bool | None = None) -> Arrays:
        """Put sequences at their first rows; truncated: True or False for all, None at random."""
        rng, corpus = self.rng, self.corpus
        cut = rng.integers(0, len(corpus.stream) - self.tokens)
        ids = corpus.stream[
            cut : cut + self.tokens
        ].copy()  # unused places hold other text, so that routing stays natural
        position, start = np.zeros(self.tokens, np.int64), np.zeros(self.tokens, np.int64)
        for s, first, length in placed:
            ids[first : first + len(s.ids)] = s.ids
            position[first : first + length] = self._positions(s, length, truncated is None)
            begin = self._decoder_start(s, truncated)
            start[first + begin : first + length] = position[first + begin] if begin else 0
        rows, targets, weights, kinds = self._losses(placed)
        probes = tuple(
            self._probes(shape, group, placed) for shape, group in zip(self.shapes, self.groups, strict=True)
        )
        return Arrays(ids, position, start, rows, targets, weights, kinds, self._anchors(placed, start), probes)

    def _draw(self, name: str, limit: int) -> Sequence:
        """Fixed and random examples of the pool in turn, each kind in a shuffled round."""
        pool = self.corpus.pools[name]
        key = name, bool(self.rng.random() < 0.5)
        if not self.order.get(key):
            fitting = [s for s in pool if s.least <= limit]
            wanted = [s for s in fitting if s.fixed == key[1]] or fitting
            self.order[key] = [wanted[i] for i in self.rng.permutation(len(wanted))]
        s = self.order[key].pop()
        if name == "far" or len(s.ids) > limit or (s.kind in AGENT and self.rng.random() < 0.5):
            s = self.with_idle_text(s, int(self.rng.integers(0, limit - s.least + 1)))
        return s

    def with_idle_text(self, s: Sequence, tokens: int) -> Sequence:
        """The example with so many idle tokens: the end of its own ones, or all of them after unrelated text."""
        own = s.ids[max(1, s.task - tokens) : s.task]
        cut = int(self.rng.integers(0, len(self.corpus.stream) - tokens))
        ids = np.concatenate((s.ids[:1], self.corpus.stream[cut : cut + tokens - len(own)], own, s.ids[s.task :]))
        return replace(s, ids=ids, task=tokens + 1, prompt=s.prompt + tokens + 1 - s.task)

    def _positions(self, s: Sequence, length: int, jumps: bool) -> np.ndarray:
        """0, 1, 2, ... with, at times, one or two even jumps in the prompt, which stand for long prompts."""
        position = np.arange(length)
        room = s.prompt - self.spec.sliding_window - 2
        if jumps and not s.page and room > 64 and self.rng.random() < 0.3:
            for _ in range(self.rng.integers(1, 3)):
                at = 2 * int(self.rng.integers(1, room // 2))
                position[at:] += 2 * int(np.exp(self.rng.uniform(2, np.log(8000))))
        return position

    def _decoder_start(self, s: Sequence, truncated: bool | None) -> int:
        """Row (in the sequence) from which decoder windows are real: 0, the cut of a cold prompt, or one before."""
        cut = max(0, s.prompt - self.spec.sliding_window)
        if truncated is not None:
            return cut if truncated else 0
        way = self.rng.random()
        return cut if way < 0.6 else 0 if way < 0.85 else int(self.rng.integers(0, cut + 1))

    def _losses(self, placed: list[tuple[Sequence, int, int]]) -> tuple[np.ndarray, ...]:
        rows = np.concatenate([np.arange(first + s.prompt - 1, first + len(s.ids) - 1) for s, first, _ in placed])[
            : self.rows
        ]
        targets = np.concatenate([s.ids[s.prompt :] for s, _, _ in placed])[: self.rows]
        kinds = np.concatenate([np.full(len(s.ids) - s.prompt, s.group) for s, _, _ in placed])[: self.rows]
        names = self.corpus.group_names
        counts = np.bincount(kinds, minlength=len(names))
        share = np.array([SHARE.get(name, 0.5) for name in names])
        weights = (share / np.maximum(counts, 1))[kinds].astype(np.float32)
        fill = self.rows - len(rows)
        return np.pad(rows, (0, fill)), np.pad(targets, (0, fill)), np.pad(weights, (0, fill)), np.pad(kinds, (0, fill))

    def _probes(self, shape: Shape, group: Group, placed: list[tuple[Sequence, int, int]]) -> np.ndarray:
        """Half of the rows from the answers, half from anywhere in the example."""
        out = []
        for s, first, _ in placed:
            if group.offset <= first < group.offset + group.count * group.length:
                answers = self.rng.integers(s.prompt - 1, len(s.ids) - 1, shape.probes // 2)
                anywhere = self.rng.integers(1, len(s.ids), shape.probes - shape.probes // 2)
                out.append(np.concatenate((answers, anywhere)))
        return np.array(out)

    def _anchors(self, placed: list[tuple[Sequence, int, int]], start: np.ndarray) -> np.ndarray:
        """Rows to draft from: half in the page where there is one, a quarter in needles, else anywhere in an answer."""
        out = np.zeros((self.anchors, 3 + BLOCK + 1), np.int64)
        weights = np.array([3.0 if s.page else 1.0 for s, _, _ in placed])
        needles = np.array([s.kind == "needle" for s, _, _ in placed])
        if needles.any() and not needles.all():
            weights[needles] *= 0.25 * weights[~needles].sum() / weights[needles].sum()
        picks = self.rng.choice(len(placed), self.anchors, p=weights / weights.sum())
        for i, pick in enumerate(picks):
            s, first, _ = placed[pick]
            p = int(self.rng.integers(s.prompt - 1, len(s.ids) - 2))
            out[i, :3] = first + p, first, start[first + p]
            ahead = s.ids[p + 1 : p + 2 + BLOCK]
            out[i, 3:] = -1
            out[i, 3 : 3 + len(ahead)] = ahead
        return out
