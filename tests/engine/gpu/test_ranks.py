"""Ranks on one device: sums over all, an absent rank by name, and weights of which each has a part."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from dsuf import formats
from dsuf.engine.gpu import weight_plan, weights
from dsuf.engine.gpu.ranks import ALONE, Exchange, Rank, Ranks, exchange_bytes
from dsuf.errors import DeviceError
from dsuf.kernels.project import Projection, launch_of
from dsuf.kernels.stream import scale_stride
from dsuf.model.checkpoint import Checkpoint
from dsuf.model.synthetic import load_config, write_checkpoint
from dsuf.ops import qdq
from dsuf.spec import Spec
from tests.support.simt_device import SimtDevice

ROWS = 5
REAL = Spec.load(Path(__file__).parents[3] / "dsuf/configs/v41-flash.json")


@pytest.fixture
def device():
    return SimtDevice()


def put(device, array):
    address = device.allocate(array.nbytes, "test")
    device.upload(address, array)
    return address


def bf16(values):
    return formats.float32_to_bf16(values.astype(np.float32))


class TestSums:
    @pytest.mark.parametrize("count", [2, 4])
    def test_every_rank_gets_the_same_sum_again_and_again(self, device, count):
        ranks, rng = Ranks([device] * count), np.random.default_rng(count)
        total = Exchange(ranks, 1024)
        outs = [device.allocate(2048, "test") for _ in range(count)]
        for _ in range(3):
            parts = [bf16(rng.standard_normal(1024)) for _ in range(count)]
            for rank, part in enumerate(parts):
                total.push(rank, put(device, part))
            for rank, out in enumerate(outs):
                total.join(rank, out)
            want = bf16(sum(formats.bf16_to_float32(part) for part in parts))
            for out in outs:
                assert np.array_equal(device.download(out, 2048).view(np.uint16), want)
        ranks.check()

    def test_few_sizes_serve_all_numbers_of_rows(self, device):
        ranks = Ranks([device] * 2)
        ranks.prepare(REAL, 100)
        sums = [ranks.exchange(rows, REAL.hidden_size) for rows in (1, 6, 7, 13, 25, 48, 49, 100)]
        assert [one.room // REAL.hidden_size for one in sums] == [6, 6, 12, 24, 48, 48, 100, 100]
        assert [one.grid[0] for one in sums] == [15, 15, 30, 60, 64, 64, 64, 64]
        logits = [ranks.exchange(rows, REAL.vocab_size) for rows in (6, 7, 48)]
        assert [one.room // REAL.vocab_size for one in logits] == [6, 12, 48] and logits[-1].grid[0] == 264
        assert sum(device.held().values()) == pytest.approx(2 * exchange_bytes(REAL, ranks.rank(0), 100), rel=1e-3)

    def test_a_rank_that_never_pushes_is_named_with_the_sum(self, device):
        ranks = Ranks([device] * 3, bound_us=0)
        total, part = Exchange(ranks, 64), put(device, np.zeros(64, np.uint16))
        total.push(0, part)
        total.push(1, part)
        total.join(1, device.allocate(128, "test"), ranks.code("the output of layer 4"))
        with pytest.raises(DeviceError, match=r"rank 1 waited 0 s for rank 2 in the output of layer 4 \(reduce\.join"):
            ranks.check()

    def test_too_many_ranks_and_odd_sizes_are_refused(self, device):
        with pytest.raises(DeviceError, match="9 ranks were asked for"):
            Ranks([device] * 9)
        with pytest.raises(DeviceError, match="a sum of 12 elements"):
            Exchange(Ranks([device]), 12)


class TestParts:
    @pytest.mark.parametrize("count", [2, 4, 8])
    def test_equal_parts_cover_the_real_model(self, count):
        shares = [Rank(index, count) for index in range(count)]
        for size, unit in ((REAL.n_routed_experts, 1), (REAL.dspark_n_routed_experts, 1), (REAL.vocab_size, 16)):
            parts = [one.part(size, unit) for one in shares]
            assert [first for first, _ in parts] == [size // count * index for index in range(count)]
        mine = shares[0].share(REAL)
        assert (mine.num_attention_heads, mine.o_groups) == (64 // count, 8 // count)

    def test_what_cannot_be_cut_is_whole(self):
        assert Rank(2, 3).part(64) == (0, 64) and ALONE.part(7) == (0, 7) and ALONE.share(REAL) == REAL
        assert Rank(1, 2).part(4 * 16 + 16, 16) == (0, 80)
        assert Rank(0, 16).share(REAL).num_attention_heads == 64


class TestSplitWeights:
    @pytest.fixture(scope="class")
    @classmethod
    def tiny(cls, tmp_path_factory):
        folder = tmp_path_factory.mktemp("tiny") / "ckpt"
        write_checkpoint(load_config("tiny"), folder)
        with Checkpoint.open(folder) as checkpoint:
            yield checkpoint

    def product(self, device, part, checkpoint, x):
        """bf16 [ROWS, n] = q8(x) W^T by the decode kernel, W as this rank holds it."""
        codes, scales = qdq.q8_encode(x)
        padded = np.zeros((ROWS, scale_stride(x.shape[1])), np.uint8)
        padded[:, : scales.shape[1]] = scales
        how = launch_of("small", Projection(part.n, part.k, "q8"), ROWS)
        w, y = put(device, weights.packed(part, checkpoint, device.chip)), device.allocate(2 * 8 * part.n, "test")
        at = [put(device, codes), put(device, padded)]
        device.launch(how.name, w, *at, y, ROWS, *how.arguments, grid=(2, 1), shared=how.shared)
        return y

    def test_columns_of_wo_b_add_up(self, tiny, device):
        count, of_wo_b = 2, ("layers.2", "wo_b")
        ranks, rng = Ranks([device] * count), np.random.default_rng(0)
        whole, *shares = (
            next(p for p in plan if (p.owner, p.name) == of_wo_b)
            for plan in (
                weight_plan.plan(tiny.spec), *(weight_plan.plan(tiny.spec, rank=r, ranks=count) for r in range(count))
            )
        )  # fmt: skip
        x = rng.standard_normal((ROWS, whole.k)).astype(np.float32)
        one, total = self.product(device, whole, tiny, x), Exchange(ranks, ROWS * whole.n)
        for rank, part in enumerate(shares):
            assert part.k == whole.k // count
            total.push(rank, self.product(device, part, tiny, x[:, part.first : part.first + part.k]))
        outs = [device.allocate(2 * ROWS * whole.n, "test") for _ in range(count)]
        for rank, out in enumerate(outs):
            total.join(rank, out)
        got = [device.download(out, 2 * ROWS * whole.n).view(np.uint16) for out in outs]
        assert np.array_equal(*got)
        want = formats.bf16_to_float32(device.download(one, 2 * ROWS * whole.n).view(np.uint16))
        error = np.abs(formats.bf16_to_float32(got[0]) - want)
        assert error.max() <= 2.0**-7 * np.abs(want).max()

    @pytest.mark.parametrize(("name", "count"), [("wq_b", 2), ("head", 4)])
    def test_rows_of_a_rank_are_those_rows_of_the_whole(self, tiny, device, name, count):
        spec, x = tiny.spec, np.random.default_rng(1).standard_normal((ROWS, 64)).astype(np.float32)
        owner = "" if name == "head" else "layers.2"
        whole = next(p for p in weight_plan.plan(spec) if (p.owner, p.name) == (owner, name))
        every = weights.packed(whole, tiny, device.chip)
        for rank in range(count):
            parts = weight_plan.plan(spec, rank=rank, ranks=count)
            part = next(p for p in parts if (p.owner, p.name) == (owner, name))
            first = part.first // 16 * (every.size // (whole.n // 16))
            mine = weights.packed(part, tiny, device.chip)
            assert np.array_equal(mine, every[first : first + mine.size])
            if name == "wq_b":
                some = self.product(device, part, tiny, x)
                all_rows = self.product(device, whole, tiny, x)
                got = device.download(some, 2 * ROWS * part.n).view(np.uint16).reshape(ROWS, -1)
                want = device.download(all_rows, 2 * ROWS * whole.n).view(np.uint16).reshape(ROWS, -1)
                assert np.array_equal(got, want[:, part.first : part.first + part.n])

    @pytest.mark.parametrize("count", [2, 4])
    def test_what_selects_is_whole_on_every_rank(self, tiny, count):
        names = ("index_wq_b", "index_weights", "index_wk", "compressor", "gate", "wq_a_wkv")
        for rank in range(count):
            parts = weight_plan.plan(tiny.spec, rank=rank, ranks=count)
            assert all(part.split is None for part in parts if part.name in names)
