"""The toy and its corpus, as the tests of tests/toy have them."""

from tests.toy.conftest import examples, exchanges, folder, text

__all__ = ["examples", "exchanges", "folder", "text"]
