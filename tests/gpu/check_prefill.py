"""`bench prefill --config h200x1` on a GPU, with rows of its longest prompt recomputed in float64 from the pages.

    python3 tests/gpu/check_prefill.py KERNELS OUT_FOLDER [--tokens 8k,128k,1m] [--positions 16]

Of positions spread over the prompt, and its last, layer 2's selected entries and one attention output are made again;
of the last also the candidate blocks of the candidate source. A selection may differ in entries whose scores are closer
to its smallest than float32 sums can tell. Then the same tokens in chunks of another length must leave the same pages.
Writes OUT_FOLDER/prefill-h200.json, the bench object with what was checked as params.checks.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[2]))

from dsuf.cli.bench.prefill import prefill_config
from dsuf.config import BenchOptions, parse_token_counts
from dsuf.engine.gpu.backend import GpuBackend
from dsuf.engine.gpu.device import Device
from dsuf.engine.gpu.measure_prefill import PromptRun
from dsuf.engine.gpu.prefill_pass import PrefillPass
from dsuf.engine.gpu.ranks import Turn, in_turns
from dsuf.engine.options import EngineOptions
from dsuf.engine.sequence import Sequence
from dsuf.formats import bf16_to_float32
from dsuf.kernels.latents import window_row_bytes
from dsuf.layout import PAGE_TOKENS, SourceLayout
from dsuf.ops import qdq
from dsuf.ops.attend import attend
from dsuf.ops.numerics import NUMERICS
from dsuf.ops.rope import frequencies
from tests.kernels.test_chunk_attend import natural

CLOSE = 2e-6  # of the largest score: what float32 sums of 32 x 128 products may move one
BLOCKS = 1 << 16  # entries scored at once
LAYER = 2  # whose selection and attention are checked


@dataclass
class Probe:
    """What one row had in layer 2 (or, of the tail, in the candidate source)."""

    position: int
    index_q: np.ndarray
    index_weights: np.ndarray
    selected: np.ndarray
    q: np.ndarray
    o: np.ndarray
    window: np.ndarray
    candidates: np.ndarray


@dataclass
class Spy:
    """Takes probes while a prompt is read: of wanted positions in the encoder, and of the last row of the tail."""

    positions: list[int] = field(default_factory=list)
    wanted: list[int] = field(default_factory=list)  # `positions` while the watched prompt is read
    probes: list[Probe] = field(default_factory=list)
    tail: list[Probe] = field(default_factory=list)
    chunk: tuple[PrefillPass, int, int, bool] | None = None  # pass, first position, rows, is it the tail
    layer: int = 0
    slot: int = 0

    def install(self) -> None:
        """Watch every pass and every launch of attention."""
        encode, decode, launch = PrefillPass.encode, PrefillPass.decode, Device.launch

        def watched_encode(run: PrefillPass, slot: int, start: int, ids: np.ndarray) -> Iterator[Turn]:
            self.chunk, self.layer, self.slot = (run, start, len(ids), False), 0, slot
            yield from encode(run, slot, start, ids)

        def watched_decode(run: PrefillPass, slot: int, start: int, count: int, decoder_start: int) -> Iterator[Turn]:
            self.chunk, self.layer = (run, start, count, True), run.model.spec.decoder_start_layer
            self.tail.clear()
            yield from decode(run, slot, start, count, decoder_start)

        def watched_launch(device: Device, name: str, *args: float, **options: Any) -> None:
            launch(device, name, *args, **options)
            if name.startswith("chunk.attend") and self.wanted:
                self.attended()
                self.layer += 1

        PrefillPass.encode, PrefillPass.decode, Device.launch = watched_encode, watched_decode, watched_launch

    def attended(self) -> None:
        """Attention of a layer has been queued."""
        run, start, count, tail = self.chunk
        if tail and self.layer == run.model.spec.decoder_start_layer:
            self.tail.append(self.probe(run, start, count - 1, kept=True))
        if not tail and self.layer == LAYER:
            self.probes += [self.probe(run, start, p - start) for p in self.wanted if start <= p < start + count]

    def probe(self, run: PrefillPass, start: int, row: int, *, kept: bool = False) -> Probe:
        """Download what one row has; `kept`: candidate blocks too."""
        b, spec, device = run.buffers, run.model.spec, run.device

        def rows(address: int, size: int, dtype: type, at: int = row) -> np.ndarray:
            return device.download(address + at * size, size).view(dtype)

        position, ring = start + row, run.most_rows + spec.sliding_window
        heads, width, size = spec.num_attention_heads, spec.head_dim, window_row_bytes(spec.head_dim)
        places = [(position - back) % ring for back in range(min(spec.sliding_window, position + 1) - 1, -1, -1)]
        window = np.stack([rows(b.windows, size, np.uint8, place) for place in places])
        q, o = (rows(address, 2 * heads * width, np.uint16).reshape(heads, width) for address in (b.q, b.o))
        index, blocks = spec.index_n_heads * spec.index_head_dim, rows(b.kept_of, 4, np.int32)[0] if kept else 0
        return Probe(
            position, rows(b.index_q, 2 * index, np.uint16), rows(b.index_weights, 4 * spec.index_n_heads, np.float32),
            rows(b.selected, 4 * spec.index_topk, np.int32)[: rows(b.chosen, 4, np.int32)[0]], q, natural(o), window,
            rows(b.candidates, 4 * spec.candidate_topk_blocks, np.int32)[:blocks],
        )  # fmt: skip


class Pages:
    """The pages of a prompt on the host."""

    def __init__(self, machine: Any, slot: int) -> None:
        pages = machine.pages
        raw = machine.device.download(pages.pool, pages.count * pages.page_bytes).reshape(pages.count, -1)
        self.raw, self.spec, self.layout = raw[pages.pages_of(slot)], machine.spec, pages.layout
        self._keys: dict[int, np.ndarray] = {}

    def plane(self, source: SourceLayout, name: str) -> np.ndarray:
        """[entries, width]."""
        plane = getattr(source, name)
        return self.raw[:, plane.offset : plane.end].reshape(-1, plane.width)

    def scores(self, probe: Probe, source: SourceLayout) -> np.ndarray:
        """Of all visible entries, float64."""
        spec, seen = self.spec, (probe.position + 1) // source.ratio
        q = bf16_to_float32(probe.index_q).astype(np.float64).reshape(spec.index_n_heads, -1)
        w = probe.index_weights.astype(np.float64) * (q.size**-0.5)
        if source.layer not in self._keys:
            planes = self.plane(source, "key_codes"), self.plane(source, "key_scales")
            self._keys[source.layer] = qdq.q4p_decode(*planes).astype(np.float32)  # exact
        out, keys = np.empty(seen), self._keys[source.layer]
        for at in range(0, seen, BLOCKS):
            end = min(at + BLOCKS, seen)
            out[at:end] = w @ np.maximum(q @ keys[at:end].astype(np.float64).T, 0)
        return out

    def attention(self, probe: Probe, source: SourceLayout) -> np.ndarray:
        """o [heads, d] before it is rounded, from the window and the selected entries."""
        spec, d = self.spec, self.spec.head_dim
        window = qdq.q8_decode(probe.window[:, :d], probe.window[:, d : d + d // 32])
        codes, scales = (self.plane(source, name)[probe.selected] for name in ("codes", "scales"))
        keys = np.concatenate([window, qdq.q4e_decode(codes, scales)]).astype(np.float64)
        phases = np.exp(1j * probe.position * frequencies(spec, True))
        q = turned(bf16_to_float32(probe.q).astype(np.float64), phases)
        sink = self.sink.astype(np.float64)
        o = attend(q[None], keys[None], np.zeros((1, len(keys))), sink, NUMERICS["qdq64"])[0]
        return turned(o, phases.conj())


def turned(x: np.ndarray, phases: np.ndarray) -> np.ndarray:
    """The last columns of x [heads, d] rotated, rounded to bf16."""
    out, n = x.copy(), x.shape[-1] - 2 * len(phases)
    pairs = (out[:, n::2] + 1j * out[:, n + 1 :: 2]) * phases
    out[:, n::2], out[:, n + 1 :: 2] = pairs.real, pairs.imag
    bits = out.astype(np.float32).view(np.uint32)
    return ((bits + 0x7FFF + (bits >> 16 & 1)) & 0xFFFF0000).astype(np.uint32).view(np.float32).astype(np.float64)


def compare(scores: np.ndarray, picked: np.ndarray, count: int) -> dict[str, Any]:
    """Whether `picked` are the `count` largest of scores, but for those that float32 cannot tell from the smallest."""
    if not len(scores):
        return {"entries": len(picked), "swapped_near_ties": 0, "wrong": len(picked)}
    order = np.lexsort((np.arange(len(scores)), -scores))[:count]
    smallest, slack = scores[order[-1]], CLOSE * np.abs(scores).max()
    wrong = np.setxor1d(order, picked)
    far = wrong[np.abs(scores[wrong] - smallest) > slack]
    return {"entries": len(picked), "swapped_near_ties": len(wrong) // 2, "wrong": len(far) + abs(len(picked) - count)}


def verify(spy: Spy, machine: Any) -> dict[str, Any]:
    """All probes against the pages."""
    pages, spec, rows = Pages(machine, spy.slot), machine.spec, []
    sink = machine.device.download(machine.model.weights.layers[LAYER].attn_sink, 4 * spec.num_attention_heads)
    pages.sink = sink.view(np.float32)
    source = next(s for s in pages.layout.sources if s.layer == LAYER)
    for probe in spy.probes:
        scores = pages.scores(probe, source)
        found = compare(scores, probe.selected, min(spec.index_topk, len(scores)))
        want, got = pages.attention(probe, source), bf16_to_float32(probe.o).astype(np.float64)
        error = float(np.abs(got - want).max() / np.abs(want).max())
        rows.append({"position": probe.position, **found, "attention_error": error})
        print(rows[-1], flush=True)
    return {"rows": rows, "candidates": [candidates(pages, probe) for probe in spy.tail]}


def candidates(pages: Pages, probe: Probe) -> dict[str, Any]:
    """The candidate source's blocks and selection of a tail row."""
    spec = pages.spec
    source = next(s for s in pages.layout.sources if s.layer == spec.candidate_source_layer_id)
    scores, size = pages.scores(probe, source), spec.candidate_block_size
    padded = np.full(-(-len(scores) // size) * size, -np.inf)
    padded[: len(scores)] = scores
    best = padded.reshape(-1, size).max(1)
    best[-1] = best.max() * 2  # the newest is forced in
    found = compare(best, probe.candidates, min(spec.candidate_topk_blocks, len(best)))
    selected = compare(scores, probe.selected, min(spec.index_topk, len(scores)))
    return {"position": probe.position, "blocks": found, "selected": selected}


def same_pages(machine: Any, run: PrefillPass, tokens: int) -> bool:
    """The same tokens in chunks of two lengths, in two slots."""
    ids, found = np.random.default_rng(5).integers(3, machine.spec.vocab_size - 1, tokens), []
    for length in (run.most_rows, 2999):
        slot = machine.pages.open()
        machine.pages.reserve(slot, tokens)
        for at in range(0, tokens, length):
            in_turns([run.encode(slot, at, ids[at : at + length])])
        found.append([machine.device.download(machine.pages.address(slot, page), machine.pages.page_bytes)
                      for page in range(tokens // PAGE_TOKENS)])  # fmt: skip
        machine.pages.release(slot)
        machine.device.synchronize()
    return all(np.array_equal(a, b) for a, b in zip(*found, strict=True))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("kernels", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--tokens", default="8k,128k,1m")
    parser.add_argument("--positions", type=int, default=16)
    parser.add_argument("--other-chunks", type=int, default=40960, help="tokens read again in chunks of another length")
    options = parser.parse_args()
    lengths = parse_token_counts(options.tokens)
    longest, spy, result = max(lengths) - 1, Spy(), {}
    spy.install()
    step = longest // options.positions
    spy.positions = [step * i + 37 * i % step for i in range(options.positions)] + [longest - 1]
    prompts: list[int] = []
    prompt, release = PromptRun.prompt, GpuBackend.release

    def watched_prompt(run: PromptRun, length: int) -> float:
        prompts.append(length)  # the first one warms up
        spy.wanted = spy.positions if length >= longest and len(prompts) > 1 and not result else []
        return prompt(run, length)

    def watched_release(backend: GpuBackend, sequence: Sequence) -> None:
        if spy.wanted:
            spy.wanted = []
            result.update(verify(spy, backend.machine))
        release(backend, sequence)
        if result and "same_pages" not in result:
            result["same_pages"] = same_pages(backend.machine, spy.chunk[0], min(options.other_chunks, longest))
            print("other chunks, same pages:", result["same_pages"], flush=True)

    PromptRun.prompt, GpuBackend.release = watched_prompt, watched_release
    engine = EngineOptions(Path(), gpus=(0,), kernels=options.kernels)
    file = options.out / "prefill-h200.json"
    prefill_config("h200x1", engine, lengths, BenchOptions(1, 1, 0, "h200x1", file, None, ()), profile=True)
    bench = json.loads(file.read_text(encoding="utf-8"))
    bench["params"]["checks"] = result
    file.write_text(json.dumps(bench, indent=1), encoding="utf-8")
    wrong = sum(row["wrong"] for row in result["rows"]) + (not result["same_pages"])
    wrong += sum(one[name]["wrong"] for one in result["candidates"] for name in ("blocks", "selected"))
    print(f"{len(result['rows'])} rows, wrong: {wrong}", flush=True)
    sys.exit(1 if wrong else 0)


if __name__ == "__main__":
    main()
