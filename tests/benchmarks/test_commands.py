"""A page tells the command that made it as whoever reads it would give it."""

from __future__ import annotations

import re

from benchmarks.commands import command
from benchmarks.here import begun


def test_what_says_where_things_are_kept_is_not_told() -> None:
    words = ["--store", "/somebody/store", "--minutes", "5", "--write", "docs/x.md", "--short"]
    assert command("benchmarks.soak", words) == "python -m benchmarks.soak --minutes 5 --short"


def test_folders_and_files_of_a_machine_are_told_without_their_place() -> None:
    words = ["--data", "imagefolder:/home/me/flowers", "--photos", "/home/me/my photos", "--run", "a/b"]
    told = "python -m benchmarks.x --data imagefolder:DIR --photos 'my photos' --run a/b"
    assert command("benchmarks.x", words) == told


def test_what_leaves_the_rest_of_a_page_out_is_told() -> None:
    words = ["--only", "own", "serial", "--rounds", "3", "--again"]
    assert command("benchmarks.x", words) == "python -m benchmarks.x --rounds 3 --again"
    assert command("benchmarks.x", words, without=("--again",)) == "python -m benchmarks.x --rounds 3"
    told = "python -m benchmarks.x --only own serial --rounds 3 --again"
    assert command("benchmarks.x", words, told=("--only",)) == told


def test_the_day_and_the_load_are_told() -> None:
    assert re.fullmatch(r"\d{4}-\d\d-\d\d, with \d+\.\d processes running when it began", begun())
