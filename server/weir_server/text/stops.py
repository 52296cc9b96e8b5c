"""Stop strings in a growing text.

Bound: nothing is released that could still become part of a match, so at most the length of the longest stop string less
one character is held back. Rule: the match that is complete first wins, among those the one that began first; hence the
result does not depend on how the text was cut. Cost: each piece is searched together with the held-back tail only.
"""

from __future__ import annotations

from collections.abc import Sequence


class StopScanner:
    """Feed it text; it gives back what is certain to lie before any stop string. `found` tells that one was complete."""

    def __init__(self, stops: Sequence[str] = ()) -> None:
        self._stops = [s for s in stops if s]
        self._held = ""
        self._shown: list[bool] = []  # of each held character: is it part of the visible text?
        self.found = False

    def feed(self, text: str, hidden: bool = False) -> str:
        """Visible text that is certain now. `hidden` text takes part in matches and is never given back."""
        if self.found:
            return ""
        if not self._stops:
            return "" if hidden else text
        self._held += text
        self._shown += [not hidden] * len(text)
        matches = [(at + len(s), at) for s in self._stops if (at := self._held.find(s)) >= 0]
        if matches:
            self.found = True
            return self._release(min(matches)[1])
        return self._release(len(self._held) - self._open())

    def flush(self) -> str:
        """The held-back rest, when no more text comes."""
        return "" if self.found else self._release(len(self._held))

    def _open(self) -> int:
        """Length of the longest end of the held text that begins a stop string."""
        longest = min(len(self._held), max(map(len, self._stops)) - 1)
        return next((n for n in range(longest, 0, -1) if any(s.startswith(self._held[-n:]) for s in self._stops)), 0)

    def _release(self, n: int) -> str:
        out = "".join(c for c, shown in zip(self._held[:n], self._shown, strict=False) if shown)
        self._held, self._shown = self._held[n:], self._shown[n:]
        return out
