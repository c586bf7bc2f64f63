"""Every setting in one place: flags, recipe files and DSUF_* environment as typed, range-checked, frozen dataclasses.

No other file of dsuf reads the environment. A value out of range raises ConfigError when the dataclass is made, so that
nothing is loaded for a command that cannot run.
"""

from __future__ import annotations

import math
import os
import stat
import tempfile
from dataclasses import dataclass
from pathlib import Path

from dsuf.errors import ConfigError, EnvironmentProblem

MAX_NEW_TOKENS = 393_216  # the public API's limit (serving.md 1.6)
MAX_SEED = 2**63 - 1
ENVIRONMENT_NAMES = (
    "DSUF_CACHE", "DSUF_API_KEY", "DSUF_SM", "DSUF_KERNELS", "DSUF_REDIS_URL", "DSUF_KV_KEY_FILE",
)  # fmt: skip


def check_number(
    name: str, value: float, low: float, high: float = math.inf, *, above: bool = False, whole: bool = False
) -> None:
    """Raise ConfigError unless low <= value <= high (low < value with `above`); nan and infinity never pass."""
    fits = math.isfinite(value) and value <= high and (value > low if above else value >= low)
    if fits and not (whole and value != int(value)):
        return
    kind = "a whole number" if whole else "a number"
    lower = f"above {low:g}" if above else f"from {low:,}"
    upper = "" if high == math.inf else f" to {high:,}"
    if high == math.inf and not above:
        lower = f"of at least {low:,}"
    raise ConfigError(f"{name} is {value}; expected {kind} {lower}{upper}.")


def check_output(flag: str, path: Path | None) -> None:
    """Raise ConfigError where no file can be made at `path`: told before the work, not after it."""
    if path is None or (path.exists() and not path.is_file() and not path.is_dir()):  # a pipe or device is opened
        return
    why = None
    if path.is_dir():
        why = "it is a folder. Give a file in it"
    elif not path.parent.is_dir():
        why = f"there is no folder {path.parent}. Make it, or give another"
    elif not os.access(path.parent, os.W_OK | os.X_OK):
        why = f"{path.parent} is not open to this user. Give another folder"
    if why:
        raise ConfigError(f"{flag} {path} cannot be written: {why}.")


@dataclass(frozen=True)
class SamplingFlags:
    """Sampling as the user gave it; None is left to the checkpoint's generation_config.json."""

    temperature: float | None = None
    top_p: float | None = None
    top_k: int = 0
    seed: int = 0
    max_tokens: int | None = None

    def __post_init__(self) -> None:
        """Raise ConfigError for a value out of its range."""
        if self.temperature is not None:
            check_number("--temperature", self.temperature, 0, 2)
        if self.top_p is not None:
            check_number("--top-p", self.top_p, 0, 1, above=True)
        check_number("--top-k", self.top_k, 0, 2**31 - 1, whole=True)
        check_number("--seed", self.seed, 0, MAX_SEED, whole=True)
        if self.max_tokens is not None:
            check_number("--max-tokens", self.max_tokens, 1, MAX_NEW_TOKENS, whole=True)


def parse_switch(flag: str, text: str) -> bool:
    """`on` or `off`. Raises ConfigError for anything else."""
    if text not in ("on", "off"):
        raise ConfigError(f"{flag} is {text!r}; expected on or off.")
    return text == "on"


def parse_verify(text: str) -> int | str:
    """`auto` or a number of drafts, as --verify takes it."""
    if text == "auto":
        return text
    try:
        return int(text)
    except ValueError:
        raise ConfigError(f"--verify is {text!r}; expected a number of drafts or auto.") from None


def parse_gpus(text: str) -> int | tuple[int, ...]:
    """--gpus as a count (`4`), or as named devices (`0,1`; `3,` is device 3 alone).

    Raises ConfigError for anything else, and for a device named twice.
    """
    parts = [part.strip() for part in text.split(",")]
    if len(parts) > 1 and parts[-1] == "":
        parts = parts[:-1]
    if not parts or not all(part.isascii() and part.isdigit() for part in parts):
        raise ConfigError(f"--gpus is {text!r}; expected a count such as 4 (0 is the CPU) or a list such as 0,1 or 3,")
    numbers = tuple(int(part) for part in parts)
    if "," not in text:
        return numbers[0]
    if len(set(numbers)) != len(numbers):
        raise ConfigError(f"--gpus is {text!r}; a device is named twice.")
    return numbers


@dataclass(frozen=True)
class Environment:
    """What the environment says about this user's folders and keys."""

    cache_dir: Path  # DSUF_CACHE, else XDG_CACHE_HOME/dsuf, else ~/.cache/dsuf
    runtime_dir: Path  # XDG_RUNTIME_DIR/dsuf, else dsuf-<uid> in the temporary folder
    api_key: str | None = None  # DSUF_API_KEY
    sm: str | None = None  # DSUF_SM: chips that `dsuf build` compiles for
    kernels: Path | None = None  # DSUF_KERNELS: a folder of `dsuf build --out`, used instead of the build cache
    redis_url: str | None = None  # DSUF_REDIS_URL; None: a private server of this user's
    kv_key_file: Path | None = None  # DSUF_KV_KEY_FILE
    blas_threads: str | None = None  # OPENBLAS_NUM_THREADS, which NumPy's library reads by itself
    unknown: tuple[str, ...] = ()  # DSUF_* names that nothing here reads


def read_environment(environ: dict[str, str] | None = None) -> Environment:
    """Read the DSUF_* and XDG_* variables of `environ` (default: this process)."""
    given = dict(os.environ) if environ is None else environ
    home = Path(given.get("HOME") or Path.home())
    cache = given.get("DSUF_CACHE") or Path(given.get("XDG_CACHE_HOME") or home / ".cache") / "dsuf"
    runtime = given.get("XDG_RUNTIME_DIR")
    return Environment(
        cache_dir=Path(cache).expanduser(),
        runtime_dir=Path(runtime) / "dsuf" if runtime else Path(tempfile.gettempdir()) / f"dsuf-{os.getuid()}",
        api_key=given.get("DSUF_API_KEY") or None,
        sm=given.get("DSUF_SM") or None,
        kernels=Path(given["DSUF_KERNELS"]) if given.get("DSUF_KERNELS") else None,
        redis_url=given.get("DSUF_REDIS_URL") or None,
        kv_key_file=Path(given["DSUF_KV_KEY_FILE"]) if given.get("DSUF_KV_KEY_FILE") else None,
        blas_threads=given.get("OPENBLAS_NUM_THREADS") or None,
        unknown=tuple(sorted(n for n in given if n.startswith("DSUF_") and n not in ENVIRONMENT_NAMES)),
    )


def read_api_keys(
    given: list[str], path: Path | None, environment: Environment
) -> tuple[tuple[str, ...], dict[str, str]]:
    """Keys of --api-key (else DSUF_API_KEY) and of --api-key-file, and the names that some have. Raises ConfigError.

    Calls whose keys have one name share what is saved of their prompts; each key without a name has its own.
    """
    keys, names = list(given) or ([environment.api_key] if environment.api_key else []), {}
    if path is not None:
        try:
            lines = path.read_text(encoding="utf-8").splitlines()
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"--api-key-file {path} cannot be read: {error}.") from None
        for number, parts in enumerate((line.split() for line in lines), 1):
            if not parts or parts[0].startswith("#"):
                continue
            if len(parts) > 2:
                found = f"line {number} has {len(parts)} words"
                raise ConfigError(f"--api-key-file {path}: {found}; expected KEY or NAME KEY.")
            keys.append(parts[-1])
            names |= {parts[1]: parts[0]} if len(parts) == 2 else {}
        if not keys:
            raise ConfigError(f"--api-key-file {path} holds no key. Write one a line, or leave the flag out.")
    return tuple(dict.fromkeys(keys)), names


def private_folder(folder: Path) -> Path:
    """Make `folder` with mode 0700 if it is absent, and refuse one that another user could write to.

    Sockets and key files live in it, so a folder of somebody else, a link, or one open to others is an
    EnvironmentProblem rather than something to repair in silence.
    """
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        found = folder.lstat()
    except OSError as error:
        raise EnvironmentProblem(
            f"The folder {folder} cannot be made: {error.strerror}. Set XDG_RUNTIME_DIR."
        ) from None
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid() or found.st_mode & 0o077:
        raise EnvironmentProblem(
            f"{folder} must be a folder of yours with mode 0700, it is mode {stat.S_IMODE(found.st_mode):04o} of user "
            f"{found.st_uid}. Remove it or set XDG_RUNTIME_DIR."
        )
    return folder


@dataclass(frozen=True)
class Threshold:
    """One --fail-below or --fail-above METRIC=VALUE."""

    metric: str
    value: float
    below: bool  # True: fail when the metric is below the value


@dataclass(frozen=True)
class BenchOptions:
    """What every `dsuf bench` command takes (serving.md 8.3)."""

    repeat: int = 5
    warmup: int = 2
    seed: int = 0
    label: str = ""
    output: Path | None = None
    ci_json: Path | None = None
    thresholds: tuple[Threshold, ...] = ()

    def __post_init__(self) -> None:
        """Raise ConfigError for a value out of its range."""
        check_number("--repeat", self.repeat, 1, 10_000, whole=True)
        check_number("--warmup", self.warmup, 0, 10_000, whole=True)
        check_number("--seed", self.seed, 0, MAX_SEED, whole=True)
        check_output("--output", self.output)
        if self.ci_json is not None and self.ci_json.exists() and not self.ci_json.is_dir():
            raise ConfigError(f"--ci-json {self.ci_json} is a file; expected a folder, which is made if need be.")


def parse_thresholds(below: list[str], above: list[str]) -> tuple[Threshold, ...]:
    """--fail-below and --fail-above values, each METRIC=VALUE. Raises ConfigError for any other form."""
    found = []
    for flag, texts in (("--fail-below", below), ("--fail-above", above)):
        for text in texts:
            metric, _, value = text.partition("=")
            try:
                number = float(value)
            except ValueError:
                number = math.nan
            if not metric or not math.isfinite(number):
                raise ConfigError(f"{flag} is {text!r}; expected METRIC=NUMBER such as decode_tokens_per_s=40.")
            found.append(Threshold(metric, number, flag == "--fail-below"))
    return tuple(found)


def parse_token_counts(text: str) -> tuple[int, ...]:
    """`8k,128k,1m` as token counts (k is 1,024 and m 1,048,576). Raises ConfigError for anything else."""
    counts = []
    for part in text.split(","):
        digits, factor = part.strip().lower(), 1
        if digits.endswith(("k", "m")):
            digits, factor = digits[:-1], 1024 if digits.endswith("k") else 1024**2
        if not (digits.isascii() and digits.isdigit()) or int(digits) == 0:
            raise ConfigError(f"--tokens has {part!r}; expected counts such as 512 or 8k or 1m, with commas between.")
        counts.append(int(digits) * factor)
    return tuple(counts)
