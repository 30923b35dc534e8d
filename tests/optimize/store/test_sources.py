"""The digest of a result's sources: what changes it, and what does not."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from optimize.store.sources import closure, code_of, source_digest, without_comments
from optimize.training.optimizers import rate

#: A package outside the project: ``a`` imports ``b``, which imports ``c`` in a function, which imports ``d``.
CHAIN = {
    "__init__.py": "",
    "a.py": "from . import b\n\n\ndef work() -> int:\n    return b.work()\n",
    "b.py": "def work() -> int:\n    from far.c import number\n\n    return number\n",
    "c.py": "import far.d\n\nnumber = far.d.number\n",
    "d.py": "number = 1\n",
    "unrelated.py": "number = 5\n",
    "typed.py": "from typing import TYPE_CHECKING\n\nif TYPE_CHECKING:\n    from far import unrelated\n",
}


@pytest.fixture
def package(tmp_path: Path) -> Path:
    folder = tmp_path / "far"
    folder.mkdir()
    for name, source in CHAIN.items():
        (folder / name).write_text(source)
    return folder


def asked(package: Path, expression: str) -> str:
    """What an expression gives in a new process, as after an edit."""
    code = (
        f"import sys; sys.path.insert(0, {str(package.parent)!r})\n"
        "from optimize.store.sources import closure, source_digest\n"
        f"print({expression})"
    )
    run = [sys.executable, "-c", code]
    return subprocess.run(run, capture_output=True, text=True, check=True, timeout=60).stdout.strip()


def found_from(package: Path, module: str) -> set[str]:
    return set(asked(package, f"*closure({module!r})").split())


def digest(package: Path) -> str:
    return asked(package, "source_digest('far.a')")


@pytest.mark.parametrize(
    ("file", "source", "counts"),
    [
        ("d.py", "number = 2\n", True),
        ("c.py", CHAIN["c.py"] + "other = 1\n", True),
        ("d.py", "# why it is one\n\nnumber = 1  # as measured\n", False),
        ("unrelated.py", "number = 6\n", False),
    ],
    ids=["a file three imports away", "a file two imports away", "a comment", "a file that is not imported"],
)
def test_what_changes_the_digest(package: Path, file: str, source: str, counts: bool) -> None:
    before = digest(package)
    (package / file).write_text(source)
    assert (digest(package) != before) == counts


def test_imports_for_type_checkers_do_not_count(package: Path) -> None:
    assert found_from(package, "far.typed") == {"far.typed"}
    assert found_from(package, "far.a") == {"far", "far.a", "far.b", "far.c", "far.d"}


def test_the_packages_that_are_run_on_the_way_count(package: Path) -> None:
    (package / "room" / "inner").mkdir(parents=True)
    for path in ("room/__init__.py", "room/inner/__init__.py", "room/inner/deep.py"):
        (package / path).touch()
    assert found_from(package, "far.room.inner.deep") == {"far.room.inner.deep", "far.room.inner", "far.room"}


@pytest.mark.parametrize(
    ("source", "same"),
    [
        ("x = 1  # a remark\n", True),
        ("# a remark\n\nx = 1\n", True),
        ("x = 1\n\n\n# type: ignore\n", True),
        ("x = 1\r\n# a remark\r\n", True),
        ("x = 1", True),
        ("x = 2\n", False),
        ("x = 1\n\fy = 2\n", False),
        ("x = 1\n# a remark\ry = 2\n", False),
        ("x  = 1\n", False),
    ],
)
def test_comments_and_blank_lines_do_not_count(source: str, same: bool) -> None:
    assert (without_comments(source.encode()) == without_comments(b"x = 1\n")) == same


def test_what_looks_like_a_comment_in_a_string_counts() -> None:
    for one, two in (('x = "# 1"\n', 'x = "# 2"\n'), ('x = """a\n\nb"""\n', 'x = """a\nb"""\n')):
        assert without_comments(one.encode()) != without_comments(two.encode())


def test_code_behind_a_form_feed_and_in_another_encoding_counts() -> None:
    """A form feed within a line is no line end for the tokenizer, which counts the lines that comments are cut from."""
    for begin in ("x = 1\f\n", "# -*- coding: latin-1 -*-\nname = 'h\xf6he'\n", "\ufeffx = 1\n"):
        encoded = begin.encode("latin-1" if "latin" in begin else "utf-8")
        one, same, other = (encoded + end for end in (b"y = 1\n", b"y = 1  # a remark\n", b"y = 2\n"))
        assert without_comments(one) == without_comments(same)
        assert without_comments(one) != without_comments(other)


def test_whoever_reads_a_registry_depends_on_all_that_may_be_in_it(package: Path) -> None:
    (package / "kinds").mkdir()
    for name in ("__init__", "one", "two"):
        (package / "kinds" / f"{name}.py").write_text("from far import base\n" if name != "__init__" else "")
    (package / "base.py").write_text(
        "from serve.runtime.registry import Registry\n\n"
        'REGISTRY: Registry[int] = Registry[int]("kind", package="far.kinds", group="far.kinds")\n'
    )
    (package / "reader.py").write_text("from far.base import REGISTRY\n")
    reads = found_from(package, "far.reader")
    assert {"far.kinds.one", "far.kinds.two"} <= reads
    # A member imports the registry to enter itself, and does not thereby depend on the other members.
    assert "far.kinds.two" not in found_from(package, "far.kinds.one")


def test_a_pass_depends_on_what_it_calls_and_not_on_other_passes() -> None:
    found = closure("optimize.passes.ptq")
    assert {
        "optimize.quantization.targets",
        "optimize.data.loading",
        "serve.runtime.images.image_preprocessing",
    } <= found
    assert {name for name in found if name.startswith("optimize.passes.")} == {
        "optimize.passes.ptq",
        "optimize.passes.base",
    }
    assert not [name for name in found if name.startswith(("optimize.report", "optimize.run", "optimize.api"))]


def test_the_modules_of_the_makers_are_found_from_the_makers() -> None:
    assert code_of(rate) == source_digest("optimize.training.optimizers")
    assert code_of(rate) != code_of(rate, source_digest)


def test_reading_what_a_module_imports_imports_none_of_it() -> None:
    code = (
        "import sys; from optimize.store.sources import closure, source_digest;"
        "assert 'optimize.report.plots' in closure('optimize.report.stored_charts') and source_digest('optimize.api');"
        "print(sorted({'torch', 'matplotlib', 'onnx', 'openvino', 'optimize.report'} & {*sys.modules}))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, timeout=60)
    assert (done.stdout, done.returncode) == ("[]\n", 0), done.stderr
