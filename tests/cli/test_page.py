"""The page inside an answer, and the checks that a recipe asks of it."""

from __future__ import annotations

import pytest

from dsuf.cli.page import extract_page, failed_checks
from dsuf.cli.recipe import load_recipe

PAGE = "<!DOCTYPE html>\n<html><body><canvas></canvas><script>let a = 1</script></body></html>"


@pytest.mark.parametrize(
    "answer", [PAGE, f"Here it is:\n```html\n{PAGE}\n```\nEnjoy.", f"```\n{PAGE}\n```", f"{PAGE}\nDone."]
)
def test_the_document_is_found_with_and_without_a_fence(answer):
    assert extract_page(answer) == PAGE + "\n"


def test_a_document_that_was_cut_off_is_kept_to_its_end():
    assert extract_page(PAGE[:40]) == PAGE[:40] + "\n"


def test_an_answer_without_a_document_is_kept_whole():
    assert extract_page("no page here") == "no page here"


def test_a_playable_page_passes_every_check():
    assert failed_checks(PAGE, load_recipe("tetris").checks) == []


@pytest.mark.parametrize(
    ("page", "failed"),
    [
        (PAGE.replace("<!DOCTYPE html>\n", ""), ["the answer is one HTML document"]),
        (PAGE.replace("</script>", ""), ["every script tag is closed"]),
        (PAGE.replace("canvas", "div"), ["it draws on a canvas or a grid"]),
        ("noise", ["the answer is one HTML document", "every script tag is closed", "it draws on a canvas or a grid"]),
    ],
)
def test_a_page_that_lacks_something_is_told_what(page, failed):
    assert failed_checks(page, load_recipe("tetris").checks) == failed
