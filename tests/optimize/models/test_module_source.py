"""A live module: its copy gives the same answers, and whatever changes them changes its fingerprint."""

from __future__ import annotations

import copy
import importlib
import json
import textwrap
import threading

import pytest
import torch
from torch import nn

from optimize.data.records import ImageData, Split
from optimize.data.targets import Labels
from optimize.models.module_source import module_source
from optimize.models.preprocessing import choose_preprocessing
from optimize.models.weight_matching import load_into
from optimize.run.session import Session
from optimize.store.objects import Store
from serve.runtime.card.card import Preprocessing
from serve.runtime.errors import UserError
from tests.narrow import layer
from tests.optimize.tiny_net import Tiny
from tests.optimize.workbench import noise_context, run
from tests.programs import Programs

NONE = Split((), Labels(torch.zeros(0, dtype=torch.int64)))
PHOTOS = ImageData("photos", "classification", ("a", "b"), NONE, NONE, "none", None)


def tiny(seed: int = 0) -> Tiny:
    torch.manual_seed(seed)
    return Tiny(4)


def fingerprint(module: nn.Module) -> str:
    return module_source(module)[0].fingerprint


def test_the_copy_answers_as_the_module_did_and_neither_touches_the_other():
    module = tiny().half()
    expected = copy.deepcopy(module).float().eval()
    source, checkpoint = module_source(module)
    with torch.no_grad():
        module.head.weight.fill_(9)
    built, other = source.build(4), source.build(4)
    load_into(built, checkpoint, None)  # type: ignore[arg-type]
    batch = torch.randn(3, 1, 16, 16)
    torch.testing.assert_close(built.eval()(batch), expected(batch))
    with torch.no_grad():
        layer(built, "head", nn.Linear).weight.fill_(1)
    torch.testing.assert_close(other.eval()(batch), expected(batch))
    assert module.training


def test_it_goes_through_a_session_like_any_other(tmp_path):
    module = tiny()
    source, checkpoint = module_source(module)
    session = Session(Store(tmp_path / "store"), source, noise_context())
    made = session.baseline(checkpoint=checkpoint)
    assert not made.cached
    batch = torch.randn(2, 1, 16, 16)
    with torch.no_grad():
        torch.testing.assert_close(run(made.artifact, batch), module.eval()(batch), rtol=1e-4, atol=1e-5)
    assert "the weights are those of the given Tiny" in made.artifact.card.notes
    again = Session(Store(tmp_path / "store"), *module_source(tiny())[:1], noise_context())
    assert again.baseline(checkpoint=module_source(tiny())[1]).cached


class Scaled(nn.Module):
    """Holds of everything that an answer may depend on."""

    table: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(4, 3)
        self.scale = 2.0
        self.act = torch.relu
        self.shape = [1, 2]
        self.register_buffer("table", torch.ones(3), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.act(self.head(x)) * self.scale + self.table


def _replaced(name: str, value: object):
    def change(module: nn.Module) -> None:
        setattr(module, name, value)

    return change


@pytest.mark.parametrize(
    "change",
    [
        _replaced("scale", 2.5),
        _replaced("act", torch.tanh),
        _replaced("act", lambda x: x + 1),
        _replaced("shape", [1, 3]),
        _replaced("table", torch.tensor([1.0, 1, 2])),
        _replaced("head", nn.Linear(4, 3, bias=False)),
        _replaced("extra", nn.ReLU()),
        lambda module: module.head.register_forward_hook(lambda m, i, o: o + 1),
    ],
)
def test_what_an_answer_depends_on_is_in_the_fingerprint(change):
    one, other = Scaled(), Scaled()
    assert fingerprint(one) == fingerprint(other)
    change(other)
    assert fingerprint(one) != fingerprint(other)


def test_weights_are_in_the_checkpoints_hash_and_not_in_the_fingerprint():
    one, two = module_source(tiny(1)), module_source(tiny(2))
    assert one[0].fingerprint == two[0].fingerprint
    assert one[1].sha256 != two[1].sha256
    assert one[1].sha256 == module_source(tiny(1))[1].sha256


def test_lambdas_differ_by_what_they_do():
    def with_act(act: object) -> nn.Module:
        module = Scaled()
        module.act = act  # type: ignore[assignment]
        return module

    assert fingerprint(with_act(lambda x: x * 2)) == fingerprint(with_act(lambda x: x * 2))
    assert fingerprint(with_act(lambda x: x * 2)) != fingerprint(with_act(lambda x: x * 3))


NOTEBOOK = """
from torch import nn
FACTOR = {factor}
def act(x): return x * FACTOR  # {remark}
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.head = nn.Linear(2, 2)
    def forward(self, x):
        return {call}(self.head(x))
"""


OF_NOTEBOOKS = """
import json, os, sys
from torch import nn
from optimize.models.module_source import module_source
module_source(nn.Linear(2, 2))  # which imports what it needs
for text in json.loads(sys.argv[1]):
    if child := os.fork():  # a process for each, that need not import torch again
        assert os.waitpid(child, 0)[1] == 0, text
        continue
    exec(text)
    print(module_source(Net())[0].fingerprint)
    sys.exit()
"""


def of_notebooks(programs: Programs, *changes: dict[str, object]) -> list[str]:
    """The fingerprint of a class that has no file: as in a cell, each in a process of its own."""
    usual = {"factor": 2, "remark": "", "call": "act"}
    texts = json.dumps([NOTEBOOK.format(**usual | change) for change in changes])
    ended = programs.run("-c", OF_NOTEBOOKS, texts)
    assert ended.returncode == 0, ended.stderr
    return ended.stdout.split()


def test_a_class_of_a_notebook_is_told_by_its_code_and_what_that_refers_to(programs: Programs):
    first, remarked, other_factor, other_call = of_notebooks(
        programs, {}, {"remark": "only a remark"}, {"factor": 3}, {"call": "abs"}
    )
    assert len(first) == 64
    assert remarked == first
    assert other_factor != first
    assert other_call != first


def test_a_class_of_a_file_is_told_by_the_file_and_its_neighbours(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "live_blocks.py").write_text("WIDTH = 2\n")
    (tmp_path / "live_net.py").write_text(
        textwrap.dedent("""
            from torch import nn
            import live_blocks
            PREPROCESSING = {"resize": 40, "crop": 32, "mean": [0.5] * 3, "std": [0.5] * 3, "interpolation": "bicubic"}
            class Net(nn.Linear):
                def __init__(self):
                    super().__init__(live_blocks.WIDTH, 3)
        """)
    )
    net = importlib.import_module("live_net").Net()
    source, _ = module_source(net)
    chosen = choose_preprocessing(source, PHOTOS)
    assert chosen.preprocessing == Preprocessing(40, (32, 32), (0.5,) * 3, (0.5,) * 3, "bicubic")
    assert set(chosen.origins.values()) == {"your PREPROCESSING in live_net.py"}
    (tmp_path / "live_blocks.py").write_text("WIDTH = 2  # only a remark\n")
    assert fingerprint(net) == source.fingerprint
    (tmp_path / "live_blocks.py").write_text("WIDTH = 2\nDEPTH = 1\n")
    assert fingerprint(net) != source.fingerprint


def test_torchvisions_and_timms_modules_are_told_by_version_and_structure():
    from torchvision.models import resnet18

    assert fingerprint(resnet18(num_classes=3)) == fingerprint(resnet18(num_classes=3))
    assert fingerprint(resnet18(num_classes=3)) != fingerprint(resnet18(num_classes=3, norm_layer=nn.Identity))
    timm = pytest.importorskip("timm")
    source, _ = module_source(timm.create_model("vit_tiny_patch16_224", num_classes=3))
    chosen = choose_preprocessing(source, PHOTOS)
    assert chosen.preprocessing == Preprocessing(248, (224, 224), (0.5,) * 3, (0.5,) * 3, "bicubic")
    assert chosen.origins["mean"].startswith("timm's pretrained_cfg of vit_tiny_patch16_224")


def test_wrappers_are_taken_off():
    module = tiny()
    expected = module_source(module)[1].sha256
    assert module_source(nn.DataParallel(module))[1].sha256 == expected
    assert module_source(torch.compile(module))[1].sha256 == expected  # type: ignore[arg-type]


def test_what_is_no_usable_module_is_told():
    with torch.device("meta"):
        meta = nn.Linear(2, 2)
    closed = nn.Linear(2, 2)
    closed.lock = threading.Lock()  # type: ignore[assignment]
    for given, message in (
        (3, "must be a torch.nn.Module, this is a int"),
        (meta, "Linear: weight has no values yet"),
        (nn.LazyLinear(3), "LazyLinear: weight has no values yet"),
        (closed, "Linear: cannot be copied"),
    ):
        with pytest.raises(UserError, match=message):
            module_source(given)  # type: ignore[arg-type]


def test_a_torchscript_module_is_refused(monkeypatch):
    import warnings

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        scripted = torch.jit.script(nn.Linear(2, 2))
    with pytest.raises(UserError, match="TorchScript"):
        module_source(scripted)
