"""What the web process is started with: typed, range-checked, frozen."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Literal

from dsuf.errors import ConfigError


@dataclass(frozen=True)
class ServerOptions:
    """Limits, keys and times of the HTTP side. Raises ConfigError for a value out of range."""

    api_keys: tuple[str, ...] = ()  # none: everybody may call
    key_names: Mapping[str, str] = field(default_factory=dict)  # of keys that have one
    max_queued_requests: int = 256  # requests that wait for their prefill; more are answered 429
    max_queued_tokens: int | None = None  # prompt tokens that wait likewise; None: 20 s of measured prefill
    queue_timeout_s: float = 600.0  # a request whose prefill has not started by then is given up
    stall_timeout_s: float = 60.0  # a client that reads or sends nothing for this long is cut off
    max_body_bytes: int = 64 << 20  # a prompt of 1 M tokens is about 5 MB
    keepalive_s: float = 10.0  # silence after which a stream gets a comment, and again after as long
    drain_delay_s: float = 5.0  # after SIGTERM new calls are refused politely for this long
    drain_timeout_s: float = 120.0  # then running streams have this long to end
    log_format: Literal["json", "text"] = "json"
    metrics_names: Literal["dsuf", "vllm", "both"] = "dsuf"  # prefixes in /metrics

    def tenant(self, key: str) -> str:
        """Whose saved prefixes a caller with this key may use: each key's own, or its name's where it has one."""
        if key in self.key_names:
            return self.key_names[key]
        return hashlib.sha256(key.encode()).hexdigest()[:16] if len(self.api_keys) > 1 else ""

    def __post_init__(self) -> None:
        """Raise ConfigError unless every number is in range and no key is empty."""
        for name, low in (
            ("max_queued_requests", 0),
            ("max_queued_tokens", 0),
            ("max_body_bytes", 1),
            ("keepalive_s", 0.01),
            ("queue_timeout_s", 0.01),
            ("stall_timeout_s", 0.01),
        ):
            value = getattr(self, name)
            if value is not None and not low <= value < math.inf:
                raise ConfigError(f"{_flag(name)} is {value}, expected at least {low}. Change or leave it out.")
        for name in (one.name for one in fields(self) if one.name.startswith("drain_")):
            if not 0 <= (value := getattr(self, name)) <= 86_400:
                raise ConfigError(f"{_flag(name)} is {value}, expected 0 to 86400 seconds. Change or leave it out.")
        for name, known in (("log_format", ("json", "text")), ("metrics_names", ("dsuf", "vllm", "both"))):
            if getattr(self, name) not in known:
                found, expected = getattr(self, name), " or ".join(known)
                raise ConfigError(f"{_flag(name)} is {found!r}, expected {expected}. Change or leave it out.")
        if any(not key.strip() for key in self.api_keys):
            raise ConfigError("an API key is empty, expected some text. Set it or leave it out.")


def _flag(name: str) -> str:
    """How a field is called on the command line."""
    return f"--{name.removesuffix('_s').replace('_', '-')}"
