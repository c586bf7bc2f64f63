"""Prompts on a loaded backend for benchmarks: how long they take, which kernels, and the rate of a product.

run = PromptRun(backend)
run.prompt(131072)                seconds, from the first pass until the last row has run
run.profile(131072)               launches and microseconds by kernel, one at a time
run.product_flops()               operations a second of a plain bf16 product
"""

from __future__ import annotations

import time
from collections import Counter
from typing import Any

import numpy as np

from dsuf.engine.gpu.backend import GpuBackend
from dsuf.engine.messages import Request, Sampling
from dsuf.engine.sequence import Sequence
from dsuf.kernels.pack import BF16_CHUNK, chunk_width

ROWS, OUTPUTS = 2048, 8192  # of the product
TIMES = 5


class PromptRun:
    """Random prompts, one at a time."""

    def __init__(self, backend: GpuBackend) -> None:
        self.backend, self.device = backend, backend.machine.device
        self._rng = np.random.default_rng(2)
        self._number = 0

    def prompt(self, length: int) -> float:
        """Read a prompt of random ids, to its first token."""
        spec = self.backend.machine.spec
        self._number += 1
        ids = self._rng.integers(3, spec.vocab_size - 1, length).tolist()
        request = Request(f"prompt-{self._number}", ids, 1, Sampling(temperature=0), ignore_eos=True)
        sequence = Sequence(request, 1, False, None, None)
        self._synchronize()
        begun = time.perf_counter()
        while not self.backend.prefill(sequence, length, float("inf")):
            pass
        self._synchronize()
        took = time.perf_counter() - begun
        self.backend.release(sequence)
        self.backend.poll()
        return took

    def _synchronize(self) -> None:
        for machine in self.backend.machines:
            machine.device.synchronize()

    def profile(self, length: int) -> dict[str, tuple[int, float]]:
        """Launches and microseconds by kernel over a prompt, each launch between two events of its own."""
        launch, marks = self.device.launch, []

        def timed(name: str, *args: float, **options: Any) -> None:
            before = self.device.record(timing=True)
            launch(name, *args, **(options | {"dependent": False}))
            marks.append((name, before, self.device.record(timing=True)))

        self.device.launch = timed
        try:
            self.prompt(length)
        finally:
            self.device.launch = launch
        launches: Counter[str] = Counter(name for name, _, _ in marks)
        seconds: Counter[str] = Counter()
        for name, before, after in marks:
            seconds[name] += after.since(before)
        return {name: (launches[name], total * 1e6) for name, total in seconds.most_common()}

    def product_flops(self) -> float:
        """Of dense.bf16 over rows of the head."""
        device, weights, k = self.device, self.backend.machine.model.weights, self.backend.machine.spec.hidden_size
        x, y = device.allocate(2 * ROWS * k, "workspace"), device.allocate(4 * ROWS * OUTPUTS, "workspace")
        device.zero(x, 2 * ROWS * k)
        sizes, best = (ROWS, OUTPUTS, k, 1, chunk_width(k, BF16_CHUNK)), float("inf")
        for _ in range(TIMES):
            before = device.record(timing=True)
            device.launch("dense.bf16", weights.head, x, y, *sizes, dependent=False)
            after = device.record(timing=True)
            after.wait()
            best = min(best, after.since(before))
        return 2 * ROWS * OUTPUTS * k / best
