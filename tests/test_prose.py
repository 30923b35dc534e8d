"""How pages read is measured as a reader would count, and pages that are held to the aims meet them."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tools import prose

PAGE = """# A heading does not count

You can set `--port` here. It is a number; the default is [8080](serve.md).

| a table | does not count |
|---|---|

- one item, two lines:
  the second
- another item

```bash
neither; does code
```
"""


def test_a_page_is_measured_by_its_paragraphs_and_list_items() -> None:
    assert prose.sentences(PAGE) == [
        "You can set CODE here.",
        "It is a number; the default is 8080.",
        "one item, two lines: the second",
        "another item",
    ]
    found = prose.measure(PAGE)
    assert (found.words, found.sentences, found.longest, found.p90) == (5 + 8 + 6 + 2, 4, 8, 8)
    assert (found.mean, found.semicolons, found.you) == (21 / 4, 1000 / 21, 1 / 4)


def test_a_wrapped_line_that_begins_with_a_number_goes_on_with_its_paragraph() -> None:
    assert prose.sentences("It gives\n60. That is less.\n\n1. One\n2. two\n") == [
        "It gives 60.",
        "That is less.",
        "One",
        "two",
    ]


def test_a_page_without_sentences_has_no_words() -> None:
    assert prose.measure("# Only a heading\n").words == 0


@given(st.lists(st.lists(st.text("abc", min_size=1), min_size=1, max_size=30), min_size=1, max_size=12))
def test_sentences_that_were_joined_are_counted_again(texts: list[list[str]]) -> None:
    page = " ".join(f"A {' '.join(words)}." for words in texts)
    lengths = [len(words) + 1 for words in texts]
    found = prose.measure(page)
    assert (found.sentences, found.words, found.longest) == (len(lengths), sum(lengths), max(lengths))


@given(st.text("ab.;`|#[]()<!->\n\t *1", max_size=80))
def test_any_text_can_be_measured(text: str) -> None:
    assert prose.measure(text).words >= 0


def test_each_aim_that_is_missed_is_named() -> None:
    long = prose.Prose(words=1, sentences=1, mean=12.1, p90=23, longest=41, semicolons=2.1, you=0.09)
    assert len(prose.missed(long, guide=True)) == 5
    assert len(prose.missed(long, guide=False)) == 4
    kept = prose.Prose(words=1, sentences=1, mean=12, p90=22, longest=40, semicolons=2, you=0.1)
    assert prose.missed(kept, guide=True) == []


@pytest.mark.parametrize("path", prose.matching(prose.HELD), ids=lambda path: path.name)
def test_a_page_that_is_held_to_the_aims_meets_them(path: Path) -> None:
    found = prose.measure(path.read_text(encoding="utf-8"))
    assert not prose.missed(found, guide=path in prose.matching(prose.GUIDES))


@pytest.mark.parametrize(("name", "words"), [("README.md", 1500), ("CONTRIBUTING.md", 1200)])
def test_a_page_that_is_a_door_stays_short(name: str, words: int) -> None:
    assert len((prose.ROOT / name).read_text(encoding="utf-8").split()) <= words


MODULE = '''"""A module; its first line.

A paragraph over
two lines. You can call `run`::

    neither = "does code; count"
"""

#: One comment
#: of two lines.
LIMIT = 3  # noqa: E501
NAMES = ()  # a second comment


def double(number, times=2):
    """Return the double.

    Args:
        number: one argument; its name
            does not count.
        times: another.

    Raises:
        ValueError: a reason.
    """
    # A third.
    return "# no comment; only text"
'''


def test_a_module_is_measured_by_its_docstrings_and_comments() -> None:
    assert sorted(prose.python_sentences(MODULE)) == sorted(
        [
            *("A module; its first line.", "A paragraph over two lines.", "You can call CODE::"),
            *("One comment of two lines.", "a second comment", "A third."),
            *("Return the double.", "one argument; its name does not count.", "another.", "a reason."),
        ]
    )


def test_a_folder_is_measured_by_the_files_directly_in_it(tmp_path: Path) -> None:
    (tmp_path / "inner").mkdir()
    (tmp_path / "one.py").write_text('"""Two words."""\n', encoding="utf-8")
    (tmp_path / "two.py").write_text("# And three words; more.\n", encoding="utf-8")
    (tmp_path / "inner" / "three.py").write_text('"""Not here."""\n', encoding="utf-8")
    found = prose.measure_folder(tmp_path)
    assert (found.words, found.sentences, found.longest, found.semicolons) == (6, 2, 4, 1000 / 6)
    assert prose.folders_of([tmp_path]) == [tmp_path, tmp_path / "inner"]


@pytest.mark.parametrize("folder", prose.HELD_FOLDERS)
def test_a_folder_that_is_held_to_the_aims_meets_them(folder: str) -> None:
    found = prose.measure_folder(prose.ROOT / folder)
    assert found.words, f"{folder} has no prose: was it moved?"
    assert not prose.missed(found, guide=False)


def test_the_table_of_folders_names_each(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "one.py").write_text('"""Two words."""\n', encoding="utf-8")
    assert prose.main(["--python", str(tmp_path)]) == 0
    assert tmp_path.name in capsys.readouterr().out


def test_the_table_names_what_a_page_misses(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    page = tmp_path / "page.md"
    page.write_text("One short line.\n", encoding="utf-8")
    assert prose.main([str(page)]) == 0
    assert "page.md" in capsys.readouterr().out
