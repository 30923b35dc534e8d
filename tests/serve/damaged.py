"""Damaged images, asked of a running server among whole ones."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator

import httpx

from benchmarks.hostile.mutations import mutated
from serve.load.workload import instances_body


def asked(client: httpx.Client, url: str, numbers: Iterable[int], whole: bytes) -> Counter[str]:
    """Ask a running server for the damaged images of these numbers, many a request, a whole one behind them.

    Args:
        client: sends what the server wants to see, such as a token.
        url: of the predictions.
        numbers: others than `test_mutated` asks of a service, so that more are tried.
        whole: an image whose answer must be the one that it gets alone, in each request.

    Returns:
        How many were ``answered`` and how many ``refused``.
    """
    seen: Counter[str] = Counter()
    alone = [entry["label"] for entry in client.post(url, content=whole).raise_for_status().json()]
    for images in _batches(numbers):
        body = instances_body([*images, whole])
        answer = client.post(url, content=body, headers={"content-type": "application/json"})
        assert answer.status_code == 200, (answer.status_code, answer.text)
        *damaged, last = answer.json()["predictions"]
        assert len(damaged) == len(images)
        assert [entry["label"] for entry in last] == alone
        seen.update("answered" if isinstance(entry, list) else "refused" for entry in damaged)
        assert all(isinstance(entry, list) or entry["error"] for entry in damaged)
    return seen


def _batches(numbers: Iterable[int]) -> Iterator[list[bytes]]:
    """The damaged images of these numbers, sixteen at a time or as many as a body of 1 MiB holds in base64."""
    batch: list[bytes] = []
    for image in map(mutated, numbers):
        if batch and (len(batch) == 16 or sum(map(len, batch)) + len(image) > 700_000):
            yield batch
            batch = []
        batch.append(image)
    if batch:
        yield batch
