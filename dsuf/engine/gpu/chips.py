"""GPUs that kernels are made for, the oldest driver that runs them, and what is said of others."""

from __future__ import annotations

from dsuf.errors import DeviceError

CHIPS = {(9, 0): "sm_90a", (10, 0): "sm_100a", (10, 3): "sm_103a"}  # by compute capability
NOT_RUN = ("sm_100a", "sm_103a")  # whose kernels are compiled, and right on an interpreter, but have met no such GPU
OLDEST_DRIVER = 13000  # CUDA 13.0, driver 580, as cuDriverGetVersion gives it


def look(index: int) -> tuple[str, str]:
    """(chip, name) of a device. Raises DeviceError: no driver, one too old, no such GPU, one of another kind."""
    try:
        from cuda.bindings import driver
    except ImportError as error:
        raise DeviceError(
            f"cuda-python cannot be imported ({error}). Install dsuf on Linux, or use --gpus 0."
        ) from None
    try:
        (status,) = driver.cuInit(0)
    except RuntimeError:  # cuda.pathfinder found no libcuda.so.1
        raise DeviceError("no NVIDIA driver: libcuda.so.1 was not found. Install it, or use --gpus 0.") from None
    if status.name == "CUDA_ERROR_NO_DEVICE":
        raise DeviceError(
            f"GPU {index} was asked for, none can be seen (is CUDA_VISIBLE_DEVICES empty?). Use --gpus 0."
        )
    if int(status) != 0:
        raise DeviceError(f"the NVIDIA driver does not start: {status.name}. Check `nvidia-smi`, or use --gpus 0.")
    check_driver(int(driver.cuDriverGetVersion()[1]))
    count = int(driver.cuDeviceGetCount()[1])
    if index >= count:
        raise DeviceError(f"GPU {index} was asked for, {count} can be seen. Name one of them, or use --gpus 0.")
    handle, attribute = driver.cuDeviceGet(index)[1], driver.CUdevice_attribute
    major = driver.cuDeviceGetAttribute(attribute.CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR, handle)[1]
    minor = driver.cuDeviceGetAttribute(attribute.CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR, handle)[1]
    name = driver.cuDeviceGetName(128, handle)[1].split(b"\0")[0].decode()
    return chip_of(major, minor, name), name


def check_driver(version: int) -> None:
    """Raise DeviceError for a driver that serves too old a CUDA; `version` as cuDriverGetVersion gives it."""
    if version < OLDEST_DRIVER:
        raise DeviceError(
            f"the NVIDIA driver serves CUDA {version // 1000}.{version % 1000 // 10}; this build needs "
            f"{OLDEST_DRIVER // 1000}.{OLDEST_DRIVER % 1000 // 10} (driver 580 or newer). Update it, or use --gpus 0."
        )


def chip_of(major: int, minor: int, name: str) -> str:
    """The chip whose kernels a compute capability runs. Raises DeviceError where there are none."""
    if (major, minor) not in CHIPS:
        known = ", ".join(f"{a}.{b}" for a, b in CHIPS)
        raise DeviceError(
            f"{name} has compute capability {major}.{minor}; kernels exist for {known}. Use another GPU or --gpus 0."
        )
    return CHIPS[major, minor]
