"""The built-in checkpoints: a name or a path becomes a folder.

    noise   random weights under V4.1's real tokenizer, made on first use in the user's cache folder
    toy     a small trained model: one packed file in the package, unpacked on first use in the user's cache folder

This stands in text/ because `noise` needs the tokenizer and its Engram classes.
"""

from __future__ import annotations

import fcntl
import hashlib
import io
import json
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib import resources
from pathlib import Path
from typing import Any
from zipfile import ZipFile

from dsuf.errors import CheckpointError, EnvironmentProblem
from dsuf.model.checkpoint import GENERATION, TOKENIZER
from dsuf.model.synthetic import load_config, write_checkpoint
from dsuf.spec import Spec
from dsuf.text.tokenizer import class_map, read_tokenizer, v41_tokenizer_json

NOISE, TOY = "noise", "toy"
NOISE_GENERATION = {"max_new_tokens": 512}  # a random model seldom ends by itself
_NOISE_RECIPE = 1  # counted up when the bytes of `noise` change for another reason than its config


def resolve(name_or_path: str, *, cache_dir: Path, progress: Callable[[int, int], None] | None = None) -> Path:
    """The folder of a built-in checkpoint or, for any other text, the path that it is.

    The first use of `noise` writes about 60 MB under `cache_dir` (seconds; `progress` as in write_checkpoint), that of
    `toy` about 6 MB. Raises EnvironmentProblem when that fails, CheckpointError when this build has no such checkpoint.
    """
    if name_or_path == NOISE:
        return _noise(Path(cache_dir), progress)
    if name_or_path == TOY:
        return _toy(Path(cache_dir))
    return Path(name_or_path)


def _toy(cache_dir: Path) -> Path:
    packed = resources.files("dsuf").joinpath(TOY, "toy.zip")
    if not packed.is_file():
        raise CheckpointError(f"this build of dsuf has no checkpoint {TOY!r} (found no {packed}). Use {NOISE!r}.")
    content = packed.read_bytes()
    folder = cache_dir / f"{TOY}-{hashlib.sha256(content).hexdigest()[:12]}"

    def unpack() -> None:
        partial = cache_dir / f".{folder.name}.partial"
        with ZipFile(io.BytesIO(content)) as archive:
            archive.extractall(partial)
        partial.rename(folder)

    return _made_once(cache_dir, TOY, folder, unpack)


def _noise(cache_dir: Path, progress: Callable[[int, int], None] | None) -> Path:
    config = load_config(NOISE)
    # another config or recipe is another folder, so that a newer dsuf never runs an older one's weights
    stamp = hashlib.sha256(json.dumps([_NOISE_RECIPE, config, NOISE_GENERATION]).encode()).hexdigest()[:12]
    folder = cache_dir / f"{NOISE}-{stamp}"
    return _made_once(cache_dir, NOISE, folder, lambda: _write_noise(config, folder, progress))


def _made_once(cache_dir: Path, name: str, folder: Path, make: Callable[[], None]) -> Path:
    """`folder`, made by `make` if no process made it yet."""
    if folder.is_dir():
        return folder
    with _locked(cache_dir, name):
        if not folder.is_dir():  # another process made it meanwhile
            for left in cache_dir.glob(f".{name}-*.partial"):  # of a process that was killed
                shutil.rmtree(left, ignore_errors=True)
            make()
    return folder


def _write_noise(config: dict[str, Any], folder: Path, progress: Callable[[int, int], None] | None) -> None:
    content, spec = v41_tokenizer_json(), Spec.from_config(config)
    classes = class_map(read_tokenizer(content.decode(), spec), spec)
    extra = {TOKENIZER: content, GENERATION: json.dumps(NOISE_GENERATION).encode()}
    write_checkpoint(config, folder, progress=progress, class_map=classes, extra_files=extra)


@contextmanager
def _locked(cache_dir: Path, name: str) -> Iterator[None]:
    """Hold the lock of one built-in checkpoint; other processes wait until it is made."""
    try:
        cache_dir.mkdir(parents=True, exist_ok=True)
        file = (cache_dir / f"{name}.lock").open("w")
        with file:
            fcntl.flock(file, fcntl.LOCK_EX)
            yield
    except OSError as error:
        raise EnvironmentProblem(
            f"the cache folder {cache_dir} cannot be used: {error.strerror or error}. Name another one in DSUF_CACHE."
        ) from error
