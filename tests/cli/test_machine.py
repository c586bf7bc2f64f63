"""What the machine has, and what --gpus does with it."""

from __future__ import annotations

import sys
import types

import pytest

from dsuf.cli import machine
from dsuf.cli.machine import Gpu, Gpus, choose_gpus, find_gpus
from dsuf.errors import ConfigError, DeviceError

H200 = Gpu(0, "NVIDIA H200", "sm_90", 150 * 10**9)


def test_cores_and_memory_are_real():
    assert machine.cpu_name()
    assert 1 <= machine.cpu_cores() <= 4096
    total, available = machine.memory_bytes()
    assert 0 < available <= total


@pytest.mark.parametrize("flag", [None, "0"])
def test_zero_is_the_cpu_as_is_a_machine_without_device_files_and_no_driver_is_asked(monkeypatch, flag):
    monkeypatch.setattr(machine, "DEVICE_FILES", ())
    monkeypatch.setattr(machine, "find_gpus", lambda: pytest.fail("asked the driver"))
    assert choose_gpus(flag) == ()


@pytest.mark.parametrize(
    ("gpu", "driver", "chosen"),
    [
        (H200, "13.0", (0,)),
        (H200, "12.4", ()),
        (Gpu(0, "NVIDIA L4", "sm_89", 24 * 10**9), "13.0", ()),
        (None, None, ()),
    ],
)
def test_without_a_flag_a_gpu_that_the_engine_runs_on_is_used(monkeypatch, tmp_path, gpu, driver, chosen):
    monkeypatch.setattr(machine, "DEVICE_FILES", (tmp_path,))
    monkeypatch.setattr(machine, "find_gpus", lambda: Gpus((gpu,) if gpu else (), driver=driver))
    assert choose_gpus(None) == chosen


@pytest.mark.parametrize("flag", ["2", "1,", "0,1"])
def test_more_than_there_are_is_refused_with_what_was_found(monkeypatch, flag):
    monkeypatch.setattr(machine, "find_gpus", lambda: Gpus((H200,), driver="13.0"))
    with pytest.raises(DeviceError, match=r"more than this machine has\. Found: 0: NVIDIA H200 \(sm_90\)"):
        choose_gpus(flag)


@pytest.mark.parametrize("flag", ["1", "0,"])
def test_a_gpu_that_is_there_is_used(monkeypatch, flag):
    monkeypatch.setattr(machine, "find_gpus", lambda: Gpus((H200,), driver="13.0"))
    assert choose_gpus(flag) == (0,)


def test_several_are_used_where_they_are_named_and_as_many_as_an_engine_takes_where_none_is(monkeypatch, tmp_path):
    many = Gpus(tuple(Gpu(i, "NVIDIA H200", "sm_90", 150 * 10**9) for i in range(16)), driver="13.0")
    monkeypatch.setattr(machine, "DEVICE_FILES", (tmp_path,))
    monkeypatch.setattr(machine, "find_gpus", lambda: many)
    assert choose_gpus("2") == (0, 1) and choose_gpus("3,1") == (3, 1) and choose_gpus(None) == tuple(range(8))
    with pytest.raises(DeviceError, match="runs on 8 GPUs at most"):
        choose_gpus("9")


def test_without_a_flag_only_gpus_of_the_first_ones_kind_that_reach_each_other_are_used(monkeypatch, tmp_path):
    names = ("NVIDIA H200", "NVIDIA H200", "NVIDIA H100", "NVIDIA H200")
    gpus = tuple(Gpu(i, name, "sm_90", 150 * 10**9) for i, name in enumerate(names))
    monkeypatch.setattr(machine, "DEVICE_FILES", (tmp_path,))
    for apart, chosen in (((), (0, 1, 3)), (((1, 3),), (0, 1)), (((0, 1), (0, 3), (1, 3)), (0,))):
        found = Gpus(gpus, driver="13.0", apart=apart)
        monkeypatch.setattr(machine, "find_gpus", lambda found=found: found)
        assert choose_gpus(None) == chosen


def test_a_machine_without_gpus_says_why(monkeypatch):
    monkeypatch.setattr(machine, "find_gpus", lambda: Gpus((), problem="no NVIDIA driver"))
    with pytest.raises(DeviceError, match="Found: no NVIDIA driver"):
        choose_gpus("1")


def test_nonsense_is_a_usage_error():
    with pytest.raises(ConfigError):
        choose_gpus("all")


class PlayedDriver:
    """The calls of cuda.bindings.driver that are used, with a status first in each result, as the binding returns."""

    class CUresult:
        CUDA_SUCCESS = types.SimpleNamespace(name="CUDA_SUCCESS")

    CUdevice_attribute = types.SimpleNamespace(
        CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR=75, CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR=76
    )
    status = CUresult.CUDA_SUCCESS
    count = 2
    blind = ()

    def cuInit(self, flags):
        return (self.status,)

    def cuDriverGetVersion(self):
        return self.status, 13000

    def cuDeviceGetCount(self):
        return self.status, self.count

    def cuDeviceGet(self, index):
        return self.status, index

    def cuDeviceGetAttribute(self, attribute, device):
        return self.status, {75: 9, 76: 0}[attribute]

    def cuDeviceGetName(self, size, device):
        return self.status, b"NVIDIA H200".ljust(size, b"\0")

    def cuDeviceTotalMem(self, device):
        return self.status, 150 * 10**9

    def cuDeviceCanAccessPeer(self, device, other):
        return self.status, int((device, other) not in self.blind)


@pytest.fixture
def driver(monkeypatch):
    played = PlayedDriver()
    monkeypatch.setitem(sys.modules, "cuda.bindings", types.SimpleNamespace(driver=played))
    return played


def test_gpus_are_read_from_the_driver(driver):
    found = find_gpus()
    assert found == Gpus((H200, Gpu(1, "NVIDIA H200", "sm_90", 150 * 10**9)), driver="13.0")


def test_two_of_which_one_does_not_reach_the_other_are_apart(driver):
    driver.count, driver.blind = 3, ((2, 0),)
    assert find_gpus().apart == ((0, 2),)


def test_a_driver_that_does_not_start_is_named(driver):
    driver.status = types.SimpleNamespace(name="CUDA_ERROR_SYSTEM_DRIVER_MISMATCH")
    assert find_gpus().problem == "the NVIDIA driver does not start: CUDA_ERROR_SYSTEM_DRIVER_MISMATCH"


def test_a_driver_that_shows_no_device_is_told(driver):
    driver.count = 0
    assert "shows no GPU" in find_gpus().problem


def test_a_missing_binding_is_told(monkeypatch):
    monkeypatch.setitem(sys.modules, "cuda.bindings", None)
    assert "cannot be imported" in find_gpus().problem
