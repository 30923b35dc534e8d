"""Checks answers against known ones. Equal bytes are checked only once, so that checking all of them is cheap."""

from __future__ import annotations

import json
from typing import Any, Literal

from serve.load.workload import Item, Known
from serve.runtime.tasks.base import find_task

#: The result of a request. ``answered`` and ``refused``: as known. ``wrong``: differs from the known answer.
#: ``rejected``: the server was full (429, 503). ``failed``: another 5xx. ``lost``: no answer arrived.
Verdict = Literal["answered", "refused", "wrong", "rejected", "failed", "lost"]
VERDICTS: tuple[Verdict, ...] = ("answered", "refused", "wrong", "rejected", "failed", "lost")
#: The verdicts for a known answer.
GOOD: frozenset[Verdict] = frozenset({"answered", "refused"})

_REMEMBERED = 256  # answers of one item; batch sizes round differently, so there are several


class Checker:
    """Compares answers with known ones. Use it in one thread.

    Args:
        task: name of the task whose answers they are.
        tolerance: see `Task.fault`.
    """

    def __init__(self, task: str, tolerance: float) -> None:
        self._task = find_task(task)
        self._tolerance = tolerance
        self._seen: dict[str, dict[tuple[int, bytes], tuple[Verdict, str]]] = {}

    def check(self, item: Item, status: int, body: bytes) -> tuple[Verdict, str]:
        """Return the verdict on an answer, and what is wrong with it."""
        seen = self._seen.setdefault(item.name, {})
        found = seen.get((status, body))
        if found is None:
            found = self._judge(item, status, body)
            if len(seen) < _REMEMBERED:
                seen[status, body] = found
        return found

    def _judge(self, item: Item, status: int, body: bytes) -> tuple[Verdict, str]:
        expected = _status(item)
        if status != expected:
            text = f"status {status} instead of {expected}: {body[:160]!r}"
            return ("rejected" if status in (429, 503) else "failed" if status >= 500 else "wrong"), text
        if item.exact is not None:
            return (
                ("answered", "") if body == item.exact else ("wrong", f"{body[:160]!r} instead of {item.exact[:80]!r}")
            )
        try:
            fault = self._fault(item, json.loads(body, parse_constant=_refuse_constant))
        except (ValueError, LookupError, TypeError) as error:
            fault = f"{type(error).__name__}: {error} in {body[:160]!r}"
        if fault:
            return "wrong", fault
        return ("answered" if status == 200 else "refused"), ""

    def _fault(self, item: Item, document: Any) -> str:
        """Return what is wrong with an answer. Empty: nothing."""
        if not item.known:
            return ""
        if not item.listed:
            return self._compare(item.known[0], document)
        answers = document["predictions"]
        if len(answers) != len(item.known):
            return f"{len(answers)} predictions for {len(item.known)} instances"
        faults = (self._compare(known, answer) for known, answer in zip(item.known, answers, strict=True))
        return next((f"instance {number}: {fault}" for number, fault in enumerate(faults) if fault), "")

    def _compare(self, known: Known, answer: Any) -> str:
        if known.status != 200:
            return "" if isinstance(answer["error"], str) else "its error is not a string"
        return self._task.fault(known.answer, answer, self._tolerance)


def _status(item: Item) -> int:
    """Return the known status: 200, or the first image's refusal if all are refused."""
    refused = [known.status for known in item.known if known.status != 200]
    return refused[0] if refused and len(refused) == len(item.known) else 200


def _refuse_constant(word: str) -> Any:
    raise ValueError(f"{word} is not valid JSON")
