"""The shape of the code is measured as one would count it by hand."""

from __future__ import annotations

from pathlib import Path

from tools import house


def tree(root: Path) -> Path:
    sources = {
        "optimize/__init__.py": "",
        "optimize/a/__init__.py": "",
        "optimize/a/table.py": "from optimize.a import other\n",
        "optimize/a/other.py": "X = 1\n",
        "optimize/b/table.py": "from ..a import other, table\n",
        "serve/table.py": "def f():\n    import optimize.a.table\n",
        "tests/test_x.py": "assert True\n",
        "README.md": "# Title\n\nYou see four words. Two; more.\n",
        "docs/guide/page.md": "One sentence has five words.\n",
    }
    for name, text in sources.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return root


def test_the_figures_of_a_small_tree_are_those_that_one_counts(tmp_path: Path) -> None:
    assert house.figures(tree(tmp_path)) == {
        "folders": "4",
        "files in a folder, median and most": "1, 3 (optimize/a)",
        "folders of more than 20 files, registries apart": "0",
        "modules": "6",
        "modules with one importer": "0",
        "names that more than two modules share": "1, by 3 modules",
        "lines of code": "5",
        "lines of tests": "1",
        "words of README": "8",
        "words of all documents": "11",
        "words in a sentence, mean and 90th percentile": "3.7, 5",
        "semicolons in 1,000 words": "90.9",
        "sentences with you": "33%",
    }


def test_relative_imports_and_those_within_functions_are_seen(tmp_path: Path) -> None:
    known = house.modules(tree(tmp_path))
    assert house.imported("optimize.b.table", known["optimize.b.table"], known) == {
        "optimize.a.other",
        "optimize.a.table",
    }
    assert house.imported("serve.table", known["serve.table"], known) == {"optimize.a.table"}
