"""The packed toy checkpoint, unpacked once, and its corpus as requests and as token ids."""

from __future__ import annotations

from pathlib import Path

import pytest

from dsuf.text.builtin import resolve
from recipes.toy.dataset import Example, Text
from recipes.toy.exchanges import Exchange, known


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return resolve("toy", cache_dir=tmp_path_factory.mktemp("cache"))


@pytest.fixture(scope="session")
def text(folder: Path) -> Text:
    return Text((folder / "tokenizer.json").read_text(encoding="utf-8"))


@pytest.fixture(scope="session")
def exchanges() -> dict[str, Exchange]:
    """What the toy knows by heart, by name."""
    return {exchange.name: exchange for exchange in known()}


@pytest.fixture(scope="session")
def examples(exchanges: dict[str, Exchange], text: Text) -> dict[str, Example]:
    """The same as token ids: prompt, then the answer."""
    return {name: text.example(exchange) for name, exchange in exchanges.items()}
