"""A constraint written by hand: tokens modulo 3 go round 0, 1, 2, 0, ..., and EOS may follow after a 2."""

from __future__ import annotations

EOS = 3


def in_order(ids, eos=EOS):
    """Whether the tokens keep the rule, with EOS at the end at most."""
    body = ids[:-1] if ids and ids[-1] == eos and len(ids) % 3 == 1 else ids
    return all(token % 3 == index % 3 and token != eos for index, token in enumerate(body))


class InOrder:
    """See above; `fail_at`: a fault after so many tokens, `dead_at`: nothing is allowed after so many."""

    def __init__(self, vocab_size=12, fail_at=None, dead_at=None):
        self.vocab_size, self.fail_at, self.dead_at = vocab_size, fail_at, dead_at
        self.seen = []

    def allowed(self, count):
        tokens = {token for token in range(self.vocab_size) if token % 3 == count % 3 and token != EOS}
        return tokens | ({EOS} if count and count % 3 == 0 else set())

    def advance(self, ids):
        for token in ids:
            assert token in self.allowed(len(self.seen)) and token != EOS
            self.seen.append(token)
        if self.fail_at is not None and len(self.seen) >= self.fail_at:
            raise ValueError("lost the thread")

    def fill(self, masks, drafts):
        count = len(self.seen)
        for row in range(len(drafts) + 1):
            ended = row and drafts[row - 1] == EOS
            dead = self.dead_at is not None and count + row >= self.dead_at
            tokens = set() if dead else {EOS} if ended else self.allowed(count + row)
            for token in tokens:
                masks[row, token // 32] |= 1 << token % 32
            if row == len(drafts) or drafts[row] not in tokens:
                return row
        raise AssertionError("unreachable")
