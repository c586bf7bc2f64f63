"""The flags that every benchmark takes, in one place."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Annotated, Any

import typer

from dsuf.cli import options
from dsuf.config import BenchOptions, parse_thresholds


def measured(repeat: int = 3, warmup: int = 1) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Give a command the shared flags; it gets what they say as its argument `bench`.

    The command's own flags come first in its help. Called from Python it takes all of them by name.
    """

    def shared(
        repeat: options.Repeat = repeat,
        warmup: options.Warmup = warmup,
        seed: Annotated[int, typer.Option("--seed", help="Key of the random numbers.")] = 0,
        label: options.Label = "",
        output: options.Output = None,
        ci_json: options.CiJson = None,
        fail_below: options.FailBelow = None,
        fail_above: options.FailAbove = None,
    ) -> BenchOptions:
        thresholds = parse_thresholds(fail_below or [], fail_above or [])
        return BenchOptions(repeat, warmup, seed, label, output, ci_json, thresholds)

    def decorate(command: Callable[..., None]) -> Callable[..., None]:
        flags = list(inspect.signature(shared, eval_str=True).parameters.values())
        own = [one for one in inspect.signature(command, eval_str=True).parameters.values() if one.name != "bench"]
        names = {one.name for one in flags}
        signature = inspect.Signature([*own, *flags])

        def run(**given: Any) -> None:
            bound = signature.bind(**given)
            bound.apply_defaults()
            bench = shared(**{name: value for name, value in bound.arguments.items() if name in names})
            command(**{name: value for name, value in bound.arguments.items() if name not in names}, bench=bench)

        run.__name__, run.__doc__ = command.__name__, command.__doc__
        run.__signature__ = signature
        run.__annotations__ = {one.name: one.annotation for one in (*own, *flags)}
        return run

    return decorate
