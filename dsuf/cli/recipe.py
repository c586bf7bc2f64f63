"""Recipe files: `dsuf repro NAME` runs recipes/NAME.toml.

command    "chat": send [args.request] to a server and time the stream; "bench serve": load a server as [args] says;
           "bench decode": measure steps, once for each [[run]]
[args]     what the command takes; for bench serve and bench decode their flags, with _ for -
[[run]]    of bench decode: a name, and flags beside those of [args]
[published."MACHINE"]    published ranges, metric = [low, high]
[[check]]  name and one of starts_with, balanced_tag, mentions_any (on the extracted page), for --check
"""

from __future__ import annotations

import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import dsuf
from dsuf.errors import ConfigError

CHAT, BENCH_SERVE, BENCH_DECODE = "chat", "bench serve", "bench decode"
CHECK_KINDS = ("starts_with", "balanced_tag", "mentions_any")


@dataclass(frozen=True)
class Check:
    """One condition on the answer; `kind` is one of CHECK_KINDS and `value` what it asks for."""

    name: str
    kind: str
    value: str | list[str]


@dataclass(frozen=True)
class Recipe:
    """One recipe file, checked."""

    name: str
    command: str
    request: dict[str, Any]  # chat
    flags: dict[str, Any]  # bench serve, bench decode
    runs: tuple[dict[str, Any], ...]  # bench decode
    published: dict[str, dict[str, tuple[float, float]]]
    checks: tuple[Check, ...]


def recipe_folder() -> Path:
    """Where the recipes are: inside the installed package, or beside it in a checkout."""
    package = Path(dsuf.__file__).parent
    inside = package / "recipes"
    return inside if inside.is_dir() else package.parent / "recipes"


def load_recipe(name: str) -> Recipe:
    """Read recipes/`name`.toml. Raises ConfigError for an unknown name and for a file that cannot be run."""
    folder = recipe_folder()
    known = sorted(path.stem for path in folder.glob("*.toml"))
    if name not in known:
        raise ConfigError(f"There is no recipe {name!r}; there is {', '.join(known) or 'none'}.")
    return read_recipe(folder / f"{name}.toml")


def read_recipe(path: Path) -> Recipe:
    """Read one recipe file. Raises ConfigError that names what is wrong with it."""
    try:
        content = tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise ConfigError(f"The recipe {path} is not readable TOML: {error}") from None
    unknown = sorted(set(content) - {"command", "args", "run", "published", "check"})
    if unknown:
        raise ConfigError(f"The recipe {path} has unknown keys: {', '.join(unknown)}.")
    command, given = content.get("command"), content.get("args", {})
    if command not in (CHAT, BENCH_SERVE, BENCH_DECODE):
        known = f'"{CHAT}", "{BENCH_SERVE}" or "{BENCH_DECODE}"'
        raise ConfigError(f"The recipe {path} has command {command!r}; expected {known}.")
    if (command == BENCH_DECODE) != bool(content.get("run")):
        raise ConfigError(f'The recipe {path} is {command!r}; "{BENCH_DECODE}", and no other, has [[run]] tables.')
    if any("name" not in run for run in content.get("run", [])):
        raise ConfigError(f"The recipe {path} has a [[run]] without a name.")
    request = given.get("request") if command == CHAT else {}
    if command == CHAT and not (isinstance(request, dict) and request.get("stream")):
        raise ConfigError(f"The recipe {path} needs a streaming request in [args.request].")
    return Recipe(
        name=path.stem,
        command=command,
        request=request,
        flags=given if command != CHAT else {},
        runs=tuple(content.get("run", [])),
        published=_published(path, content.get("published", {})),
        checks=tuple(_check(path, entry) for entry in content.get("check", [])),
    )


def _published(path: Path, tables: dict[str, Any]) -> dict[str, dict[str, tuple[float, float]]]:
    for machine, ranges in tables.items():
        for metric, pair in ranges.items():
            if not (isinstance(pair, list) and len(pair) == 2 and pair[0] <= pair[1]):
                raise ConfigError(f"The recipe {path} has {metric} = {pair!r} for {machine}; expected [low, high].")
    return {machine: {metric: tuple(pair) for metric, pair in ranges.items()} for machine, ranges in tables.items()}


def _check(path: Path, entry: dict[str, Any]) -> Check:
    kinds = [key for key in entry if key in CHECK_KINDS]
    if "name" not in entry or len(kinds) != 1 or len(entry) != 2:
        raise ConfigError(f"The recipe {path} has a check {entry!r}; expected a name and one of {CHECK_KINDS}.")
    return Check(entry["name"], kinds[0], entry[kinds[0]])
