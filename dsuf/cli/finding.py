"""One thing that `dsuf doctor` looked at."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Finding:
    """One thing looked at. `mark` is ok, note (works, with a limit) or FAIL; `fix` says what to do."""

    mark: str
    what: str
    fix: str = ""
