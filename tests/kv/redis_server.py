"""A private Redis-compatible server for one test, which can be killed, stopped and started again empty."""

import os
import signal
import socket
import subprocess
import time

from dsuf.kv.embedded import server_binary


class RedisServer:
    def __init__(self, folder):
        self.path = folder / "redis-test.sock"
        self.url = f"unix://{self.path}"
        self.process = None
        self.start()

    def start(self):
        self.path.unlink(missing_ok=True)
        options = ["--port", "0", "--unixsocket", str(self.path), "--save", "", "--appendonly", "no"]
        self.process = subprocess.Popen(
            [server_binary(), *options, "--dir", str(self.path.parent)], stdout=subprocess.DEVNULL
        )
        deadline = time.monotonic() + 5
        while True:
            with socket.socket(socket.AF_UNIX) as sock:
                try:
                    return sock.connect(str(self.path))
                except OSError:
                    assert time.monotonic() < deadline
                    time.sleep(0.002)

    def kill(self):
        self.process.kill()
        self.process.wait()

    def freeze(self):
        os.kill(self.process.pid, signal.SIGSTOP)

    def thaw(self):
        os.kill(self.process.pid, signal.SIGCONT)
