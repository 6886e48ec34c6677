# SPDX-License-Identifier: Apache-2.0
"""Which page of a pool holds which tokens of which sequence."""
from __future__ import annotations


class Pages:
    """`count` pages of `size` tokens each. A full page whose tokens, and all tokens before them, are the
    same in two sequences is kept once: keys and values of a token depend on what stands before it."""

    def __init__(self, count: int, size: int):
        self.count, self.size = count, size
        self._free = list(range(count - 1, -1, -1))
        self._users = [0] * count
        self._known: dict[tuple, int] = {}    # (page before or -1, its tokens) -> page
        self._keys: dict[int, tuple] = {}     # page -> its key in _known

    @property
    def free(self) -> int:
        return len(self._free)

    def needed(self, tokens: int) -> int:
        return -(-tokens // self.size)

    def take(self, count: int) -> list[int] | None:
        """New pages, or None and nothing changes."""
        if count > self.free:
            return None
        pages = [self._free.pop() for _ in range(count)]
        for page in pages:
            self._users[page] = 1
        return pages

    def release(self, pages: list[int]):
        """One sequence leaves its pages; those without another are free, and forgotten."""
        for page in pages:
            self._users[page] -= 1
            if self._users[page] == 0:
                self._known.pop(self._keys.pop(page, None), None)
                self._free.append(page)

    def shared(self, tokens: list[int]) -> list[int]:
        """Pages that hold the first of `tokens` already. The last token is never among them: somebody
        has to compute what follows it. A page is found by the page before it and its own tokens: the
        page before lives for as long as it does, as whoever uses the one uses the other."""
        pages: list[int] = []
        while (len(pages) + 1) * self.size < len(tokens):
            page = self._known.get(self._key(tokens, pages))
            if page is None:
                break
            self._users[page] += 1
            pages.append(page)
        return pages

    def publish(self, tokens: list[int], pages: list[int], begin: int, end: int):
        """Pages that `tokens` [begin, end) have filled up may be shared from now on."""
        for i in range(begin // self.size, end // self.size):
            key = self._key(tokens, pages[:i])
            if pages[i] not in self._keys and key not in self._known:
                self._known[key] = pages[i]
                self._keys[pages[i]] = key

    def _key(self, tokens: list[int], before: list[int]) -> tuple:
        begin = len(before) * self.size
        return before[-1] if before else -1, *tokens[begin:begin + self.size]
