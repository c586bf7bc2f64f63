"""What `dsuf doctor` says about RDMA on this machine: kernel, library, ports, lockable memory, each with its fix."""

from __future__ import annotations

import resource
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from dsuf.kv.transport.base import TransportUnavailable
from dsuf.kv.transport.rdma import ports, verbs

OTHERWISE = "caches travel over TCP and shared memory"


@dataclass(frozen=True, slots=True)
class Fact:
    """One finding; `fix` is empty when there is nothing to mend."""

    text: str
    fix: str = ""


def describe(root: Path = Path("/")) -> list[Fact]:
    """Findings, none of which keeps a server from starting."""
    found, reasons = ports.find(root=root)
    if not found and not reasons:
        return [Fact(f"no RDMA device; {OTHERWISE}")]
    return [
        *(Fact(f"RDMA port {port}") for port in found),
        *(Fact(f"RDMA port {reason}", f"until then {OTHERWISE}") for reason in reasons),
        *_pyverbs(),
        _locked_memory(),
    ]


def _pyverbs() -> Iterator[Fact]:
    try:
        verbs.load()
    except TransportUnavailable as error:
        yield Fact(f"RDMA cannot be used: {OTHERWISE}", str(error))
    else:
        yield Fact("pyverbs matches the machine's libibverbs")


def _locked_memory() -> Fact:
    _, hard = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    if hard == resource.RLIM_INFINITY or verbs.may_lock_any():
        return Fact("any amount of memory may be locked for RDMA")
    return Fact(
        f"{hard} bytes of memory may be locked for RDMA, --kv-host-bytes must fit",
        "`ulimit -l unlimited`, LimitMEMLOCK=infinity in a systemd unit, or the capability IPC_LOCK in a container",
    )
