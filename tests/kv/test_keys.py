import multiprocessing

import pytest

from dsuf.errors import EnvironmentProblem
from dsuf.kv.keys import authenticate, derive, own_key, read_key


def test_the_own_key_is_made_once_private_and_found_by_everybody(tmp_path):
    with multiprocessing.get_context("fork").Pool(4) as pool:
        keys = set(pool.map(own_key, [tmp_path] * 8))
    assert len(keys) == 1 and len(keys.pop()) == 64
    assert (tmp_path / "kv.key").stat().st_mode & 0o777 == 0o600


@pytest.mark.parametrize("mode", [0o644, 0o604, 0o660, 0o602])
def test_a_key_file_that_others_may_touch_is_refused(tmp_path, mode):
    path = tmp_path / "key"
    path.write_bytes(b"x" * 32)
    path.chmod(mode)
    with pytest.raises(EnvironmentProblem, match="chmod 600"):
        read_key(path)


@pytest.mark.parametrize("mode", [0o600, 0o400, 0o440])
def test_a_key_file_of_a_secret_volume_is_taken(tmp_path, mode):
    path = tmp_path / "key"
    path.write_bytes(b"  0123456789abcdef\n")
    path.chmod(mode)
    assert read_key(path) == b"0123456789abcdef"


@pytest.mark.parametrize("content", [b"", b"short", b"x" * 5000])
def test_a_key_of_the_wrong_size_is_refused(tmp_path, content):
    path = tmp_path / "key"
    path.write_bytes(content)
    path.chmod(0o600)
    with pytest.raises(EnvironmentProblem, match="openssl"):
        read_key(path)
    with pytest.raises(EnvironmentProblem, match="cannot be read"):
        read_key(tmp_path / "none")


def test_parts_do_not_run_together():
    found = {authenticate(b"k", *parts) for parts in ([b"ab", b"c"], [b"a", b"bc"], [b"abc"], [b"abc", b""], [])}
    assert len(found) == 5
    assert derive(b"k", "a", b"b") != derive(b"k", "ab")
