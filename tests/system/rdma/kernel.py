"""A Linux kernel with Soft-RoCE for QEMU guests: Debian's package, downloaded and unpacked, never installed.

`kernel(cache)` gives the image and the modules that a guest needs, in an order that insmod takes. About 70 MB are
downloaded once and 12 MB kept.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path

WANTED = ("virtio_pci", "virtio_net", "9p", "9pnet_virtio", "rdma_rxe", "ib_uverbs", "rdma_ucm", "virtio_rng")
# The checksum of RoCE is looked up by name when it is needed; no module lists it.
LOOKED_UP = ("crc32_generic", "crc32_pclmul")
METAPACKAGE = "linux-image-amd64"


@dataclass(frozen=True)
class Kernel:
    """An image to boot and modules to load, in order."""

    image: Path
    modules: list[Path]


def kernel(cache: Path) -> Kernel:
    """The kernel kept in `cache`, downloaded if it is not there. Raises RuntimeError with what to do."""
    folder = cache / "kernel"
    if not folder.exists():
        cache.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=cache) as scratch:
            kept = _unpack(_download(Path(scratch)), Path(scratch))
            kept.rename(folder)
    return Kernel(folder / "vmlinuz", sorted(folder.glob("*.ko")))


def _download(scratch: Path) -> Path:
    try:
        depends = _run(["apt-cache", "depends", METAPACKAGE])
        package = re.search(r"Depends: (linux-image-\S+)", depends).group(1)
        _run(["apt-get", "download", "-q", package], cwd=scratch)
        return next(scratch.glob("*.deb"))
    except (OSError, subprocess.CalledProcessError, AttributeError, StopIteration) as error:
        raise RuntimeError(
            f"the kernel for QEMU guests could not be downloaded ({error}). It is Debian's {METAPACKAGE}: "
            "run `apt-get update`, and see that `apt-get download` works here"
        ) from None


def _unpack(package: Path, scratch: Path) -> Path:
    """A folder of vmlinuz and NN-module.ko from the package."""
    _run(["dpkg-deb", "-x", str(package), str(scratch / "whole")])
    kept = scratch / "kept"
    kept.mkdir()
    shutil.copy(next(scratch.glob("whole/boot/vmlinuz-*")), kept / "vmlinuz")
    for number, module in enumerate(_in_order(scratch / "whole")):
        shutil.copy(module, kept / f"{number:02d}-{module.name}")
    return kept


def _in_order(root: Path) -> list[Path]:
    """The wanted modules and all that they need, each after what it needs."""
    files = {_module_name(path): path for path in root.glob("lib/modules/*/kernel/**/*.ko")}
    built_in = {
        _module_name(Path(line))
        for listing in root.glob("lib/modules/*/modules.builtin")
        for line in listing.read_text().split()
    }
    order: list[Path] = []

    def add(name: str) -> None:
        if name in built_in or files[name] in order:
            return
        about = files[name].read_bytes()
        needed = re.search(rb"\0depends=([^\0]*)\0", about).group(1).decode().split(",")
        softly = re.search(rb"\0softdep=pre: ([^\0]*)\0", about)
        needed += softly.group(1).decode().split() if softly else []
        for other in (other.replace("-", "_") for other in needed if other):
            if other in files:
                add(other)
        order.append(files[name])

    for name in (*(name for name in LOOKED_UP if name in files), *WANTED):
        add(name)
    return order


def _module_name(path: Path) -> str:
    return path.name.partition(".ko")[0].replace("-", "_")


def _run(command: list[str], cwd: Path | None = None) -> str:
    return subprocess.run(command, cwd=cwd, check=True, capture_output=True, text=True).stdout
