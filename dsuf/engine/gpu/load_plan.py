"""What loading a checkpoint will read, take and last, by phase and rank; computed from the config alone.

    for phase in phases(spec, ranks=4, placement="device-sharded"): print(phase.line())

Ranks read their shares beside each other from the same files, so that what all of them need comes from the disk once.
The seconds are those of reading at READ_GB_PER_S and, in host memory, of page-locking.
"""

from __future__ import annotations

from dataclasses import dataclass

from dsuf.engine.gpu.engram_tables import PIECE, REGISTER_S_PER_GIB, Placement
from dsuf.engine.gpu.weight_plan import Part, plan
from dsuf.spec import Spec

READ_GB_PER_S = 4.0  # of files that the page cache does not hold yet, on an H200's host; 19 from the page cache
PHASES = {
    "embedding, head and dense": ("embedding", "head", "dense"),
    "routed experts": ("experts",),
    "drafter": ("drafter dense", "drafter experts"),
    "Engram tables": ("engram tables",),
}


@dataclass(frozen=True)
class Phase:
    """One step of loading; bytes are decimal."""

    name: str
    stored: int  # bytes in the files
    device: tuple[int, ...]  # bytes on each rank's device
    host: int  # bytes of page-locked memory
    seconds: float

    def line(self) -> str:
        """For people."""
        least, most = min(self.device) / 1e9, max(self.device) / 1e9
        there = f"{most:.2f} GB" if most - least < 0.005 else f"{least:.2f} to {most:.2f} GB"
        host = f", {self.host / 1e9:.1f} GB page-locked in the host" if self.host else ""
        ranks = "a rank" if len(self.device) > 1 else "on the device"
        return f"{self.name}: {self.stored / 1e9:.2f} GB read, {there} {ranks}{host}, about {self.seconds:.0f} s"


def phases(spec: Spec, ranks: int, placement: Placement, page_bytes: int = 4096) -> list[Phase]:
    """In the order of loading; `page_bytes` of the host's memory for Engram tables."""
    whole = plan(spec)
    shares = [plan(spec, rank=rank, ranks=ranks) for rank in range(ranks)]
    found = []
    for name, kinds in PHASES.items():
        read = sum(stored(part) for part in whole if part.kind in kinds)
        device = tuple(sum(part.nbytes for part in share if part.kind in kinds) for share in shares)
        host, spent = 0, read / (READ_GB_PER_S * 1e9)
        if name == "Engram tables" and placement == "host":
            device, host = (0,) * ranks, read
            spent += host / PIECE * REGISTER_S_PER_GIB[page_bytes]
        found.append(Phase(name, read, device, host, spent))
    return found


def stored(part: Part) -> int:
    """Bytes of a part's tensors in the files."""
    n, k = part.n, part.k
    if part.layout == "plain":
        return n
    if part.layout == "qk":
        return 2 * 2 * n * k
    if part.layout == "bf16":
        return 2 * n * k
    if part.layout == "fp8":
        return n * k + -(-n // 32) * -(-k // 32)
    return part.experts * (n * k // 2 + n * k // 32)
