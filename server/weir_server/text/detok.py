"""Token ids of one row → text, as it comes: bytes → UTF-8 hold-back → stop hold-back.

The text that comes out is the same however the ids are grouped: `decode` of all bytes between special tokens, up to where
the first stop string was complete. Special tokens are hidden from the text and seen by the stops.
"""

from __future__ import annotations

import codecs
from collections.abc import Sequence

from weir_server.text.stops import StopScanner
from weir_server.text.tokenizer import Tokenizer

_utf8 = codecs.getincrementaldecoder("utf-8")


class RowText:
    """One row's text. `stopped_at` is the number of tokens that were needed to complete a stop string, None before."""

    def __init__(self, tokenizer: Tokenizer, stops: Sequence[str] = ()) -> None:
        self._tokenizer = tokenizer
        self._decoder = _utf8("replace")
        self._stops = StopScanner(stops)
        self.tokens = 0
        self.stopped_at: int | None = None

    def feed(self, token: int) -> str:
        """Text that is certain after one more token; nothing once a stop was found."""
        if self.stopped_at is not None:
            return ""
        self.tokens += 1
        piece = self._tokenizer.piece(token)
        if token in self._tokenizer.special:
            name = piece.decode("utf-8", "replace")  # an end of text may be any token, half a character too
            out = self._stops.feed(self._decoder.decode(b"", final=True)) + self._stops.feed(name, hidden=True)
        else:
            out = self._stops.feed(self._decoder.decode(piece))
        if self._stops.found:
            self.stopped_at = self.tokens
        return out

    def finish(self) -> str:
        """What was held back, at the end of a row that ended otherwise: half a character becomes U+FFFD."""
        if self.stopped_at is not None:
            return ""
        return self._stops.feed(self._decoder.decode(b"", final=True)) + self._stops.flush()
