"""A user's model in a package, or beside the files that it needs: it imports, and changes of them are noticed."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

from optimize.models.model_names import resolve_model
from optimize.models.neighbour_modules import of_file, of_module
from optimize.models.source import ModelSource
from serve.runtime.errors import UserError

BLOCKS = "from torch import nn\nWIDTH = {width}\ndef block(n): return nn.Linear(WIDTH, n)\n"
FACTORY = "\ndef net(num_classes=10): return block(num_classes)\n"


@pytest.fixture
def project(tmp_path):
    """``project({"my_models/net.py": "…"})``: the files, under a folder that Python does not search."""

    def write(files: dict[str, str]) -> Path:
        for name, text in files.items():
            path = tmp_path / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
        return tmp_path

    yield write
    for name, module in list(sys.modules.items()):
        if str(tmp_path) in str(getattr(module, "__file__", None) or getattr(module, "__path__", "")):
            del sys.modules[name]


def linear(source: ModelSource, classes: int) -> nn.Linear:
    built = source.build(classes)
    assert isinstance(built, nn.Linear)
    return built


def width_of(path: Path) -> int:
    return linear(resolve_model(f"{path}:net"), 3).in_features


LAYOUTS = {
    "a relative import in a package": {
        "my_models/__init__.py": "",
        "my_models/net.py": "from .blocks import block" + FACTORY,
        "my_models/blocks.py": BLOCKS,
    },
    "a relative import without __init__.py": {
        "my_models/net.py": "from .blocks import block" + FACTORY,
        "my_models/blocks.py": BLOCKS,
    },
    "an absolute import of its package": {
        "my_models/__init__.py": "",
        "my_models/net.py": "from my_models.blocks import block" + FACTORY,
        "my_models/blocks.py": BLOCKS,
    },
    "an absolute import of a folder without __init__.py": {
        "my_models/net.py": "from my_models.blocks import block" + FACTORY,
        "my_models/blocks.py": BLOCKS,
    },
    "a package in a package, imported both ways": {
        "my_models/__init__.py": "",
        "my_models/nets/__init__.py": "from . import net",
        "my_models/nets/net.py": "from ..parts import blocks\nfrom my_models.parts.blocks import block" + FACTORY,
        "my_models/parts/__init__.py": "",
        "my_models/parts/blocks.py": BLOCKS,
    },
    "two folders up without __init__.py": {
        "my_models/nets/net.py": "from ..parts.blocks import block" + FACTORY,
        "my_models/parts/blocks.py": "from . import wide\n" + BLOCKS,
        "my_models/parts/wide.py": "",
    },
    "a package whose __init__ imports the model": {
        "my_models/__init__.py": "from my_models.net import net",
        "my_models/net.py": "import my_models.blocks as b\nblock = b.block" + FACTORY,
        "my_models/blocks.py": BLOCKS,
    },
    "a neighbour as of a script": {
        "my_models/net.py": "from blocks import block" + FACTORY,
        "my_models/blocks.py": BLOCKS,
    },
    "an import inside of the factory": {
        "my_models/net.py": "def net(num_classes=10):\n    from blocks import block\n    return block(num_classes)",
        "my_models/blocks.py": BLOCKS,
    },
    "a package with the name of an installed one": {
        "torchvision/__init__.py": "",
        "torchvision/net.py": "from .blocks import block\nfrom torchvision.models import resnet18" + FACTORY,
        "torchvision/blocks.py": BLOCKS,
    },
}


@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: layout.replace(" ", "-"))
def test_a_model_finds_its_neighbours_and_a_change_of_one_is_noticed_and_used(project, layout):
    files = {name: text.replace("{width}", "5") for name, text in LAYOUTS[layout].items()}
    root = project(files)
    net = root / next(name for name in files if name.endswith("net.py"))
    path_before, first = list(sys.path), resolve_model(f"{net}:net")
    assert first.build(3).in_features == 5
    blocks = next(name for name in files if name.endswith("blocks.py"))
    project({blocks: files[blocks].replace("WIDTH = 5", "WIDTH = 6")})
    second = resolve_model(f"{net}:net")
    assert second.fingerprint != first.fingerprint
    assert second.build(3).in_features == 6
    assert sys.path == path_before


def test_a_comment_does_not_matter_and_what_does_not_tokenize_counts_by_its_bytes(project):
    files = {name: text.format(width=4) for name, text in LAYOUTS["a relative import in a package"].items()}
    net = project(files) / "my_models/net.py"
    before = of_file(net).fingerprint
    project({name: f"# why\n\n{text}\n# done\n" for name, text in files.items() if text})
    assert of_file(net).fingerprint == before
    project({"my_models/blocks.py": files["my_models/blocks.py"].replace("WIDTH = 4", "WIDTH = 5  # wider")})
    changed = of_file(net).fingerprint
    assert changed != before
    seen = {before, changed}
    for broken in ('x = """', "# -*- coding: utf-8 -*-\nx = (", "# -*- coding: none-such -*-\nx = 1"):
        project({"my_models/blocks.py": f"{broken}\n"})
        seen.add(of_file(net).fingerprint)
        project({"my_models/blocks.py": f"{broken}  # \n"})
        seen.add(of_file(net).fingerprint)
    assert len(seen) == 8


def test_what_the_model_does_not_import_does_not_matter(project):
    files = {name: text.format(width=4) for name, text in LAYOUTS["a relative import in a package"].items()}
    net = project(files) / "my_models/net.py"
    before = resolve_model(f"{net}:net").fingerprint
    project({"my_models/train.py": "from .net import net", "other.py": "", "my_models/notes.txt": "x"})
    assert resolve_model(f"{net}:net").fingerprint == before


def test_the_same_files_elsewhere_have_the_same_fingerprint_and_do_not_mix(project, tmp_path):
    files = {name: text.format(width=4) for name, text in LAYOUTS["an absolute import of its package"].items()}
    net = project({f"one/{name}": text for name, text in files.items()}) / "one/my_models/net.py"
    shutil.copytree(tmp_path / "one", tmp_path / "two")
    other = tmp_path / "two/my_models/net.py"
    assert of_file(net).fingerprint == of_file(other).fingerprint
    (tmp_path / "two/my_models/blocks.py").write_text(BLOCKS.format(width=9))
    assert [width_of(path) for path in (net, other, net)] == [4, 9, 4]


@pytest.mark.parametrize("layout", ["a relative import without __init__.py", "a neighbour as of a script"])
def test_the_place_of_a_file_is_not_in_its_fingerprint(project, tmp_path, layout):
    net = project(LAYOUTS[layout]) / "my_models/net.py"
    shutil.copytree(tmp_path / "my_models", tmp_path / "elsewhere" / "my_models")
    assert of_file(net).fingerprint == of_file(tmp_path / "elsewhere/my_models/net.py").fingerprint


def test_an_installed_package_is_never_hidden_by_a_neighbour(project):
    net = (
        project(
            {
                "net.py": "import torch, json\nassert json.dumps and torch.tensor\nnet = torch.nn.Identity\n",
                "torch.py": "raise RuntimeError('hidden')",
                "json.py": "raise RuntimeError('hidden')",
            }
        )
        / "net.py"
    )
    assert isinstance(resolve_model(f"{net}:net").build(3), torch.nn.Identity)
    assert set(of_file(net).files.values()) == {net}


def test_an_unchanged_module_is_not_run_again(project):
    files = {name: text.format(width=4) for name, text in LAYOUTS["a relative import without __init__.py"].items()}
    net = project(files | {"my_models/net.py": "from .blocks import nn\nclass net(nn.Identity): pass"})
    path = net / "my_models/net.py"
    assert type(resolve_model(f"{path}:net").build(1)) is type(resolve_model(f"{path}:net").build(1))


def test_a_module_by_name_covers_its_neighbours_too(project, monkeypatch):
    files = {name: text.format(width=4) for name, text in LAYOUTS["a relative import in a package"].items()}
    monkeypatch.syspath_prepend(project(files))
    first = resolve_model("my_models.net:net")
    project({"my_models/blocks.py": BLOCKS.format(width=8)})
    second = resolve_model("my_models.net:net")
    assert (linear(first, 2).in_features, linear(second, 2).in_features) == (4, 8)
    assert first.fingerprint != second.fingerprint
    assert set(of_module("my_models.net").files) == {"my_models", "my_models.net", "my_models.blocks"}


def test_an_installed_modules_fingerprint_has_its_version():
    assert resolve_model("torchvision.models:resnet18").fingerprint.startswith("torchvision/0.")


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ({"p/net.py": "from .absent import block"}, "net.py: cannot be imported: ModuleNotFoundError"),
        ({"p/net.py": "from absent_package.blocks import block"}, "No module named 'absent_package'"),
        ({"p/net.py": "from .blocks import block", "p/blocks.py": "def"}, r"SyntaxError.*\(line 1\)"),
        ({"p/__init__.py": "1/0", "p/net.py": "net = 1"}, "ZeroDivisionError"),
    ],
)
def test_what_does_not_import_is_one_line_and_can_be_mended(project, files, message):
    net = project(files) / "p/net.py"
    for _ in range(2):
        with pytest.raises(UserError, match=message) as caught:
            resolve_model(f"{net}:net")
        assert "\n" not in str(caught.value)
    project(
        {
            "p/__init__.py": "",
            "p/blocks.py": "",
            "p/net.py": "from torch.nn import Identity as net",
        }
    )
    assert isinstance(resolve_model(f"{net}:net").build(3), torch.nn.Identity)
