"""The fleet key: one secret for all servers that share caches, and keys derived from it for one purpose each.

Given by --kv-key-file, else made at random in the user's 0700 runtime folder, where all servers of this user on this
machine find it. It never leaves the agent process: the web and engine processes know no key.
"""

from __future__ import annotations

import fcntl
import hmac
import os
import secrets
import stat
from pathlib import Path

from dsuf.errors import EnvironmentProblem

KEY_NAME, LOCK_NAME = "kv.key", "kv.key.lock"
MIN_KEY_BYTES = 16
MAX_KEY_BYTES = 4096


def authenticate(key: bytes, *parts: bytes) -> bytes:
    """HMAC-SHA256 over the parts, each with its length before it, so that no two lists of parts run together."""
    framed = b"".join(len(part).to_bytes(8, "little") + part for part in parts)
    return hmac.digest(key, framed, "sha256")


def derive(key: bytes, purpose: str, *context: bytes) -> bytes:
    """A key for one purpose and context."""
    return authenticate(key, b"dsuf-kv-1", purpose.encode(), *context)


def read_key(path: Path) -> bytes:
    """The key in a file that only its owner may read or write. Raises EnvironmentProblem."""
    try:
        with open(path, "rb") as file:
            mode = stat.S_IMODE(os.fstat(file.fileno()).st_mode)
            key = file.read(MAX_KEY_BYTES + 1).strip()
    except OSError as error:
        raise EnvironmentProblem(f"the key file {path} cannot be read: {error.strerror}. Give another.") from None
    if mode & 0o037:
        raise EnvironmentProblem(
            f"the key file {path} has mode {mode:04o}; others may read it or a group may change it. "
            f"Run `chmod 600 {path}`."
        )
    if not MIN_KEY_BYTES <= len(key) <= MAX_KEY_BYTES:
        raise EnvironmentProblem(
            f"the key file {path} holds {len(key)} bytes, expected {MIN_KEY_BYTES} to {MAX_KEY_BYTES}. "
            "Make one with `openssl rand -hex 32`."
        )
    return key


def own_key(runtime_dir: Path) -> bytes:
    """The key of this user on this machine, made on first use. `runtime_dir` is a checked 0700 folder."""
    path = runtime_dir / KEY_NAME
    lock = os.open(runtime_dir / LOCK_NAME, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not path.exists():
            fresh = path.with_suffix(".new")
            fresh.unlink(missing_ok=True)
            fd = os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
            with open(fd, "wb") as file:
                file.write(secrets.token_hex(32).encode())
            fresh.rename(path)
        return read_key(path)
    finally:
        os.close(lock)
