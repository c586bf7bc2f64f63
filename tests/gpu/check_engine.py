"""A whole step and a whole prefill of the tiny checkpoint on a GPU, small enough for compute-sanitizer; and a fault.

    here    dsuf build --sm sm_90a --out .kernels
    there   compute-sanitizer --tool memcheck python3 tests/gpu/check_engine.py .kernels tokens
            python3 tests/gpu/check_engine.py .kernels tokens fault

tokens: two prompts in each prefill mode, with drafts; what the GPU emits beside what the CPU backend emits.
fault: a kernel writes to an address that nobody has while two requests run; each must get an error event.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[2]))

from dsuf.engine.cpu import CpuBackend
from dsuf.engine.engine import Engine
from dsuf.engine.gpu.backend import GpuBackend
from dsuf.engine.gpu.device import Device
from dsuf.engine.messages import Finished, Request, Sampling, Tokens
from dsuf.engine.options import EngineOptions
from dsuf.errors import DeviceError
from dsuf.kernels.launch import read_folder
from dsuf.model.synthetic import load_config, write_checkpoint

LENGTHS, NEW_TOKENS = (37, 300), 12
NOWHERE = 1 << 46


def requests(vocabulary: int) -> list[Request]:
    rng = np.random.default_rng(0)
    sampling = Sampling(temperature=0.0)
    return [
        Request(f"r{n}", rng.integers(3, vocabulary, n).tolist(), NEW_TOKENS, sampling, [], ignore_eos=True)
        for n in LENGTHS
    ]


def emitted(engine: Engine, asked: list[Request]) -> dict[str, list[int]]:
    for request in asked:
        engine.submit(request)
    ids: dict[str, list[int]] = {request.id: [] for request in asked}
    while not engine.idle:
        for event in engine.step():
            if isinstance(event, Tokens):
                ids[event.id] += event.ids
    return ids


def opened(options: EngineOptions, device: Device | None) -> Engine:
    backend = CpuBackend(options) if device is None else GpuBackend(options, None, [device])
    backend.load(lambda what, share: None)
    return Engine(backend, options)


def tokens(folder: Path, device: Device) -> bool:
    for prefill in ("exact", "truncated"):
        gpu = EngineOptions(folder, prefill=prefill, max_context=1024, prefill_chunk=256)
        cpu = EngineOptions(folder, prefill=prefill, max_context=1024, numerics="bf16")
        asked = requests(load_config("tiny")["text_config"]["vocab_size"])
        mine, theirs = emitted(opened(gpu, device), asked), emitted(opened(cpu, None), asked)
        for name, ids in mine.items():
            same = next((i for i, (a, b) in enumerate(zip(ids, theirs[name], strict=False)) if a != b), len(ids))
            print(f"tokens {prefill} {name}: {len(ids)} emitted, the first {same} as the reference in bf16", flush=True)
        if any(len(ids) != NEW_TOKENS for ids in mine.values()):
            return False
    return True


def fault(folder: Path, device: Device) -> bool:
    engine = opened(EngineOptions(folder, max_context=1024, prefill_chunk=256), device)
    asked = requests(load_config("tiny")["text_config"]["vocab_size"])
    for request in asked:
        engine.submit(request)
    try:
        for step in range(200):
            engine.step()
            if step == 3:
                device.launch("fill", NOWHERE, 4096, 16, 16, 0, 0, 0, 1, 2, grid=(1, 1))
    except DeviceError as error:
        events = engine.abort(str(error))
        ended = [event for event in events if isinstance(event, Finished) and event.reason == "error"]
        print(f"fault: {len(ended)} of {len(asked)} requests got an error event: {ended[0].message}", flush=True)
        return len(ended) == len(asked) and device.lost is not None
    print("fault: nothing was raised")
    return False


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("cubins", type=Path)
    parser.add_argument("sections", nargs="+", choices=["tokens", "fault"])
    given = parser.parse_args()
    device = Device.open(0, read_folder(given.cubins, "sm_90a"))
    with tempfile.TemporaryDirectory() as folder:
        write_checkpoint(load_config("tiny"), Path(folder) / "tiny")
        fine = [globals()[section](Path(folder) / "tiny", device) for section in given.sections]
    return int(not all(fine))


if __name__ == "__main__":
    sys.exit(main())
