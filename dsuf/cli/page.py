"""The page inside an answer, and the checks that a recipe asks of it."""

from __future__ import annotations

import re

from dsuf.cli.recipe import Check

_FENCE = re.compile(r"```(?:html)?[ \t]*\n(.*?)(?:\n```|\Z)", re.DOTALL | re.IGNORECASE)
_DOCUMENT = re.compile(r"<!doctype html.*?(?:</html\s*>|\Z)", re.DOTALL | re.IGNORECASE)


def extract_page(answer: str) -> str:
    """The HTML document of an answer: from its doctype to the closing tag, out of a code fence if it stands in one.

    An answer without a doctype is returned as it is (without its fence), so that nothing is lost by saving it.
    """
    document = _DOCUMENT.search(answer)
    if document:
        return document.group(0).removesuffix("```").rstrip() + "\n"
    fenced = _FENCE.search(answer)
    return fenced.group(1) + "\n" if fenced else answer


def failed_checks(page: str, checks: tuple[Check, ...]) -> list[str]:
    """Names of the checks that `page` does not meet."""
    return [check.name for check in checks if not _meets(page, check)]


def _meets(page: str, check: Check) -> bool:
    lower = page.lower()
    if check.kind == "starts_with":
        return lower.startswith(str(check.value).lower())
    if check.kind == "balanced_tag":
        opened = len(re.findall(rf"<{check.value}\b", lower))
        return opened > 0 and opened == len(re.findall(rf"</{check.value}\s*>", lower))
    return any(word.lower() in lower for word in check.value)
