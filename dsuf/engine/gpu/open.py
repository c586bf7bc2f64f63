"""From options to a backend on GPUs: the devices, their kernels, and what must be said before anything is loaded."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

from dsuf.engine.gpu import cubins
from dsuf.engine.gpu.backend import GpuBackend
from dsuf.engine.gpu.device import Device
from dsuf.engine.gpu.launches import width_of
from dsuf.engine.gpu.phases import Phases
from dsuf.engine.gpu.ranks import Rank
from dsuf.engine.options import EngineOptions
from dsuf.errors import ConfigError
from dsuf.kernels.catalogue import Width
from dsuf.kernels.reduce import MOST_RANKS
from dsuf.spec import Spec

if TYPE_CHECKING:
    import numpy as np

    from dsuf.model.checkpoint import Checkpoint


def open_backend(
    options: EngineOptions, class_map: Callable[[Checkpoint], np.ndarray | None] | None, *, graphs: bool = True
) -> GpuBackend:
    """A backend on the GPUs of `options.gpus`, not loaded yet. Raises ConfigError or DeviceError."""
    return GpuBackend(options, class_map, open_devices(options, Spec.load(options.ckpt / "config.json")), graphs=graphs)


def open_devices(options: EngineOptions, spec: Spec, *, dependent: bool = True) -> list[Device]:
    """The devices with all kernels of the checkpoint's width, compiled where they are missing."""
    width = width_of(spec)
    check_shares(spec, width, len(options.gpus))
    if options.kernels is None and options.cache is None:
        raise ConfigError("no folder of kernels and no build cache are given; set DSUF_KERNELS or DSUF_CACHE.")
    phases = Phases()
    phases("devices")
    devices = [Device.open(index, dependent=dependent) for index in options.gpus]
    first = devices[0]
    for device in devices:
        if device.chip != first.chip:
            raise ConfigError(
                f"GPU {first.index} is {first.name} ({first.chip}) and GPU {device.index} {device.name} "
                f"({device.chip}): ranks must agree in every bit, so one engine runs on GPUs of one kind. Name such."
            )
    phases("finding kernels")
    found = cubins.find(first.chip, width.label, options.cache, options.kernels)
    phases("loading kernels")
    for device in devices:
        device.add_kernels(found)
    names = ", ".join(f"GPU {device.index} ({device.name})" for device in devices)
    phases.tell(f"{names} with {len(found)} kernels")
    return devices


@contextlib.contextmanager
def opened(options: EngineOptions, spec: Spec) -> Iterator[list[Device]]:
    """The same, closed afterwards."""
    devices = open_devices(options, spec)
    try:
        yield devices
    finally:
        for device in devices:
            device.close()


def check_shares(spec: Spec, width: Width, count: int) -> None:
    """Raise ConfigError where a checkpoint cannot be shared by so many GPUs."""
    if count not in _sharing(spec, width):
        fitting = ", ".join(map(str, _sharing(spec, width)))
        raise ConfigError(
            f"{count} GPUs cannot share this checkpoint ({spec.num_attention_heads} heads, {spec.n_routed_experts} "
            f"experts): their parts must be equal, with attention kernels for so many heads. Name {fitting} GPUs."
        )


def most_sharing(spec: Spec, count: int) -> int:
    """How many GPUs, of `count`, can share a checkpoint at most. Raises ConfigError without kernels for it."""
    return max(n for n in _sharing(spec, width_of(spec)) if n <= count)


def _sharing(spec: Spec, width: Width) -> list[int]:
    """Every number of GPUs that can share a checkpoint."""
    experts = (spec.n_routed_experts, spec.dspark_n_routed_experts)
    heads = {count: Rank(0, count).share(spec).num_attention_heads for count in range(1, MOST_RANKS + 1)}
    return [n for n, own in heads.items() if own in width.heads.values() and not any(e % n for e in experts)]
