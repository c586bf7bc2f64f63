"""Launches cubins: load (cuda.core), set the shared memory limit, launch with grid, cluster and dependence (driver).

    kernels = Loaded.folder(path)              # what `dsuf build --out` wrote
    kernels["hc.fold"].launch(stream, x, y, dependent=True)

Under a graph builder the same call captures. A launch takes its arguments in the kernel's order (device addresses and
plain numbers), allocates nothing and never synchronises. cuda.core is imported when the first cubin is loaded, so that
machines without a GPU pay nothing.
"""

from __future__ import annotations

import ctypes
import hashlib
import json
import struct
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dsuf.errors import DeviceError

if TYPE_CHECKING:
    from dsuf.kernels.build import Built

MANIFEST = "kernels.json"
STATIC_SHARED = 48 * 1024  # more than this must be asked for
PACKED = {"s64": "q", "u64": "Q", "s32": "i4x", "u32": "I4x", "f32": "f4x"}  # for struct, eight bytes each


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


class LaunchFailed(DeviceError):
    """The driver refused a launch, or told of an earlier failure; `status` is its name for it."""

    def __init__(self, name: str, status: str) -> None:
        super().__init__(f"{name}: {status} at the launch")
        self.status = status


class Launcher:
    """One kernel on the current device. Arguments are packed into memory of its own, so one thread launches it."""

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
        self._function = driver.CUfunction(int(self.kernel.handle))  # the driver takes a kernel for a function
        self._call = driver.cuLaunchKernelEx
        self._pack = struct.Struct("<" + "".join(PACKED[kind] for kind in cubin.parameters))
        self._values = ctypes.create_string_buffer(max(self._pack.size, 8))
        first = ctypes.addressof(self._values)
        self._pointers = (ctypes.c_void_p * len(cubin.parameters))(*range(first, first + self._pack.size, 8))
        self._arguments = ctypes.addressof(self._pointers)
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

        shared: dynamic shared memory of a block, if this launch needs less than the kernel's most. stream: of
        cuda.core, or a graph builder of one. Raises LaunchFailed.
        """
        try:
            self._pack.pack_into(self._values, 0, *args)
        except struct.error as error:
            kinds = ", ".join(self.cubin.parameters)
            raise DeviceError(f"{self.cubin.name} takes ({kinds}), it was given {args}: {error}") from None
        handle = int((stream.stream if hasattr(stream, "begin_building") else stream).handle)
        key = (handle, grid, shared, dependent, cooperative)
        configuration = self._configurations.get(key)
        if configuration is None:
            configuration = self._configurations[key] = self._configuration(*key)
        (status,) = self._call(configuration, self._function, self._arguments, 0)
        if status:
            raise LaunchFailed(self.cubin.name, status.name)

    def _configuration(
        self, handle: int, grid: tuple[int, int] | None, shared: int | None, dependent: bool, cooperative: bool
    ) -> Any:
        from cuda.bindings import driver

        names, cluster = driver.CUlaunchAttributeID, self.cubin.cluster
        width, height = grid or self.cubin.grid
        configuration = driver.CUlaunchConfig()
        configuration.gridDimX, configuration.gridDimY, configuration.gridDimZ = width // cluster * cluster, height, 1
        configuration.blockDimX, configuration.blockDimY, configuration.blockDimZ = self.cubin.threads, 1, 1
        configuration.sharedMemBytes = self.cubin.shared if shared is None else shared
        configuration.hStream = driver.CUstream(handle)
        attributes = []
        if cluster > 1:
            attributes.append(_attribute(names.CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION))
            size = attributes[-1].value.clusterDim
            size.x, size.y, size.z = cluster, 1, 1
        if dependent:
            attributes.append(_attribute(names.CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION))
            attributes[-1].value.programmaticStreamSerializationAllowed = 1
        if cooperative:
            attributes.append(_attribute(names.CU_LAUNCH_ATTRIBUTE_COOPERATIVE))
            attributes[-1].value.cooperative = 1
        configuration.attrs, configuration.numAttrs = attributes, len(attributes)
        return configuration


def _attribute(kind: Any) -> Any:
    from cuda.bindings import driver

    attribute = driver.CUlaunchAttribute()
    attribute.id = kind
    return attribute


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
