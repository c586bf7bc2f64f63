"""A process that Ctrl-C does not end, and a Ctrl-C while it starts."""

from __future__ import annotations

import os
import signal
import time
from multiprocessing.context import SpawnProcess

import pytest

from dsuf.cli.child import start_deaf


class Interrupted(SpawnProcess):
    def start(self):
        os.kill(os.getpid(), signal.SIGINT)
        super().start()


@pytest.fixture(params=[SpawnProcess])
def child(request):
    process = request.param(target=time.sleep, args=(60,))
    yield process
    if process.pid is not None:
        process.kill()
        process.join(10)


def test_an_interrupt_does_not_reach_the_child(child):
    start_deaf(child)
    os.kill(child.pid, signal.SIGINT)
    child.join(0.5)
    assert child.is_alive()
    assert signal.SIGINT not in signal.pthread_sigmask(signal.SIG_BLOCK, ())


@pytest.mark.parametrize("child", [Interrupted], indirect=True)
def test_an_interrupt_while_it_starts_comes_afterwards(child):
    with pytest.raises(KeyboardInterrupt):
        start_deaf(child)
    assert child.is_alive()
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
