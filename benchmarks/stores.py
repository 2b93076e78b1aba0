"""A store that counts requests, for one rank of a job whose other ranks do not exist."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta

import torch.distributed as dist


class CountingStore(dist.Store):
    """Records the requests of one rank. The other ranks have always joined whatever this rank joins."""

    def __init__(self, world: int) -> None:
        super().__init__()
        self._kept, self._others = dist.HashStore(), world - 1
        self.requests: list[tuple[str, tuple[str, ...]]] = []
        """The kind and the keys of each request, in order."""

    @property
    def keys(self) -> set[str]:
        return {key for _, keys in self.requests for key in keys}

    def _count(self, kind: str, *keys: str) -> dist.HashStore:
        self.requests.append((kind, keys))
        return self._kept

    def set(self, key: str, value: str) -> None:
        self._count("set", key).set(key, value)

    def get(self, key: str) -> bytes:
        return self._count("get", key).get(key)

    def add(self, key: str, amount: int) -> int:
        kept = self._count("add", key)
        if key.endswith("count") and not kept.check([key]):
            kept.add(key, self._others)
        return kept.add(key, amount)

    def check(self, keys: Sequence[str]) -> bool:
        return self._count("check", *keys).check(list(keys))

    def wait(self, keys: Sequence[str], timeout: timedelta = timedelta(seconds=5)) -> None:
        self._count("wait", *keys).wait(list(keys), timeout)

    def clone(self) -> CountingStore:
        return self

    def compare_set(self, key: str, expected: str, desired: str) -> bytes:
        return self._count("compare_set", key).compare_set(key, expected, desired)

    def delete_key(self, key: str) -> bool:
        return self._count("delete_key", key).delete_key(key)

    def multi_get(self, keys: Sequence[str]) -> list[bytes]:
        return self._count("multi_get", *keys).multi_get(list(keys))

    def has_extended_api(self) -> bool:
        return True

    # Torch calls some methods by their names in C++.
    deleteKey, multiGet, hasExtendedApi = delete_key, multi_get, has_extended_api
