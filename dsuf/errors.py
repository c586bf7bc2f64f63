"""The one tree of errors; every message says what was found, what was expected and what to do.

DsufError
├── UsageError            a flag, request or recipe is wrong                       exit 2, HTTP 400
│   ├── ConfigError       a value is out of its range or two values contradict
│   ├── PromptError       the prompt cannot be run (too long, unknown token id, image)
│   └── NotSupported      a named feature that this build does not have
├── EnvironmentProblem    the machine lacks something                              exit 3, HTTP 503
│   ├── CheckpointError   no checkpoint, or one that is damaged; carries every finding
│   ├── DeviceError       no GPU, too few, or one that faulted
│   └── EngineGone        the engine process ended while a request was running
└── CheckFailed           a check or threshold was not met                         exit 1
"""

from __future__ import annotations

from collections.abc import Sequence


class DsufError(Exception):
    """Root of everything dsuf raises on purpose; `exit_code` is what the command line ends with."""

    exit_code = 1
    http_status = 500


class UsageError(DsufError):
    """The caller asked for something that cannot be done as asked."""

    exit_code = 2
    http_status = 400


class ConfigError(UsageError):
    """A configuration value is missing, out of range, or contradicts another."""


class PromptError(UsageError):
    """The prompt cannot be run on this checkpoint."""


class NotSupported(UsageError):
    """A feature that this build names but does not have."""


class EnvironmentProblem(DsufError):
    """Something outside the request is missing or broken."""

    exit_code = 3
    http_status = 503


class CheckpointError(EnvironmentProblem):
    """A checkpoint is absent or damaged; `findings` holds one line a defect."""

    LINES_SHOWN = 20

    def __init__(self, message: str, findings: Sequence[str] = ()) -> None:
        self.findings = tuple(findings)
        lines = [message, *(f"  {finding}" for finding in self.findings[: self.LINES_SHOWN])]
        if len(self.findings) > self.LINES_SHOWN:
            lines.append(f"  ... and {len(self.findings) - self.LINES_SHOWN} more")
        super().__init__("\n".join(lines))


class DeviceError(EnvironmentProblem):
    """A GPU is absent, too few are present, or one reported a fault."""


class EngineGone(EnvironmentProblem):
    """The engine process ended while a request was running."""


class CheckFailed(DsufError):
    """A check or threshold was not met."""

    exit_code = 1
