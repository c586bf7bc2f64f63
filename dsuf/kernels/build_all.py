"""Builds the catalogue in parallel and tells what each kernel uses; the second run reads an index and is instant.

The index maps an entry's name to its file in the cache, for one state of the kernel sources and tools: while nothing
changed, no kernel needs to be expanded to know that it is there.
"""

from __future__ import annotations

import hashlib
import json
import multiprocessing
import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path

from dsuf.errors import CheckFailed
from dsuf.kernels import catalogue
from dsuf.kernels.build import Built, build, cached_file, key_of, read_cached, tool_versions
from dsuf.kernels.lang import Kernel


@dataclass(frozen=True)
class Row:
    """One line of the table: what a kernel of a chip uses, or why it cannot be used."""

    name: str
    chip: str
    registers: int
    shared: int
    spills: int
    seconds: float  # of compilation, whenever it happened
    cached: bool
    problem: str = ""


def source_state() -> str:
    """Digest of every file that decides what the kernels are."""
    package = Path(__file__).parents[1]
    files = sorted([*(package / "kernels").rglob("*.py"), *(package / "configs").glob("*.json"), package / "spec.py"])
    digest = hashlib.sha256("\n".join(tool_versions()).encode())
    for file in files:
        digest.update(str(file.relative_to(package)).encode())
        digest.update(file.read_bytes())
    return digest.hexdigest()[:32]


def selected(chips: Sequence[str], only: Sequence[str] = ()) -> list[tuple[str, str]]:
    """(entry, chip) of everything to build; `only` keeps names that begin with one of its strings."""
    return [
        (e.name, chip)
        for chip in chips
        for e in catalogue.entries()
        if chip in e.chips and (not only or e.name.startswith(tuple(only)))
    ]


def built_names(chip: str, cache: Path) -> set[str]:
    """Entries of a chip whose cubin is in the cache, for the kernel sources as they are."""
    index = _read_index(cache, chip, source_state())
    return {name for name, key in index.items() if cached_file(cache, chip, key).exists()}


def build_catalogue(
    work: Sequence[tuple[str, str]], cache: Path, jobs: int, done: Callable[[Row], None]
) -> dict[tuple[str, str], Built]:
    """Build (entry, chip) pairs, calling `done` for each; what has a problem is missing from the result."""
    state, result = source_state(), {}
    indices = {chip: _read_index(cache, chip, state) for chip in {chip for _, chip in work}}
    missing = []
    for name, chip in work:
        key = indices[chip].get(name)
        built = None if key is None else read_cached(cached_file(cache, chip, key))
        if built is None:
            missing.append((name, chip))
        else:
            result[name, chip] = built
            done(_row(name, built))
    for name, chip, key, row in _build_missing(missing, cache, jobs):
        done(row)
        built = None if row.problem else read_cached(cached_file(cache, chip, key))
        if built is not None:
            result[name, chip] = built
            indices[chip][name] = key
    for chip, index in indices.items():
        _write_index(cache, chip, state, index)
    return result


def _build_missing(
    missing: Sequence[tuple[str, str]], cache: Path, jobs: int
) -> Iterator[tuple[str, str, str, Row]]:  # fmt: skip
    if not missing:
        return
    others = set(multiprocessing.active_children())
    context = multiprocessing.get_context("spawn")  # a forked child would inherit compiler state
    pool = ProcessPoolExecutor(min(jobs, len(missing)), mp_context=context)
    chips: dict[str, list[str]] = {}
    for name, chip in missing:
        chips.setdefault(name, []).append(chip)
    try:
        for future in as_completed([pool.submit(_build_one, name, tuple(of), cache) for name, of in chips.items()]):
            yield from future.result()
    except BaseException:
        for worker in set(multiprocessing.active_children()) - others:
            worker.terminate()  # in the middle of a kernel, which can take half a minute
        raise
    finally:
        pool.shutdown(wait=True, cancel_futures=True)  # what stopped us need not wait for every kernel


def _build_one(name: str, chips: tuple[str, ...], cache: Path) -> list[tuple[str, str, str, Row]]:
    """One entry for all chips: where its kernel is the same, most of the work is done once."""
    known: dict[str, Kernel] = {}
    found = []
    for chip in chips:
        kernel = catalogue.entry(name).kernel(chip)
        kernel = known.setdefault(kernel.identity, kernel)
        key = key_of(kernel, chip)
        try:
            row = _row(name, build(kernel, chip, cache))
        except CheckFailed as error:
            row = Row(name, chip, 0, kernel.shared, 0, 0.0, cached=False, problem=str(error))
        found.append((name, chip, key, row))
    return found


def _row(name: str, built: Built) -> Row:
    facts = built.facts
    spills = facts.spill_stores + facts.spill_loads
    shared = built.shared + facts.static_shared
    problem = "; ".join(facts.problems)
    return Row(name, built.chip, facts.registers, shared, spills, facts.seconds, not built.fresh, problem)


def _read_index(cache: Path, chip: str, state: str) -> dict[str, str]:
    try:
        index = json.loads(cached_file(cache, chip, "index.json").read_text(encoding="utf-8"))
        return index["keys"] if index["state"] == state else {}
    except (OSError, ValueError, KeyError, TypeError):
        return {}


def _write_index(cache: Path, chip: str, state: str, keys: dict[str, str]) -> None:
    file = cached_file(cache, chip, "index.json")
    temporary = file.with_name(f"index.{os.getpid()}")
    temporary.write_text(json.dumps({"state": state, "keys": keys}), encoding="utf-8")
    os.replace(temporary, file)
