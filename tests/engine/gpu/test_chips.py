"""Messages for machines that cannot run: no driver, one too old, no GPU, one of another kind."""

from __future__ import annotations

import pytest
from cuda.bindings import driver

from dsuf.engine.gpu import chips as gpu
from dsuf.errors import DeviceError


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
