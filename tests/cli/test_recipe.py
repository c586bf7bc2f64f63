"""Recipe files: the published request word for word, and what a broken file is told."""

from __future__ import annotations

import pytest

from dsuf.cli.recipe import load_recipe, read_recipe
from dsuf.errors import ConfigError


def test_the_tetris_request_is_the_published_one():
    # the body of the script in the published README, key for key and in its order
    assert list(load_recipe("tetris").request.items()) == [
        ("model", "deepseek-v4.1-flash"),
        (
            "messages",
            [
                {
                    "role": "user",
                    "content": "implement the tetris game. output HTML code directly - no explanation.",
                }
            ],
        ),
        ("thinking", {"type": "disabled"}),
        ("stream", True),
        ("stream_options", {"include_usage": True}),
    ]


def test_the_published_ranges_stand_beside_the_request():
    published = load_recipe("tetris").published
    assert published["4 GB300"] == {
        "tokens_per_s": (1700, 1770),
        "average_iteration_ms": (3.24, 3.37),
        "average_accept_length": (5.1, 6.1),
    }
    assert published["8 B300"] == {
        "tokens_per_s": (1980, 2170),
        "average_iteration_ms": (2.69, 2.74),
        "average_accept_length": (5.3, 6.1),
    }


def test_an_unknown_name_lists_what_there_is():
    with pytest.raises(ConfigError, match=r"no recipe 'nope'; there is .*tetris"):
        load_recipe("nope")


@pytest.mark.parametrize("name", ["../tetris", "recipes/tetris", "tetris.toml", ""])
def test_a_name_is_never_a_path(name):
    with pytest.raises(ConfigError, match="no recipe"):
        load_recipe(name)


GOOD = 'command = "chat"\n[args.request]\nmodel = "m"\nstream = true\n'


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("command = ", "not readable TOML"),
        ('command = "dance"', "'dance'; expected"),
        ('command = "bench decode"', "and no other, has"),
        (GOOD + '[[run]]\nname = "a"', "and no other, has"),
        ('command = "bench decode"\n[[run]]\nrows = 6', "without a name"),
        ('command = "chat"', "needs a streaming request"),
        ('command = "chat"\n[args.request]\nmodel = "m"', "needs a streaming request"),
        (GOOD + "[oops]", "unknown keys: oops"),
        (GOOD + '[published."a"]\nx = [2, 1]', r"expected \[low, high\]"),
        (GOOD + '[[check]]\nname = "n"', "expected a name and one of"),
        (GOOD + '[[check]]\nname = "n"\nfoo = 1', "expected a name and one of"),
    ],
)
def test_a_broken_file_is_told_what_is_wrong(tmp_path, text, complaint):
    path = tmp_path / "x.toml"
    path.write_text(text)
    with pytest.raises(ConfigError, match=complaint):
        read_recipe(path)
