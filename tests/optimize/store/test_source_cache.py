"""What is kept of sources between processes: found out once, never of another file, and never a reason to fail."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from optimize.store import sources
from optimize.store.source_cache import SourceCache


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path / "optimize-and-serve" / "sources"


def counting(asked: list[str], value: str) -> Callable[[], str]:
    def find_out() -> str:
        asked.append(value)
        return value

    return find_out


def test_a_fact_is_found_out_once_for_all_processes_and_anew_for_other_bytes(folder: Path) -> None:
    asked: list[str] = []
    for _ in range(3):  # each as a process of its own
        cache = SourceCache(b"reader")
        assert cache.fact((b"a", b"x = 1"), counting(asked, "one")) == "one"
        assert cache.fact((b"a", b"x = 2"), counting(asked, "two")) == "two"
        assert cache.fact((b"ax", b" = 1"), counting(asked, "three")) == "three"
        cache.save()
    assert asked == ["one", "two", "three"]
    assert SourceCache(b"another reader").fact((b"a", b"x = 1"), counting(asked, "four")) == "four"


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b'{"facts": {}}', b'{"facts": 3, "seal": ""}', b"\xff\xfe"])
def test_a_damaged_cache_is_as_none(folder: Path, content: bytes) -> None:
    cache = SourceCache(b"reader")
    cache.fact((b"a",), lambda: "right")
    cache.save()
    (file,) = folder.iterdir()
    changed = json.loads(file.read_text())
    changed["facts"] = dict.fromkeys(changed["facts"], "wrong")
    for damaged in (json.dumps(changed).encode(), content):
        file.write_bytes(damaged)
        assert SourceCache(b"reader").fact((b"a",), lambda: "right") == "right"


def test_where_nothing_can_be_kept_facts_are_found_out_each_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    cache = SourceCache(b"reader")
    assert cache.fact((b"a",), lambda: "found") == "found"
    cache.save()
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setattr(Path, "expanduser", lambda path: (_ for _ in ()).throw(RuntimeError("no home")))
    cache = SourceCache(b"reader")
    assert cache.fact((b"a",), lambda: "found") == "found"
    cache.save()


def test_digests_are_the_same_with_and_without_what_was_kept(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = []
    for _ in range(2):
        sources._facts.cache_clear()
        monkeypatch.setattr(sources, "_CACHE", SourceCache(b"reader"))
        found.append(sources.source_digest("optimize.passes.fuse"))
        monkeypatch.setattr(sources, "without_comments", lambda source: pytest.fail("it was tokenized again"))
    assert found[0] == found[1]
    sources._facts.cache_clear()
