import hashlib
import hmac
import os
import struct
import subprocess
import sys

import numpy as np
import pytest

from dsuf.kv.names import Names, ids_array, ids_bytes, namespace

KEY = b"k" * 32
NS = dict(checkpoint=b"c" * 32, backend="cpu", numerics="qdq64", prefill="exact", page_bytes=4096, snapshot_bytes=9000)


def by_hand(key, *parts):
    framed = b"".join(struct.pack("<Q", len(part)) + part for part in parts)
    return hmac.new(key, framed, hashlib.sha256).digest()


def test_a_name_is_the_chain_of_keyed_hashes_over_blocks_and_the_rest():
    ids = np.arange(300, dtype=np.uint32)
    names = Names.of(KEY, b"ns", "alice")
    key = by_hand(KEY, b"dsuf-kv-1", b"names", b"ns", b"alice")
    link = by_hand(key, b"root")[:20]
    for block in range(2):
        data = struct.pack("<128I", *range(128 * block, 128 * block + 128))
        link = by_hand(key, b"block", link, data)[:20]
    expected = by_hand(key, b"entry", link, struct.pack("<44I", *range(256, 300)))[:20]
    assert names.of_ids(ids) == expected
    assert names.chain(ids)[-1] == link
    assert names.chain(ids[128:], names.chain(ids[:128])[0])[-1] == link


def test_every_part_of_the_namespace_changes_it():
    others = dict(
        checkpoint=b"d" * 32, backend="gpu", numerics="qdq32", prefill="truncated", page_bytes=1, snapshot_bytes=2
    )
    found = {namespace(**NS)} | {namespace(**{**NS, name: value}) for name, value in others.items()}
    assert len(found) == 7


@pytest.mark.parametrize("count", [0, 1, 127, 128, 129, 400])
def test_tenants_namespaces_and_keys_share_no_name(count):
    ids = np.arange(count, dtype=np.uint32)
    makers = [Names.of(k, n, t) for k in (KEY, b"x" * 32) for n in (b"a", b"b") for t in ("", "t", "u")]
    names = [name for m in makers for name in (m.of_ids(ids), m.segment(b"d" * 32), m.root, *m.chain(ids))]
    assert len(set(names)) == len(names)


def test_prefixes_and_neighbours_have_names_of_their_own():
    ids = np.arange(260, dtype=np.uint32)
    names = Names.of(KEY, b"ns", "")
    assert len({names.of_ids(ids[:count]) for count in range(261)}) == 261
    changed = ids.copy()
    changed[0] += 1
    assert names.of_ids(changed) != names.of_ids(ids)


def test_names_are_equal_in_every_process_whatever_its_hash_seed():
    # LMCache 1139: a chain seeded with the process's own random never hits in a second process
    program = (
        "import numpy as np; from dsuf.kv.names import Names;"
        "print(Names.of(b'k'*32, b'ns', 'alice').of_ids(np.arange(300, dtype=np.uint32)).hex())"
    )
    seen = {
        subprocess.run(
            [sys.executable, "-c", program], env={**os.environ, "PYTHONHASHSEED": seed}, capture_output=True, check=True
        ).stdout
        for seed in ("1", "2")
    }
    assert seen == {Names.of(KEY, b"ns", "alice").of_ids(np.arange(300, dtype=np.uint32)).hex().encode() + b"\n"}


def test_ids_travel_as_little_endian_words():
    assert ids_bytes([1, 258]) == b"\x01\0\0\0\x02\x01\0\0"
    assert ids_array(b"\x01\0\0\0\x02\x01\0\0").tolist() == [1, 258]
    with pytest.raises(ValueError):
        ids_array(b"123")
