"""Device: messages for machines that cannot run, and the stand-in that the other tests use."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
from cuda.bindings import driver

from dsuf.engine.gpu import device as gpu
from dsuf.errors import DeviceError
from dsuf.kernels.simt.errors import OutOfBounds, Unwritten
from tests.support.simt_device import SimtDevice


@pytest.fixture
def device():
    return SimtDevice(memory_bytes=1 << 20)


class TestWhatIsMissing:
    def test_an_old_driver_is_named_with_both_versions(self):
        with pytest.raises(DeviceError, match=r"CUDA 12\.4; this build needs 13\.0.*--gpus 0"):
            gpu.check_driver(12040)
        gpu.check_driver(13000)

    def test_a_chip_without_kernels_is_named_with_those_that_have_some(self):
        assert gpu.chip_of(9, 0, "NVIDIA H200") == "sm_90a"
        with pytest.raises(DeviceError, match=r"NVIDIA L4 has compute capability 8\.9; kernels exist for 9\.0, 10\.0"):
            gpu.chip_of(8, 9, "NVIDIA L4")

    def test_no_driver(self, monkeypatch):

        def absent(flags):
            raise RuntimeError("libcuda.so.1 not found")

        monkeypatch.setattr(driver, "cuInit", absent)
        with pytest.raises(DeviceError, match=r"no NVIDIA driver.*--gpus 0"):
            gpu.look(0)

    def test_no_gpu(self, monkeypatch):
        ok = driver.CUresult.CUDA_SUCCESS
        monkeypatch.setattr(driver, "cuInit", lambda flags: (ok,))
        monkeypatch.setattr(driver, "cuDriverGetVersion", lambda: (ok, 13000))
        monkeypatch.setattr(driver, "cuDeviceGetCount", lambda: (ok, 0))
        with pytest.raises(DeviceError, match=r"GPU 0 was asked for, 0 can be seen"):
            gpu.look(0)


class TestFaults:
    @pytest.fixture
    def broken(self):
        handle = SimpleNamespace(create_stream=lambda: SimpleNamespace(sync=lambda: None))
        return gpu.Device(0, "sm_90a", "NVIDIA H200", handle)

    def test_a_sticky_error_marks_the_device_as_lost(self, broken):
        error = SimpleNamespace(name="CUDA_ERROR_ILLEGAL_ADDRESS", __int__=lambda self: 700)

        class Status(int):
            name = error.name

        with pytest.raises(DeviceError, match=r"failed with CUDA_ERROR_ILLEGAL_ADDRESS at a step.*start again"):
            broken.check(Status(700), "a step")
        assert broken.lost == "CUDA_ERROR_ILLEGAL_ADDRESS"

    def test_another_error_does_not(self, broken):
        class Status(int):
            name = "CUDA_ERROR_INVALID_VALUE"

        with pytest.raises(DeviceError, match="CUDA_ERROR_INVALID_VALUE at a step"):
            broken.check(Status(1), "a step")
        assert broken.lost is None

    def test_an_absent_kernel_says_what_to_run(self, broken):
        with pytest.raises(DeviceError, match=r"no kernel embed/v41 for sm_90a.*dsuf build --sm sm_90a"):
            broken.launch("embed/v41", 1)


class TestStandIn:
    def test_memory_is_counted_by_kind_and_a_full_device_tells_who_holds_it(self, device):
        first = device.allocate(1000, "weights")
        assert first % 256 == 0 and device.held() == {"weights": 1024}
        with pytest.raises(DeviceError, match=r"is full: pages needs 0\.00 GiB.*weights 0\.00.*--max-context"):
            device.allocate(1 << 20, "pages")

    def test_copies_keep_what_is_unwritten_unwritten(self, device):
        a, b = device.allocate(64, "a"), device.allocate(64, "b")
        device.upload(a, np.arange(16, dtype=np.uint8))
        device.copy_async(b, a, 32)
        assert device.download(b, 16).tolist() == list(range(16))
        assert device.unwritten(b, 64) == 48

    def test_a_launch_runs_the_body_with_checked_memory(self, device):
        table, out = device.allocate(256, "weights"), device.allocate(1024, "workspace")
        with pytest.raises(Unwritten):
            device.launch("fill", out, 1024, 16, 16, 1, table, 0, 1, 2, grid=(1, 1))
        with pytest.raises(OutOfBounds):
            device.launch("fill", out, 2048, 16, 16, 0, 0, 0, 1, 2, grid=(1, 1))
        device.launch("fill", out, 1024, 16, 16, 0, 0, 0, 1, 2, grid=(1, 1))
        assert device.unwritten(out, 1024) == 0 and device.log["fill"] == 1

    def test_a_graph_runs_its_calls_again_and_nothing_before(self, device):
        a, b = device.allocate(16, "a"), device.allocate(16, "b")
        with device.capture() as graph:
            device.copy_async(b, a, 16)
        assert graph.launches == 1 and device.unwritten(b, 16) == 16
        device.upload(a, np.full(16, 7, np.uint8))
        graph.launch()
        assert device.download(b, 16).tolist() == [7] * 16

    def test_an_unknown_kernel_is_named(self, device):
        with pytest.raises(DeviceError, match="no kernel nothing/v41"):
            device.launch("nothing/v41")
