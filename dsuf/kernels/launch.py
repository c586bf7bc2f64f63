"""Launches cubins through cuda.core: load, set the shared memory limit, launch with grid, cluster and dependence.

    kernels = Loaded.folder(path)              # what `dsuf build --out` wrote
    kernels["hc.fold"].launch(stream, x, y, dependent=True)

Under a graph builder the same call captures. A launch takes its arguments in the kernel's order (device addresses and
plain numbers), allocates nothing and never synchronises. cuda.core is imported when the first cubin is loaded, so that
machines without a GPU pay nothing.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dsuf.errors import DeviceError

if TYPE_CHECKING:
    from dsuf.kernels.build import Built

MANIFEST = "kernels.json"
STATIC_SHARED = 48 * 1024  # more than this must be asked for
ARGUMENT = {"s64": "int64", "u64": "uint64", "s32": "int32", "u32": "uint32", "f32": "float32"}  # in numpy


@dataclass(frozen=True)
class Cubin:
    """One compiled kernel and all that a launch needs to know of it."""

    name: str
    chip: str
    entry: str
    code: bytes
    threads: int
    grid: tuple[int, int]
    shared: int
    cluster: int
    parameters: tuple[str, ...]

    @classmethod
    def of(cls, name: str, built: Built) -> Cubin:
        """From what dsuf.kernels.build made, under the name of its catalogue entry."""
        return cls(
            name, built.chip, built.facts.entry, built.cubin, built.threads, built.grid, built.shared, built.cluster,
            built.parameters,
        )  # fmt: skip


def write_folder(folder: Path, cubins: Iterable[Cubin]) -> None:
    """Write cubins and their manifest, to be loaded where nothing can compile."""
    folder.mkdir(parents=True, exist_ok=True)
    rows = []
    for cubin in cubins:
        digest = hashlib.sha256(cubin.code).hexdigest()
        file = f"{cubin.chip}-{digest[:24]}.cubin"
        (folder / file).write_bytes(cubin.code)
        row = {key: value for key, value in asdict(cubin).items() if key != "code"}
        rows.append({**row, "file": file, "sha256": digest})
    (folder / MANIFEST).write_text(json.dumps(rows, indent=1), encoding="utf-8")


def read_folder(folder: Path, chip: str) -> list[Cubin]:
    """The cubins of one chip. Raises DeviceError if the folder is not what `dsuf build --out` writes."""
    try:
        rows = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))
        found = []
        for row in rows:
            if row["chip"] != chip:
                continue
            code = (folder / row["file"]).read_bytes()
            if hashlib.sha256(code).hexdigest() != row["sha256"]:
                raise DeviceError(f"{folder / row['file']} is damaged. Run `dsuf build --out {folder}` again.")
            fields = {k: v for k, v in row.items() if k not in ("file", "sha256")}
            fields["grid"], fields["parameters"] = tuple(row["grid"]), tuple(row["parameters"])
            found.append(Cubin(code=code, **fields))
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise DeviceError(f"{folder} holds no readable kernels ({error}). Run `dsuf build --out {folder}`.") from None
    if not found:
        raise DeviceError(f"{folder} holds no kernels for {chip}. Run `dsuf build --sm {chip} --out {folder}`.")
    return found


class Launcher:
    """One kernel on the current device."""

    def __init__(self, cubin: Cubin) -> None:
        from cuda.bindings import driver
        from cuda.core import Device, ObjectCode

        self.cubin = cubin
        self._code = ObjectCode.from_cubin(cubin.code)  # keeps the module alive
        self.kernel = self._code.get_kernel(cubin.entry)
        if cubin.shared > STATIC_SHARED:
            attribute = driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
            handle, device = driver.CUkernel(int(self.kernel.handle)), driver.CUdevice(Device().device_id)
            status = driver.cuKernelSetAttribute(attribute, cubin.shared, handle, device)[0]
            if int(status) != 0:
                raise DeviceError(f"{cubin.name} needs {cubin.shared} bytes of shared memory a block: {status.name}")
        self._configurations: dict[tuple[Any, ...], Any] = {}

    def launch(
        self,
        stream: Any,
        *args: int | float,
        grid: tuple[int, int] | None = None,
        shared: int | None = None,
        dependent: bool = False,
        cooperative: bool = False,
    ) -> None:
        """Launch or capture. dependent: may start before the kernel before has ended (griddepcontrol).

        shared: dynamic shared memory of a block, if this launch needs less than the kernel's most.
        """
        import numpy as np
        from cuda.core import launch

        if len(args) != len(self.cubin.parameters):
            raise DeviceError(f"{self.cubin.name} takes {len(self.cubin.parameters)} arguments, {len(args)} given")
        values = [getattr(np, ARGUMENT[kind])(value) for kind, value in zip(self.cubin.parameters, args, strict=True)]
        configuration = self._configuration(grid or self.cubin.grid, shared, dependent, cooperative)
        launch(stream, configuration, self.kernel, *values)

    def _configuration(self, grid: tuple[int, int], shared: int | None, dependent: bool, cooperative: bool) -> Any:
        key = (grid, shared, dependent, cooperative)
        if key not in self._configurations:
            from cuda.core import LaunchConfig

            size = self.cubin.shared if shared is None else shared
            options: dict[str, Any] = {"block": self.cubin.threads, "shmem_size": size}
            if self.cubin.cluster > 1:  # cuda.core counts the grid in clusters
                options["cluster"] = (self.cubin.cluster, 1)
                grid = (grid[0] // self.cubin.cluster, grid[1])
            if dependent:
                options["programmatic_stream_serialization"] = True
            if cooperative:
                options["is_cooperative"] = True
            self._configurations[key] = LaunchConfig(grid=grid, **options)
        return self._configurations[key]


class Loaded(Mapping[str, Launcher]):
    """Kernels by the name of their catalogue entry, loaded on the current device."""

    def __init__(self, cubins: Iterable[Cubin]) -> None:
        self._launchers = {cubin.name: Launcher(cubin) for cubin in cubins}

    @classmethod
    def folder(cls, folder: Path, chip: str) -> Loaded:
        """Everything that `dsuf build --out` wrote for a chip."""
        return cls(read_folder(folder, chip))

    def __getitem__(self, name: str) -> Launcher:
        return self._launchers[name]

    def __iter__(self) -> Any:
        return iter(self._launchers)

    def __len__(self) -> int:
        return len(self._launchers)
