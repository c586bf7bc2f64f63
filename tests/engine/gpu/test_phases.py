"""The line about a start's phases."""

from __future__ import annotations

from dsuf.engine.gpu.phases import Phases


def test_each_phase_has_its_seconds_and_the_line_their_sum(capsys):
    times = iter([0.0, 1.0, 1.5, 4.0, 4.25])
    phases = Phases(lambda: next(times))
    for name in ("checkpoint", "weights", "checkpoint"):
        phases(name)
    phases.tell("loaded toy")
    assert phases.seconds == {"checkpoint": 0.75, "weights": 2.5}
    assert capsys.readouterr().err == "loaded toy in 3.25 s: checkpoint 0.75 s, weights 2.50 s\n"
