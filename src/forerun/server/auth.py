"""API keys, compared in constant time.

Knows: the headers that carry them, and that keys with characters beyond ASCII arrive as UTF-8 or Latin-1,
depending on the client's library. Does not know: routes.
"""

from __future__ import annotations

import hmac
from collections.abc import Sequence

from forerun.server.errors import ApiError


class KeyCheck:
    """Refuses requests without one of the keys; without configured keys every request is allowed."""

    def __init__(self, keys: Sequence[str]) -> None:
        self._keys = [encoded for key in keys for encoded in _encodings(key)]

    def __call__(self, authorization: str | None, x_api_key: str | None = None) -> None:
        """Raise ApiError 401 unless `authorization` is `Bearer KEY`, or `x_api_key` is KEY, with a known key."""
        if not self._keys:
            return
        scheme, _, bearer = (authorization or "").partition(" ")
        if not (scheme.lower() == "bearer" and self._knows(bearer)) and not self._knows(x_api_key or ""):
            found = "this API key is not one of the server's" if authorization or x_api_key else "an API key is needed"
            raise ApiError(
                401,
                f"{found}: send the header `Authorization: Bearer KEY` or `x-api-key: KEY`",
                code="invalid_api_key",
                headers={"WWW-Authenticate": "Bearer"},
            )

    def _knows(self, given: str) -> bool:
        matches = [
            hmac.compare_digest(given.encode("latin-1").strip(), key) for key in self._keys
        ]  # all, in constant time
        return any(matches)


def _encodings(key: str) -> set[bytes]:
    """The bytes that a key may arrive as in a header."""
    latin = key.encode("latin-1", "ignore")
    return {key.encode(), latin} if latin.decode("latin-1") == key else {key.encode()}
