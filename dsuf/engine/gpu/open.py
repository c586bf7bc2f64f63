"""From options to a backend on a GPU: the device, its kernels, and what must be said before anything is loaded."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from dsuf.engine.gpu import cubins
from dsuf.engine.gpu.backend import GpuBackend
from dsuf.engine.gpu.device import Device
from dsuf.engine.gpu.launches import width_of
from dsuf.engine.gpu.phases import Phases
from dsuf.engine.options import EngineOptions
from dsuf.errors import ConfigError
from dsuf.spec import Spec

if TYPE_CHECKING:
    import numpy as np

    from dsuf.model.checkpoint import Checkpoint


def open_backend(
    options: EngineOptions, class_map: Callable[[Checkpoint], np.ndarray | None] | None, *, graphs: bool = True
) -> GpuBackend:
    """A backend on the one GPU of `options.gpus`, not loaded yet. Raises ConfigError or DeviceError."""
    return GpuBackend(options, class_map, open_device(options, Spec.load(options.ckpt / "config.json")), graphs=graphs)


def open_device(options: EngineOptions, spec: Spec, *, dependent: bool = True) -> Device:
    """The device with all kernels of the checkpoint's width, compiled where they are missing."""
    if len(options.gpus) != 1:
        raise ConfigError(f"{len(options.gpus)} GPUs were asked for; the engine runs on one so far.")
    width = width_of(spec)
    phases = Phases()
    phases("device")
    device = Device.open(options.gpus[0], dependent=dependent)
    if options.kernels is None and options.cache is None:
        raise ConfigError("no folder of kernels and no build cache are given; set DSUF_KERNELS or DSUF_CACHE.")
    phases("finding kernels")
    found = cubins.find(device.chip, width.label, options.cache, options.kernels)
    phases("loading kernels")
    device.add_kernels(found)
    phases.tell(f"GPU {device.index} ({device.name}) with {len(found)} kernels")
    return device
