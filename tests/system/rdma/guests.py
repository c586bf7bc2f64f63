"""QEMU guests with two Soft-RoCE ports each, in which a module of checks runs.

No disk image is made: a guest boots Debian's kernel with a small archive written here, and mounts the host's root
read-only over 9p, so that its Python, packages and source are the very files of the host. A second share carries the
command and what came of it. Two guests are joined by socket pairs, wires that nothing else can reach. The emulator is
QEMU's own (TCG): stock kernels do not start under the para-virtual KVM that some build machines have.
"""

from __future__ import annotations

import contextlib
import gzip
import io
import json
import os
import shlex
import shutil
import socket
import stat
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from tests.system.rdma.kernel import Kernel, kernel

PACKAGES = "qemu-system-x86 busybox-static iproute2 python3-pyverbs ibverbs-providers"
REPOSITORY = Path(__file__).parents[3]
MTU = 9000  # so that the path MTU of RoCE is 4096
NETWORKS = ("192.0.2", "198.51.100")  # of the two ports; documentation addresses, inside the wires only
AFTER_A_FAILURE_S = 20.0  # the other guest may still say what it saw

INIT = r"""#!/bin/busybox sh
export PATH=/bin
for d in proc sys dev ro out; do busybox mkdir -p /$d; done
busybox mount -t proc proc /proc; busybox mount -t sysfs sys /sys; busybox mount -t devtmpfs dev /dev
for m in /mods/*.ko; do busybox insmod $m || echo "insmod $m failed"; done
O=trans=virtio,version=9p2000.L,msize=512000
busybox mount -t 9p -o ro,cache=loose,$O hostroot /ro || echo "no host root"
busybox mount -t 9p -o cache=none,$O out /out || echo "no share"
for k in proc sys dev; do busybox mount -o bind /$k /ro/$k; done
busybox mkdir -p /dev/shm /dev/pts; busybox mount -t tmpfs shm /dev/shm; busybox mount -t tmpfs run /ro/run
busybox mount -o bind /out /ro/mnt
for a in $(busybox cat /proc/cmdline); do case $a in guest.*) export "${a#guest.}";; esac; done
busybox ip link set lo up
for n in 0 1; do
  busybox ip link set eth$n mtu $MTU up
  eval "busybox ip addr add \$NET$n.$((INDEX + 1))/24 dev eth$n"
done
busybox chroot /ro /bin/sh /mnt/run.sh > /out/log.$INDEX 2>&1
echo $? > /out/code.$INDEX
busybox sync; echo o > /proc/sysrq-trigger; busybox sleep 30
"""

RUN = r"""export GUEST_INDEX=$INDEX HOME=/dev/shm TMPDIR=/dev/shm XDG_RUNTIME_DIR=/dev/shm XDG_CACHE_HOME=/dev/shm/cache
export PYTHONDONTWRITEBYTECODE=1 PYTHONUNBUFFERED=1 PATH={path}
for n in 0 1; do rdma link add rxe$n type rxe netdev eth$n || echo "no Soft-RoCE port on eth$n"; done
i=0; while [ $i -lt 50 ] && ! [ -e /dev/infiniband/uverbs1 ]; do i=$((i+1)); sleep 0.1; done
cd {folder} && exec {python} -m tests.system.rdma.inside {module}
"""


@dataclass
class Outcome:
    """What came of one check in a guest: `error` is empty or a traceback."""

    name: str
    seconds: float
    error: str
    notes: list[str]


@dataclass
class GuestRun:
    """One guest: exit code of its command (None: it never ended), its output, and the checks that it ran."""

    code: int | None
    log: str
    outcomes: dict[str, Outcome] = field(default_factory=dict)

    def expect(self, name: str) -> Outcome:
        """Raise AssertionError, with what the guest printed, unless this check ran and was good."""
        outcome = self.outcomes.get(name)
        if outcome is None:
            raise AssertionError(f"{name} did not run in the guest, which ended with {self.code}:\n{self.log}")
        if outcome.error:
            raise AssertionError(f"{name} failed in the guest:\n{outcome.error}\noutput of the guest:\n{self.log}")
        return outcome


def run_guests(module: str, count: int, folder: Path, *, memory_mb: int = 512, timeout_s: float) -> list[GuestRun]:
    """Run the checks of a module of this package in 1 or 2 guests. Raises RuntimeError when they cannot be started."""
    _check_programs()
    booted = kernel(cache_folder())
    (folder / "run.sh").write_text(
        RUN.format(
            path=shlex.quote(os.environ["PATH"] + ":/usr/sbin:/sbin"),
            folder=shlex.quote(str(REPOSITORY)),
            python=shlex.quote(sys.executable),
            module=shlex.quote(module),
        )
    )
    (folder / "initrd").write_bytes(_initial_files(booted))
    with contextlib.ExitStack() as stack:
        wires = [_wire(stack) for _ in NETWORKS]
        guests = [_start(booted, index, folder, [wire[index] for wire in wires], memory_mb) for index in range(count)]
        stack.callback(_end, guests)
        _wait(guests, folder, timeout_s)
    return [_result(folder, index) for index in range(count)]


def cache_folder() -> Path:
    """Where the kernel is kept from one run to the next."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "dsuf-tests"


def _check_programs() -> None:
    missing = [name for name in ("qemu-system-x86_64", "busybox", "dpkg-deb") if shutil.which(name) is None]
    if shutil.which("rdma", path=os.environ["PATH"] + ":/usr/sbin:/sbin") is None:
        missing.append("rdma")
    try:
        import pyverbs.device  # noqa: F401
    except ImportError:
        missing.append("pyverbs in this Python")
    if missing:
        raise RuntimeError(
            f"missing: {', '.join(missing)}. Run `apt-get install {PACKAGES}` and link the distribution's pyverbs: "
            "`ln -s /usr/lib/python3/dist-packages/pyverbs` into the site-packages of a Python of its version"
        )


def _wire(stack: contextlib.ExitStack) -> tuple[socket.socket, socket.socket]:
    pair = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
    for end in pair:
        stack.enter_context(end)
        for buffer in (socket.SO_SNDBUF, socket.SO_RCVBUF):
            end.setsockopt(socket.SOL_SOCKET, buffer, 4 << 20)
    return pair


def _start(
    booted: Kernel, index: int, folder: Path, wires: list[socket.socket], memory_mb: int
) -> subprocess.Popen[bytes]:
    networks = " ".join(f"guest.NET{number}={network}" for number, network in enumerate(NETWORKS))
    append = (
        "console=ttyS0 quiet panic=-1 mitigations=off nokaslr audit=0 random.trust_cpu=on tsc=reliable no_timer_check "
        f"guest.INDEX={index} guest.MTU={MTU} {networks}"
    )
    command = ["qemu-system-x86_64", "-nodefaults", "-no-user-config", "-display", "none", "-no-reboot"]
    command += ["-M", "q35,hpet=off", "-accel", "tcg,thread=multi,tb-size=256", "-cpu", "max", "-smp", "1"]
    command += ["-m", str(memory_mb), "-kernel", str(booted.image), "-initrd", str(folder / "initrd")]
    command += ["-append", append, "-serial", f"file:{folder}/console.{index}", "-device", "virtio-rng-pci"]
    host = "local,path=/,mount_tag=hostroot,security_model=none,readonly=on,multidevs=remap"
    command += ["-virtfs", host, "-virtfs", f"local,path={folder},mount_tag=out,security_model=none"]
    for number, wire in enumerate(wires):
        address = f"52:54:00:00:{number:02x}:{index + 1:02x}"
        command += ["-netdev", f"socket,id=n{number},fd={wire.fileno()}"]
        command += ["-device", f"virtio-net-pci,netdev=n{number},mac={address},host_mtu={MTU}"]
    return subprocess.Popen(command, pass_fds=[wire.fileno() for wire in wires], stdin=subprocess.DEVNULL)


def _wait(guests: list[subprocess.Popen[bytes]], folder: Path, timeout_s: float) -> None:
    until_s = time.monotonic() + timeout_s
    while any(guest.poll() is None for guest in guests) and time.monotonic() < until_s:
        codes = [_code(folder, index) for index in range(len(guests))]
        if any(code not in (None, 0) for code in codes):
            until_s = min(until_s, time.monotonic() + AFTER_A_FAILURE_S)
        time.sleep(0.2)


def _end(guests: list[subprocess.Popen[bytes]]) -> None:
    for guest in guests:
        guest.kill()
        guest.wait()


def _result(folder: Path, index: int) -> GuestRun:
    log, console = folder / f"log.{index}", folder / f"console.{index}"
    text = log.read_text(errors="replace") if log.exists() else ""
    code = _code(folder, index)
    if code is None and console.exists():
        text += "\nconsole of the guest:\n" + console.read_text(errors="replace")[-3000:]
    run = GuestRun(code, text)
    outcomes = folder / f"outcomes.{index}"
    for line in outcomes.read_text().splitlines() if outcomes.exists() else []:
        outcome = Outcome(**json.loads(line))
        run.outcomes[outcome.name] = outcome
    return run


def _code(folder: Path, index: int) -> int | None:
    path = folder / f"code.{index}"
    text = path.read_text().strip() if path.exists() else ""
    return int(text) if text else None


def _initial_files(booted: Kernel) -> bytes:
    """The archive that the kernel unpacks into memory: busybox, the modules, and what to do first."""
    folder, program, plain = stat.S_IFDIR | 0o755, stat.S_IFREG | 0o755, stat.S_IFREG | 0o644
    entries = [(name, folder, b"") for name in ("bin", "mods", "proc", "sys", "dev", "ro", "out")]
    entries.append(("bin/busybox", program, Path(shutil.which("busybox")).read_bytes()))
    entries.append(("bin/sh", stat.S_IFLNK | 0o777, b"busybox"))
    entries.append(("init", program, INIT.encode()))
    entries += [(f"mods/{module.name}", plain, module.read_bytes()) for module in booted.modules]
    return gzip.compress(b"".join(_archive(entries)), 1)


def _archive(entries: Iterable[tuple[str, int, bytes]]) -> Iterator[bytes]:
    """The kernel's "newc" cpio format, from (name, mode, data)."""
    for number, (name, mode, data) in enumerate([*entries, ("TRAILER!!!", 0, b"")], 1):
        spelled = name.encode() + b"\0"
        out = io.BytesIO()
        values = (number, mode, 0, 0, 1, 0, len(data), 0, 0, 0, 0, len(spelled), 0)
        out.write(b"070701" + b"".join(b"%08X" % value for value in values))
        out.write(spelled)
        out.write(b"\0" * (-out.tell() % 4))
        out.write(data)
        out.write(b"\0" * (-out.tell() % 4))
        yield out.getvalue()
