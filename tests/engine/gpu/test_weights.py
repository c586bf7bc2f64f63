"""Weights: the plan's bytes against the published totals, and packed buffers against what the kernels decode."""

from __future__ import annotations

import numpy as np
import pytest

from dsuf import formats
from dsuf.engine.gpu import weight_plan, weights
from dsuf.kernels import pack
from dsuf.kernels.catalogue import CONFIGS
from dsuf.model.checkpoint import Checkpoint
from dsuf.model.synthetic import load_config, write_checkpoint
from dsuf.spec import Spec
from tests.support.simt_device import SimtDevice

REAL = Spec.load(CONFIGS / "v41-flash.json")


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tiny") / "ckpt"
    write_checkpoint(load_config("tiny"), folder)
    with Checkpoint.open(folder) as checkpoint:
        yield checkpoint


class TestPlan:
    def test_bytes_of_the_real_checkpoint_are_those_of_its_tensors(self):
        kinds = weight_plan.bytes_by_kind(weight_plan.plan(REAL))
        assert kinds["experts"] == 288_777_830_400  # reference totals
        assert kinds["drafter experts"] == 7_219_445_760
        assert kinds["engram tables"] == 202_758_032_400
        assert kinds["embedding"] == kinds["head"] == 1_323_827_200
        dense = kinds["dense"] + kinds["drafter dense"]
        stored = 7_199_094_208 + 581_046_152 + 132_382_720
        assert stored < dense < 1.012 * stored  # packed fp8 chunks keep a scale a tile and are padded to 16 bytes

    @pytest.mark.parametrize("ranks", [2, 4, 8])
    def test_ranks_share_everything_large(self, ranks):
        whole = weight_plan.bytes_by_kind(weight_plan.plan(REAL))
        shares = [weight_plan.bytes_by_kind(weight_plan.plan(REAL, rank=r, ranks=ranks)) for r in range(ranks)]
        for kind in ("experts", "engram tables", "head", "drafter experts"):
            assert sum(share[kind] for share in shares) == whole[kind], kind
        assert all(share["dense"] < whole["dense"] / ranks + 0.35 * whole["dense"] for share in shares)


class TestPacking:
    def test_every_part_has_the_bytes_that_the_plan_says(self, tiny):
        for part in weight_plan.plan(tiny.spec):
            assert weights.packed(part, tiny, "sm_90a").size == part.nbytes, part

    @pytest.mark.parametrize("ranks", [2])
    def test_ranks_hold_slices_of_the_whole(self, tiny, ranks):
        whole = {(p.owner, p.name): p for p in weight_plan.plan(tiny.spec)}
        for rank in range(ranks):
            for part in weight_plan.plan(tiny.spec, rank=rank, ranks=ranks):
                data = weights.packed(part, tiny, "sm_90a")
                assert data.size == part.nbytes
                if part.split in ("rows", "groups", "experts") and len(part.tensors) == 1:
                    every = weights.packed(whole[part.owner, part.name], tiny, "sm_90a")
                    at = part.first * every.size // _units(whole[part.owner, part.name])
                    assert np.array_equal(data, every[at : at + data.size]), part

    def test_query_and_window_projections_are_stacked(self, tiny):
        part = next(p for p in weight_plan.plan(tiny.spec) if p.name == "wq_a_wkv" and p.owner == "layers.2")
        raw = weights.packed(part, tiny, "sm_90a").reshape(part.n // 16, -1)
        for name, tiles in (("wq_a", slice(0, 4)), ("wkv", slice(4, 8))):
            both = [tiny.raw(f"layers.2.attn.{name}.{x}") for x in ("weight", "scale")]
            assert np.array_equal(raw[tiles].ravel(), pack.pack_fp8(*both).ravel())

    def test_engram_weights_are_multiplied(self, tiny):
        part = next(p for p in weight_plan.plan(tiny.spec) if p.name == "engram_qk")
        q, k = (formats.bf16_to_float32(tiny.raw(name)) for name in part.tensors)
        assert np.array_equal(weights.packed(part, tiny, "sm_90a").view(np.float32).reshape(q.shape), q * k)


def _units(part):
    return part.experts or (part.n if part.layout != "plain" else part.nbytes)


class TestLoading:
    def test_everything_that_a_layer_has_is_on_the_device(self, tiny):
        device, spec = SimtDevice(), tiny.spec
        held = weights.Weights.allocate(device, spec, tiny.class_map(), positions=4096)
        seen = []
        held.load(tiny, lambda done, total: seen.append((done, total)))
        assert seen[-1][0] == seen[-1][1] == sum(p.nbytes for p in held.loaded)
        for part in held.loaded:
            data = weights.packed(part, tiny, device.chip)
            assert np.array_equal(device.download(held.address(part), part.nbytes), data), part
        assert held.layers[0].compressor == 0 and held.layers[2].compressor and held.layers[2].index_wq_b
        assert held.layers[3].index_wq_b == 0 and held.stages[2].experts_w13
        got = device.download(held.class_map, 4 * spec.vocab_size).view(np.int32)
        assert np.array_equal(got, tiny.class_map())
        assert sum(device.held().values()) < 1.2 * sum(p.nbytes for p in held.parts)
