"""The measurements of a tuning, line by line on disk, so that a killed tuning can continue.

Each line has its own hash. A changed line, and all after it, is measured again.
"""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

from serve.runtime.card.json_documents import sealed, unsealed
from serve.runtime.card.serving import Serving
from serve.tune.search import Point


class Journal:
    """Points by settings, rate and effort, in the order of measurement.

    Args:
        path: the file, created with the first point.
        subject: everything else that the points depend on. A file with another subject is started again.
    """

    def __init__(self, path: Path, subject: dict[str, Any]) -> None:
        self.path = path
        self._subject = json.loads(json.dumps(subject))
        self._known: dict[str, list[Point]] = defaultdict(list)
        self._taken: Counter[str] = Counter()
        self.resumed = self._read()

    def point(self, way: Serving, rate: float | None, effort: float, measure: Callable[[], Point]) -> Point:
        """Return the next point of this kind: an earlier measurement, or else the result of ``measure``."""
        key = json.dumps([way.text, rate, effort])
        number = self._taken[key]
        self._taken[key] += 1
        if number < len(self._known[key]):
            return self._known[key][number]
        point = measure()
        self._known[key].append(point)
        fresh = not self.path.exists()
        with self.path.open("a", encoding="utf-8") as stream:
            if fresh:
                stream.write(_line(self._subject))
            # The point is text, because its p99 may be NaN, which no seal covers.
            stream.write(_line({"key": key, "point": json.dumps(asdict(point))}))
        return point

    def remove(self) -> None:
        """Remove the file after the tuning."""
        self.path.unlink(missing_ok=True)

    def _read(self) -> int:
        """Read the points of this subject from the file. Return their number."""
        try:
            lines = self.path.read_text(encoding="utf-8", errors="replace").splitlines()
        except FileNotFoundError:
            return 0
        whole = []
        for line in lines:
            try:
                whole.append(unsealed(line))
            except ValueError:  # the last line of a process that was killed while it wrote, or a changed one
                break
        if not whole or whole[0] != self._subject:
            self.path.unlink()
            return 0
        for entry in whole[1:]:
            self._known[entry["key"]].append(Point(**json.loads(entry["point"])))
        if len(whole) < len(lines):
            kept = self.path.with_name(f".{self.path.name}.kept")
            kept.write_text("".join(map(_line, whole)), encoding="utf-8")
            kept.replace(self.path)
        return len(whole) - 1


def _line(entry: dict[str, Any]) -> str:
    return json.dumps(sealed(entry)) + "\n"
