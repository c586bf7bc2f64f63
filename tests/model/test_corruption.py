"""Random damage: a checkpoint is refused, or reads as it was written."""

from __future__ import annotations

import shutil
import struct
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from dsuf.errors import CheckpointError
from dsuf.model.checkpoint import Checkpoint
from tests.model.damage import FILE, INDEX, read_shard, write_shard

ANY_JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**70), 2**70) | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=2),
    max_leaves=4,
)


def opened_bytes(folder: Path) -> dict[str, bytes] | None:
    """Every tensor's bytes, or None when the checkpoint is refused; anything else is a failure of the test."""
    try:
        checkpoint = Checkpoint.open(folder)
    except CheckpointError:
        return None
    return {name: checkpoint.raw(name).tobytes() for name in checkpoint.names()}


@pytest.fixture(scope="module")
def victim(made, tmp_path_factory):
    return Path(shutil.copytree(made, tmp_path_factory.mktemp("victim") / "micro"))


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_corrupt_bytes_are_refused_or_harmless(made, victim, data):
    content = bytearray((made / FILE).read_bytes())
    header_end = 8 + struct.unpack("<Q", content[:8])[0]
    for _ in range(data.draw(st.integers(1, 3))):
        content[data.draw(st.integers(0, 11) | st.integers(0, header_end - 1))] = data.draw(st.integers(0, 255))
    cut = data.draw(st.just(len(content)) | st.integers(0, len(content)))
    (victim / "new").write_bytes(content[:cut])
    (victim / "new").replace(victim / FILE)
    assert opened_bytes(victim) in (None, opened_bytes(made))


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_corrupt_header_entries_are_refused_or_harmless(made, victim, data):
    header, tensors = read_shard(made / FILE)
    name = data.draw(st.sampled_from(sorted(header)))
    place = data.draw(st.sampled_from(["entry", "dtype", "shape", "data_offsets", "new name", "extra key"]))
    value = data.draw(ANY_JSON)
    if place == "entry":
        header[name] = value
    elif place == "new name":
        header[data.draw(st.text(max_size=5))] = header.pop(name)
    elif place == "extra key":
        header[name]["extra"] = value
    else:
        header[name][place] = value
    write_shard(victim / FILE, header, tensors)
    assert opened_bytes(victim) in (None, opened_bytes(made))


@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_corrupt_json_files_are_refused_or_harmless(made, victim, data):
    for name in (FILE, INDEX, "config.json", "engram_token_map.json"):
        shutil.copy(made / name, victim / "new")
        (victim / "new").replace(victim / name)
    name = data.draw(st.sampled_from([INDEX, "config.json", "engram_token_map.json"]))
    content = bytearray((victim / name).read_bytes())
    if data.draw(st.booleans()):
        content[data.draw(st.integers(0, len(content) - 1))] = data.draw(st.integers(0, 255))
    else:
        del content[data.draw(st.integers(0, len(content))) :]
    (victim / name).write_bytes(content)
    assert opened_bytes(victim) in (None, opened_bytes(made))
