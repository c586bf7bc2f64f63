"""What the web process is started with: typed, range-checked, frozen."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Literal

from dsuf.errors import ConfigError


@dataclass(frozen=True)
class ServerOptions:
    """Limits, keys and times of the HTTP side. Raises ConfigError for a value out of range."""

    api_keys: tuple[str, ...] = ()  # none: everybody may call
    max_queued_requests: int = 256  # requests that wait for their prefill; more are answered 429
    max_body_bytes: int = 64 << 20  # a prompt of 1 M tokens is about 5 MB
    keepalive_s: float = 10.0  # silence after which a stream gets a comment, and again after as long
    drain_delay_s: float = 5.0  # after SIGTERM new calls are refused politely for this long
    drain_timeout_s: float = 120.0  # then running streams have this long to end
    log_format: Literal["json", "text"] = "json"

    def __post_init__(self) -> None:
        """Raise ConfigError unless every number is in range and no key is empty."""
        for name, low in (("max_queued_requests", 0), ("max_body_bytes", 1), ("keepalive_s", 0.01)):
            if not getattr(self, name) >= low:
                raise ConfigError(f"{name} is {getattr(self, name)}, expected at least {low}. Change the flag.")
        for field in fields(self):
            value = getattr(self, field.name)
            if field.name.startswith("drain_") and not 0 <= value <= 86_400:
                raise ConfigError(f"{field.name} is {value}, expected 0 to 86400 seconds. Change the flag.")
        if self.log_format not in ("json", "text"):
            raise ConfigError(f"log_format is {self.log_format!r}, expected json or text. Change the flag.")
        if any(not key.strip() for key in self.api_keys):
            raise ConfigError("an API key is empty, expected some text. Set it or leave it out.")
