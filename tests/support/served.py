"""`dsuf serve` as a user starts it: two processes on a free port."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys

from tests.support.serving import wait_until


class Serve:
    """A `dsuf serve` process with folders of its own."""

    def __init__(self, folder, *flags):
        self.log = folder / "log"
        environ = {**os.environ, "DSUF_CACHE": str(folder / "cache"), "XDG_RUNTIME_DIR": str(folder)}
        folder.chmod(0o700)
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "dsuf.cli.app", "serve", "--port", "0", "--drain-delay", "0", *flags],
                stdout=log,
                stderr=log,
                env=environ,
                start_new_session=True,
            )
        wait_until(lambda: re.search(r"ready on (http://\S+)", self.text()) or self.process.poll() is not None, 60)
        found = re.search(r"ready on (http://\S+)", self.text())
        assert found, self.text()
        self.url = found.group(1)

    def text(self):
        return self.log.read_text()

    def lines(self):
        return [json.loads(line) for line in self.text().splitlines() if line.startswith('{"event":"request_end"')]

    def children(self):
        path = f"/proc/{self.process.pid}/task/{self.process.pid}/children"
        with open(path) as children:
            return [int(pid) for pid in children.read().split()]
