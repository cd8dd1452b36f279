"""API keys, compared in constant time.

Knows: the headers that carry them, and that keys with characters beyond ASCII arrive as UTF-8 or Latin-1,
depending on the client's library. Does not know: routes.

With several keys each is a tenant: `TENANT` says, while a request is handled, whose it is, so that nothing of one is
used for another.
"""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Sequence
from contextvars import ContextVar
from typing import Final

from forerun.server.errors import ApiError

TENANT: Final[ContextVar[str]] = ContextVar("tenant", default="")  # a hash of the request's key; "": there is one


class KeyCheck:
    """Refuses requests without one of the keys; without configured keys every request is allowed."""

    def __init__(self, keys: Sequence[str]) -> None:
        several = len(set(keys)) > 1
        self._keys = [(encoded, _digest(key) if several else "") for key in keys for encoded in _encodings(key)]

    def __call__(self, authorization: str | None, x_api_key: str | None = None) -> str:
        """Whose key it is, as in TENANT.

        Raises ApiError 401 unless `authorization` is `Bearer KEY`, or `x_api_key` is KEY, with a known key.
        """
        if not self._keys:
            return ""
        scheme, _, bearer = (authorization or "").partition(" ")
        known: list[str] = [
            *(self._owners(bearer) if scheme.lower() == "bearer" else ()),
            *self._owners(x_api_key or ""),
        ]
        if not known:
            found = "this API key is not one of the server's" if authorization or x_api_key else "an API key is needed"
            raise ApiError(
                401,
                f"{found}: send the header `Authorization: Bearer KEY` or `x-api-key: KEY`",
                code="invalid_api_key",
                headers={"WWW-Authenticate": "Bearer"},
            )

        return known[0]

    def _owners(self, given: str) -> list[str]:
        raw = given.encode("latin-1").strip()
        matches = [(hmac.compare_digest(raw, key), owner) for key, owner in self._keys]  # all, in constant time
        return [owner for is_key, owner in matches if is_key]


def _digest(key: str) -> str:
    return hashlib.sha256(key.encode()).hexdigest()


def _encodings(key: str) -> set[bytes]:
    """The bytes that a key may arrive as in a header."""
    latin = key.encode("latin-1", "ignore")
    return {key.encode(), latin} if latin.decode("latin-1") == key else {key.encode()}
