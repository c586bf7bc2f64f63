"""Device: messages for machines that cannot run, and the stand-in that the other tests use."""

from __future__ import annotations

import ctypes
from types import SimpleNamespace

import numpy as np
import pytest

from dsuf.engine.gpu import device as gpu
from dsuf.engine.gpu.batches import CopyBatch
from dsuf.errors import DeviceError
from dsuf.kernels.simt.errors import OutOfBounds, Unwritten
from tests.support.simt_device import SimtDevice


@pytest.fixture
def device():
    return SimtDevice(memory_bytes=1 << 20)


class TestFaults:
    @pytest.fixture
    def broken(self):
        stream = SimpleNamespace(sync=lambda: None)
        handle = SimpleNamespace(create_stream=lambda: stream, set_current=lambda: None)
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

    def test_a_batch_that_the_driver_does_not_take_is_copied_piece_by_piece(self, broken):
        copied, many = [], np.arange(1, 7) * 100
        broken.copy_async = lambda *args: copied.append(args)
        broken._copy_batch = lambda *args: broken._fail("CUDA_ERROR_INVALID_VALUE", "copying 6 pieces")
        for _ in range(2):
            broken.copy_many(many, many + 1000, np.full(6, 100))
        assert copied == [(at, at + 1000, 100) for at in range(100, 700, 100)] * 2 and not broken._batches

    def test_a_batch_that_breaks_the_device_does(self, broken):
        broken._copy_batch = lambda *args: broken._fail("CUDA_ERROR_ILLEGAL_ADDRESS", "copying 6 pieces")
        with pytest.raises(DeviceError, match="ILLEGAL_ADDRESS"):
            broken.copy_many(np.arange(6), np.arange(6), np.full(6, 100))

    @pytest.mark.parametrize(("count", "size", "batch"), [(4, 100, False), (5, 100, True), (400, 2 << 20, False)])
    def test_many_small_copies_are_a_batch(self, broken, count, size, batch):
        batches, single, at = [], [], np.arange(count)
        broken.copy_async, broken._copy_batch = lambda *args: single.append(args), lambda *args: batches.append(args)
        broken.copy_many(at, at, np.full(count, size))
        assert (len(batches), len(single)) == ((1, 0) if batch else (0, count))

    def test_a_batch_is_handed_to_the_driver_as_it_is(self, broken):
        seen = []

        def read(address, count):
            return np.ctypeslib.as_array((ctypes.c_int64 * count).from_address(address)).tolist()

        def call(to, of, sizes, count, *fixed):
            seen.append([read(at, count) for at in (to, of, sizes)] + [fixed])
            return 0

        broken._batch = CopyBatch.__new__(CopyBatch)
        vars(broken._batch).update(_call=call, _result=int, _fixed=(11, 12, 1))
        broken.stream = SimpleNamespace(handle=77)
        many = np.arange(20)
        broken.copy_many(many[::2], many[:10] + (1 << 40), np.full(10, 100, np.int32))
        wanted = [list(range(0, 20, 2)), [at + (1 << 40) for at in range(10)], [100] * 10, (11, 12, 1, 77)]
        assert seen == [wanted] and broken._batches

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
