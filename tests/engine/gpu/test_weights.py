"""Weights: the plan's bytes against the published totals, and packed buffers against what the kernels decode."""

from __future__ import annotations

import numpy as np
import pytest

from dsuf import formats
from dsuf.engine.gpu import weight_fill, weight_plan, weights
from dsuf.engine.gpu.engram_tables import place_on_device
from dsuf.engine.gpu.weight_load import Loader
from dsuf.engine.options import EngineOptions
from dsuf.errors import CheckpointError
from dsuf.kernels import pack
from dsuf.kernels.catalogue import CONFIGS
from dsuf.model import synthetic
from dsuf.model.checkpoint import Checkpoint
from dsuf.model.inventory import parameters
from dsuf.model.synthetic import load_config, write_checkpoint
from dsuf.spec import Spec
from tests.engine.gpu.small import machine_on, small_config
from tests.support.simt_device import SimtDevice

REAL, TINY = (Spec.load(CONFIGS / name) for name in ("v41-flash.json", "tiny.json"))


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
    return part.experts or part.n


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


class Scaled:
    """A checkpoint of which one scale of every matrix has another exponent."""

    def __init__(self, checkpoint, exponent):
        self.info, self._checkpoint, self._exponent = checkpoint.info, checkpoint, exponent

    def raw(self, name):
        found = self._checkpoint.raw(name).copy()
        if name.endswith(".scale"):
            found.flat[-1] = 127 + self._exponent
        return found


@pytest.mark.parametrize(("name", "most"), [("layers.0.attn.wq_b", 7), ("layers.0.ffn.experts.3.w1", 1)])
def test_scales_that_the_products_cannot_take_are_refused(tiny, name, most):
    assert weights.quantised(name, Scaled(tiny, most))[1].max() == 127 + most
    with pytest.raises(CheckpointError, match=f"{name}.scale holds 2.{most + 1}, .* up to 2.{most}"):
        weights.quantised(name, Scaled(tiny, most + 1))


class TestLoader:
    @pytest.mark.parametrize(("rank", "ranks"), [(0, 1), (1, 2)])
    def test_packed_on_the_device_it_is_what_the_host_packs(self, tiny, rank, ranks):
        device = SimtDevice()
        held = weights.Weights.allocate(device, tiny.spec, tiny.class_map(), positions=64, rank=rank, ranks=ranks)
        place_on_device(held)
        held.parts = [p for p in held.parts if p.owner in ("", "layers.1", "layers.2", "mtp.2")]
        seen = []
        Loader(held, tiny, buffer=64 << 10).run(lambda done, total: seen.append((done, total)))
        for part in held.parts:
            data = weights.packed(part, tiny, device.chip)
            assert np.array_equal(device.download(held.address(part), part.nbytes), data), part
        assert seen == sorted(seen) and len(seen) > 3 and seen[-1][0] == seen[-1][1]


@pytest.fixture(scope="module")
def filled():
    device, config = SimtDevice(), load_config("tiny")
    classes = np.arange(TINY.vocab_size, dtype=np.int32) % 700
    held = weights.Weights.allocate(device, TINY, classes, positions=1024)
    place_on_device(held)
    return held, weight_fill.fill(held, config, seed=3)


class TestFilling:
    def test_every_byte_is_written(self, filled):
        held, total = filled
        assert total == sum(part.nbytes for part in held.parts)
        for part in held.parts:
            assert held.device.unwritten(held.address(part), part.nbytes) == 0, part

    @pytest.mark.parametrize(
        ("owner", "name", "sigma"),
        [("layers.2", "wq_b", 0.95 / 8), ("layers.2", "wo_a", 1.6 / 128**0.5), ("mtp.0", "shared_down", 0.2625 / 8)],
    )
    def test_fp8_matrices_have_the_sigma_of_their_kind(self, filled, owner, name, sigma):
        part, raw = _part(filled[0], owner, name)
        chunk = pack.fp8_chunk_bytes(part.k)
        raw = raw.reshape(-1, chunk)
        codes, scales = raw[:, :-16], raw[:, -16]
        values = formats.e4m3_decode(codes) * formats.ue8m0_decode(scales)[:, None]
        assert np.isfinite(values).all() and abs(values.std() / sigma - 1) < 0.03 and abs(values.mean()) < sigma / 20

    def test_experts_have_every_code_under_one_scale(self, filled):
        part, raw = _part(filled[0], "layers.0", "experts_w2")
        raw = raw.reshape(-1, pack.fp4_chunk_bytes(part.k))
        codes, scales = raw[:, : 8 * 64], raw[:, 8 * 64 :]
        assert (scales == scales[0, 0]).all()
        sigma = 1.05 * 0.25 / 8
        assert 2**-0.5 < 2.93 * formats.ue8m0_decode(scales[0, :1])[0] / sigma < 2**0.5
        counts = np.bincount(codes.ravel(), minlength=256)
        assert counts.min() > 0.6 * counts.mean() and counts.max() < 1.4 * counts.mean()

    def test_vectors_are_those_of_synth(self, filled, tiny):
        _, raw = _part(filled[0], "layers.1", "attn_norm")
        with_seed = synthetic.arrays(next(_parameters("layers.1.attn_norm.weight")), 3)[0]
        assert np.array_equal(raw.view(np.uint16), with_seed)
        assert not np.array_equal(with_seed, tiny.raw("layers.1.attn_norm.weight"))

    def test_shares_have_the_whole_parts_in_common_and_nothing_else(self):
        device, config = SimtDevice(), synthetic.load_config("tiny")
        spec, ranks = Spec.from_config(config), []
        for rank in range(2):
            held = weights.Weights.allocate(device, spec, np.zeros(spec.vocab_size), positions=64, rank=rank, ranks=2)
            place_on_device(held)
            held.parts = [p for p in held.parts if p.owner in ("", "layers.1") and p.name != "embed"]
            assert weight_fill.fill(held, config, 3) == sum(part.nbytes for part in held.parts)
            ranks.append(held)
        for parts in zip(*(held.parts for held in ranks), strict=True):
            assert not any(device.unwritten(h.address(p), p.nbytes) for h, p in zip(ranks, parts, strict=True))
            first, second = (device.download(h.address(p), p.nbytes) for h, p in zip(ranks, parts, strict=True))
            constant = parts[0].name == "engram_table_scales"
            assert np.array_equal(first, second) == (parts[0].split is None or constant), parts[0]

    def test_embedding_and_tables(self, filled):
        _, raw = _part(filled[0], "", "embed")
        assert abs(formats.bf16_to_float32(raw.view(np.uint16)).std() / 0.12 - 1) < 0.02
        _, codes = _part(filled[0], "layers.1", "engram_table")
        _, scales = _part(filled[0], "layers.1", "engram_table_scales")
        assert (scales == scales[0]).all()
        values = formats.e4m3_decode(codes) * formats.ue8m0_decode(scales[:1])[0]
        assert abs(values.std() / 0.5 - 1) < 0.02

    def test_a_sparse_checkpoint_gets_them_when_it_is_loaded(self, tmp_path):
        write_checkpoint(small_config(), tmp_path / "sparse", sparse=True, seed=7)
        options, device = EngineOptions(tmp_path / "sparse", max_context=128, max_sequences=1), SimtDevice()
        machine = machine_on(device, options)
        part = next(p for p in machine.model.weights.parts if p.name == "experts_w2")
        assert device.download(machine.model.weights.address(part), part.nbytes).any()

    def test_the_words_follow_the_rule(self):
        device = SimtDevice()
        at = device.allocate(4096, "weights")
        device.launch("fill", at, 4096, 1024, 512, 0, 0, 0x11223344, 5, 6, grid=(1, 1))
        raw = device.download(at, 4096).view(np.uint32)
        for first in (0, 17, 300):
            unit = first // 4
            want = 0x11223344 if unit * 16 % 1024 >= 512 else int(_word(first, 5, 6))
            assert raw[first] == want


def _part(held, owner, name):
    part = next(p for p in held.parts if (p.owner, p.name) == (owner, name))
    return part, held.device.download(held.address(part), part.nbytes)


def _parameters(name):
    return (p for p in parameters(TINY, load_config("tiny")) if p.name == name)


def _mix(x):
    x ^= x >> np.uint32(16)
    x *= np.uint32(0x7FEB352D)
    x ^= x >> np.uint32(15)
    x *= np.uint32(0x846CA68B)
    return x ^ x >> np.uint32(16)


def _word(i, key0, key1):
    return _mix(_mix(np.array([i ^ key0], np.uint32)) ^ np.uint32(key1))[0]
