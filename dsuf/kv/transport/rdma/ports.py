"""The RDMA ports of this machine, read from sysfs: which can be used, by which address, and why the others cannot.

A port counts when it is ACTIVE, its device node can be opened, and it has an address (GID) that peers can reach: any on
InfiniBand, a RoCE v2 one on Ethernet. RoCE v1 is not routed, and an all-zero GID belongs to another network namespace.
The index of a GID means nothing (in a pod the first may be 4), so the whole table is read. What sysfs lacks (the active
MTU and the limits of the device) is asked through verbs by `verbs.py`.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

CLASS = Path("sys/class/infiniband")
VERBS_CLASS = Path("sys/class/infiniband_verbs")
NO_GID = "0000:0000:0000:0000:0000:0000:0000:0000"
IPV4_MAPPED = "0000:0000:0000:0000:0000:ffff:"
LINK_LOCAL = "fe80:"

# What two ports must have in common to reach each other, best first. IPv4 is routed nearly everywhere, link-local only
# inside one Ethernet segment.
KINDS = ("ib", "roce-ipv4", "roce-ipv6", "roce-link-local")


@dataclass(frozen=True, slots=True)
class Gid:
    """One address of a port: `kind` of KINDS, its place in the port's table, and its text as in sysfs."""

    kind: str
    index: int
    address: str


@dataclass(frozen=True, slots=True)
class Port:
    """A usable port. `gids` holds one address a kind, best kind first; `gbps` is speed times width."""

    device: str
    number: int
    gids: tuple[Gid, ...]
    lid: int
    gbps: float
    numa_node: int | None
    netdev: str

    @property
    def name(self) -> str:
        """As a person names it."""
        return f"{self.device}:{self.number}"

    def __str__(self) -> str:
        best = self.gids[0]
        where = f", NUMA node {self.numa_node}" if self.numa_node is not None else ""
        over = f" on {self.netdev}" if self.netdev else ""
        return f"{self.name} ({best.kind}, {self.gbps:g} Gb/s{where}), GID {best.index} {best.address}{over}"


def find(wanted: Sequence[str] | None = None, root: Path = Path("/")) -> tuple[list[Port], list[str]]:
    """(usable ports, fastest first; one reason for each port that is not usable).

    `wanted` names ports (`mlx5_0:1`) or devices (`mlx5_0`); None takes all. A name that is not there is a reason too.
    """
    usable: list[Port] = []
    reasons: list[str] = []
    seen: set[str] = set()
    for device in sorted(_folders(root / CLASS), key=lambda folder: _natural(folder.name)):
        for folder in sorted(_folders(device / "ports"), key=lambda folder: _natural(folder.name)):
            names = {device.name, f"{device.name}:{folder.name}"}
            if wanted is not None and not names & set(wanted):
                continue
            seen |= names
            found = _look(device, folder, root)
            if isinstance(found, Port):
                usable.append(found)
            else:
                reasons.append(f"{device.name}:{folder.name} {found}")
    reasons += [f"{name} is not on this machine" for name in wanted or () if name not in seen]
    return sorted(usable, key=lambda port: -port.gbps), reasons


def _look(device: Path, folder: Path, root: Path) -> Port | str:
    """The port, or why it is not usable."""
    state = _read(folder / "state")
    if not state.endswith("ACTIVE"):
        return f"is {state.partition(': ')[2] or 'in no known state'}, not ACTIVE: check cable, switch and `ip link`"
    node = _device_node(device.name, root)
    if node is None or not os.access(node, os.R_OK | os.W_OK):
        shown = f"/dev/infiniband/{node.name}" if node else "its /dev/infiniband/uverbs*"
        return f"cannot be opened: {shown} is absent or closed to this user (give the container the device)"
    ethernet = _read(folder / "link_layer") == "Ethernet"
    table = list(_gids(folder, ethernet))
    best = {gid.kind: gid for gid, _ in reversed(table)}
    if not best:
        return _no_address(folder, ethernet)
    gids = tuple(best[kind] for kind in KINDS if kind in best)
    numa_node = _read(device / "device/numa_node")
    return Port(
        device=device.name,
        number=int(folder.name),
        gids=gids,
        lid=int(_read(folder / "lid") or "0", 0),
        gbps=_rate(_read(folder / "rate")),
        numa_node=int(numa_node) if numa_node.isdigit() else None,
        netdev=next(netdev for gid, netdev in table if gid == gids[0]),
    )


def _gids(folder: Path, ethernet: bool) -> Iterator[tuple[Gid, str]]:
    """(address, network device) of each entry of the port's table that peers can reach."""
    for index in _table(folder):
        address = _read(folder / f"gids/{index}")
        if address in ("", NO_GID):
            continue
        if not ethernet:
            yield Gid("ib", index, address), ""
        elif _read(folder / f"gid_attrs/types/{index}") == "RoCE v2":
            yield Gid(_roce_kind(address), index, address), _read(folder / f"gid_attrs/ndevs/{index}")


def _roce_kind(address: str) -> str:
    if address.startswith(IPV4_MAPPED):
        return "roce-ipv4"
    return "roce-link-local" if address.startswith(LINK_LOCAL) else "roce-ipv6"


def _no_address(folder: Path, ethernet: bool) -> str:
    if all(_read(folder / f"gids/{index}") in ("", NO_GID) for index in _table(folder)):
        return (
            "is ACTIVE and has no address here: its GIDs belong to another network namespace "
            "(use the host's network, SR-IOV or macvlan), or its network device has no IP address yet"
        )
    return "has RoCE v1 addresses only, which are not routed" if ethernet else "has no GID"


def _table(folder: Path) -> list[int]:
    return sorted(int(entry.name) for entry in _folders(folder / "gids"))


def _device_node(device: str, root: Path) -> Path | None:
    for folder in _folders(root / VERBS_CLASS):
        if _read(folder / "ibdev") == device:
            return root / "dev/infiniband" / folder.name
    return None


def _rate(text: str) -> float:
    """Gb/s of a line such as `400 Gb/sec (4X NDR)`; 0 when there is none."""
    match = re.match(r"([\d.]+) Gb", text)
    return float(match.group(1)) if match else 0.0


def _natural(name: str) -> list[tuple[int, str]]:
    """Sorts mlx5_2 before mlx5_10."""
    return [(int(digits or "0"), text) for text, digits in re.findall(r"(\D*)(\d*)", name)]


def _folders(folder: Path) -> list[Path]:
    try:
        return list(folder.iterdir())
    except OSError:  # no such class: a kernel without InfiniBand support
        return []


def _read(path: Path) -> str:
    """A file's text, "" where there is none: entries of an empty GID slot answer EINVAL."""
    try:
        return path.read_text().strip()
    except OSError:
        return ""
