"""What a person sees while `bench serve` runs: a Rich panel on a terminal, a plain line every few seconds otherwise."""

from __future__ import annotations

import asyncio
import statistics
import time

from dsuf.cli.bench.serve_client import Record
from dsuf.cli.live import LINE_EVERY_S, is_terminal, say

_REFRESH_S = 0.25
_RECENT_S = 5.0


class View:
    """Follows the records of a run while they fill."""

    def __init__(self, total: int | None) -> None:
        self._total, self._records = total, []
        self._begin = time.perf_counter()

    def started(self, record: Record) -> None:
        """A call is sent."""
        self._records.append(record)

    async def show(self) -> None:
        """Show until cancelled."""
        if not is_terminal():
            while True:
                await asyncio.sleep(LINE_EVERY_S)
                say(", ".join(f"{name} {value}" for name, value in self.rows()))
        from rich.console import Console
        from rich.live import Live

        with Live(console=Console(stderr=True), transient=True, auto_refresh=False) as live:
            while True:
                live.update(self._panel(), refresh=True)
                await asyncio.sleep(_REFRESH_S)

    def rows(self) -> list[tuple[str, str]]:
        """(name, value) of what is known now."""
        now = time.perf_counter()
        done = [record for record in self._records if record.text or record.error]
        failed = sum(bool(record.error) for record in done)
        recent = [at for record in self._records for at in record.events[-10_000:] if at > now - _RECENT_S]
        ttfts = [record.ttft_s for record in self._records if record.events]
        gaps = [gap for record in self._records[-200:] for gap in record.gaps_s[-50:]]
        of_total = f" of {self._total}" if self._total else ""
        return [
            ("elapsed", f"{now - self._begin:.0f} s"),
            ("done", f"{len(done)}{of_total}"),
            ("running", str(len(self._records) - len(done))),
            ("failed", str(failed)),
            ("steps/s", f"{len(recent) / min(_RECENT_S, now - self._begin):,.0f}"),
            ("ttft", f"{statistics.median(ttfts) * 1e3:,.0f} ms" if ttfts else "-"),
            ("gap", f"{statistics.median(gaps) * 1e3:,.1f} ms" if gaps else "-"),
        ]

    def _panel(self):  # noqa: ANN202 - rich.panel.Panel, imported late
        from rich.columns import Columns
        from rich.panel import Panel

        cells = [f"[dim]{name}[/dim] [bold]{value}[/bold]" for name, value in self.rows()]
        return Panel(Columns(cells, padding=(0, 3)), title="bench serve", border_style="cyan")
