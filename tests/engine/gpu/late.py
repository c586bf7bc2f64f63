"""A stand-in device whose work ends when somebody waits for it."""

from __future__ import annotations

from tests.support.simt_device import SimtDevice, SimtEvent


class LateEvent(SimtEvent):
    def __init__(self, device):
        self.device, self.number = device, device.recorded

    def done(self):
        return self.number <= self.device.ended

    def wait(self):
        self.device.ended = max(self.device.ended, self.number)


class LateDevice(SimtDevice):
    """Work is done at once, and told of only when somebody waits or `ended` moves on."""

    recorded = ended = 0

    def record(self, *, timing=False):
        self.recorded += 1
        return LateEvent(self)
