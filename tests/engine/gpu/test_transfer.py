"""Transfers in batches, and runs of bytes that keep their places."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from dsuf.engine.gpu.transfer import BATCH, FIRST, MOST, Runs, Transfer
from dsuf.kernels.catalogue import CONFIGS
from dsuf.layout import PageLayout
from dsuf.spec import Spec
from tests.engine.gpu.late import LateDevice

PAGE = PageLayout.of(Spec.load(CONFIGS / "tiny.json")).page_bytes


class TestTransfer:
    def test_batches_grow_and_only_so_many_runs_are_under_way(self):
        sent, device = [], LateDevice()
        device.copy_many = lambda targets, sources, sizes: sent.append(len(sizes))
        growing = [FIRST, FIRST, 2 * FIRST, 4 * FIRST]
        assert sum(growing) > BATCH and MOST == 3 * BATCH
        many = np.arange(5 * BATCH + 3) * 2
        parts = iter([Runs(many, many, np.ones_like(many)), Runs(many[:0], many[:0], many[:0])])
        job = Transfer(1, device, 0, parts, None, lambda: sent.append("end"))
        assert sent == growing[:1] and not job.advance() and sent == [*growing, BATCH]
        assert MOST - BATCH < sum(sent) <= MOST
        for _ in growing[:2]:
            assert not job.advance() and sent == [*growing, BATCH]
            job.wait()
        assert not job.advance() and sent == [*growing, BATCH, BATCH]
        last = job.send_all()
        assert sent[:-1] == [*growing, *[BATCH] * 3] and sum(sent) == len(many) and last is job.last
        last.wait()
        assert job.advance() and job.advance() and sent.count("end") == 1


starts = st.lists(st.tuples(st.integers(0, 60), st.integers(0, 60)), min_size=1, max_size=30)


class TestRuns:
    @given(starts, st.integers(1, 9), st.integers(1, 64), st.sampled_from(["targets", "sources"]))
    def test_every_byte_keeps_its_place_and_no_run_passes_a_border(self, places, size, cut, side):
        targets, sources = (1000 + size * np.array(column) for column in zip(*places, strict=True))
        sizes = np.full(len(targets), size)
        runs, few = (
            Runs.of(targets, sources, sizes),
            zip(targets.tolist(), sources.tolist(), sizes.tolist(), strict=True),
        )
        wanted = [(t + i, s + i) for t, s in zip(targets, sources, strict=True) for i in range(size)]
        cuts, few = runs.split(side, 990, cut), Runs.few(few, side, 990, cut)
        for some in (runs, cuts, few):
            moved = zip(some.targets, some.sources, some.sizes, strict=True)
            assert [(t + i, s + i) for t, s, n in moved for i in range(n)] == wanted
        for some in (cuts, few):
            at = getattr(some, side) - 990
            assert (at // cut == (at + some.sizes - 1) // cut).all() and (some.sizes > 0).all()

    def test_pages_side_by_side_on_both_sides_are_one_run(self):
        targets, sizes = np.array([*np.arange(7) * PAGE, 1 << 30]), np.array([PAGE] * 7 + [8])
        runs = Runs.of(targets, np.array([*50 + targets[:7], 5]), sizes)
        assert runs.sizes.tolist() == [7 * PAGE, 8] and len(runs) == 2
