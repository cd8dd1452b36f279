"""Which replica a request should go to: where its prefix is cached, unless too many others are there.

Knows: which prefixes were sent where, and who has how much to do. Does not know: Ray, tokens' meaning, whether a
replica still has in its cache what it was sent. A replica's score is the share of the prompt it was sent before, less
what it has to do beyond the mean (as in vllm-project/production-stack pull request 1035). Both count for every request,
so that a hot prefix spreads as soon as its replica has more than its share, and others keep their affinity then.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection, Mapping, Sequence
from hashlib import blake2b
from typing import Any, Final
from weakref import WeakValueDictionary

KEY_TOKENS: Final = 16  # tokens a key covers: a block of the prefix cache, as it is unless set otherwise
MAX_KEYS: Final = 512  # of a prompt; what lies behind them is sent along with it
MAX_KNOWN: Final = 1 << 17  # keys remembered; the one not used for longest is forgotten first
FEW: Final = 8.0  # requests beyond the mean that outweigh a prompt that is cached whole, where the mean is no more
# This process's routers on Ray, by application and deployment.
ROUTERS: Final = WeakValueDictionary[tuple[str, str], Any]()


def prefix_keys(token_ids: Sequence[int], salt: str) -> tuple[int, ...]:
    """One number for each beginning of a prompt, KEY_TOKENS longer than the last; equal in all processes."""
    key = int.from_bytes(blake2b(salt.encode(), digest_size=8).digest(), "little", signed=True)
    keys = []
    for start in range(0, min(len(token_ids) // KEY_TOKENS, MAX_KEYS) * KEY_TOKENS, KEY_TOKENS):
        key = hash((key, *token_ids[start : start + KEY_TOKENS]))  # of integers, which no process salts
        keys.append(key)
    return tuple(keys)


class PrefixRouting:
    """Ranks replicas for a request, by what they were sent before and have to do now."""

    def __init__(self) -> None:
        self._known: OrderedDict[int, dict[str, None]] = OrderedDict()  # key -> replicas that were sent it
        self._names: set[str] = set()  # of those

    def rank(self, keys: Sequence[int], loads: Mapping[str, float], avoid: Sequence[str] = ()) -> list[str]:
        """The replicas in `loads` (open requests, by name), the best first, those to avoid last."""
        mean = sum(loads.values()) / max(1, len(loads))
        matched = self._matched(keys)

        def score(name: str) -> tuple[bool, float, int]:
            share = matched.get(name, 0) / max(1, len(keys))
            beyond = (loads[name] - mean) / max(FEW, mean)
            return name not in avoid, share - beyond, _draw(name, keys)

        return sorted(loads, key=score, reverse=True)

    def sent(self, keys: Sequence[int], name: str) -> None:
        """A request with these keys went to that replica."""
        self._names.add(name)
        for key in keys:
            self._known.setdefault(key, {})[name] = None
            self._known.move_to_end(key)
        while len(self._known) > MAX_KNOWN:
            self._known.popitem(last=False)

    def matched(self, keys: Sequence[int], name: str) -> float:
        """The share of a prompt that the replica was sent before."""
        return self._matched(keys).get(name, 0) / max(1, len(keys))

    def gone(self, name: str) -> None:
        """The replica has ended, and its cache with it."""
        self._forget({name} & self._names)

    def keep(self, names: Collection[str]) -> None:
        """There are no other replicas now."""
        self._forget(self._names.difference(names))

    def _forget(self, ended: set[str]) -> None:
        if ended:  # reported more than once
            self._names -= ended
            for names in self._known.values():
                for name in ended & names.keys():
                    del names[name]

    def _matched(self, keys: Sequence[int]) -> dict[str, int]:
        """Leading keys that each replica was sent."""
        found: dict[str, int] = {}
        alive: set[str] | None = None
        for count, key in enumerate(keys, 1):
            names = self._known.get(key, {})
            alive = set(names) if alive is None else alive & names.keys()
            if not alive:
                break
            found |= dict.fromkeys(alive, count)
        return found


def _draw(name: str, keys: Sequence[int]) -> int:
    """Decides between equals, by the whole prompt: the same in every process (rendezvous hashing)."""
    return int.from_bytes(blake2b(f"{name} {keys[-1] if keys else 0}".encode(), digest_size=8).digest(), "little")
