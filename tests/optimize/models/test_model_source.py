"""Names and files → modules: what is found, what is passed to the factory, and what a mistake is told."""

from __future__ import annotations

import re
import sys
import textwrap

import pytest
import torch
import torchvision
from torch import nn

from optimize.models import neighbour_modules
from optimize.models.model_names import resolve_model
from optimize.models.neighbour_modules import version_of
from serve.runtime.card.card import Preprocessing
from serve.runtime.errors import UserError

LINEAR = """
from torch import nn

def net(num_classes=10):
    return nn.Linear(4, num_classes)
"""


@pytest.fixture
def write(tmp_path):
    def write(text: str, name: str = "model.py") -> str:
        path = tmp_path / name
        path.write_text(textwrap.dedent(text))
        return str(path)

    return write


def test_a_torchvision_name_declares_its_default_weights_preprocessing():
    source = resolve_model("efficientnet_b1")
    assert source.name == "efficientnet_b1"
    assert source.fingerprint == f"torchvision/{torchvision.__version__}/efficientnet_b1"
    assert source.preprocessing == Preprocessing(255, (240, 240), interpolation="bilinear")
    assert resolve_model("efficientnet_v2_l").preprocessing == Preprocessing(
        480, (480, 480), (0.5, 0.5, 0.5), (0.5, 0.5, 0.5), "bicubic"
    )


@pytest.mark.parametrize(
    ("wrong", "right"), [("resnet8", "resnet18"), ("ResNet-18", "resnet18"), ("mobilnet_v2", "mobilenet_v2")]
)
def test_a_wrong_name_is_told_the_nearest(wrong, right):
    with pytest.raises(UserError, match=f"did you mean.*{right}"):
        resolve_model(wrong)


@pytest.mark.parametrize("name", ["ssd300_vgg16", "r3d_18", "raft_small", "quantized_resnet18"])
def test_torchvision_models_of_other_tasks_are_refused_as_such(name):
    with pytest.raises(UserError, match="neither a floating-point image classifier nor for segmentation"):
        resolve_model(name)


@pytest.mark.parametrize(
    ("name", "size"),
    [("resnet18", 64), ("vit_b_32", 96), ("swin_t", 64), ("googlenet", 64), ("inception_v3", 96), ("alexnet", 64)],
)
def test_built_torchvision_models_give_plain_logits_in_training_and_evaluation(name, size):
    model = resolve_model(name).build(5, size)
    images = torch.randn(2, 3, size, size)
    for training in (True, False):
        output = model.train(training)(images)
        assert isinstance(output, torch.Tensor)
        assert output.shape == (2, 5)


def test_inception_transforms_its_input_as_its_published_weights_expect():
    from torchvision.models import Inception3

    built = resolve_model("inception_v3").build(5)
    assert isinstance(built, Inception3)
    assert built.transform_input is True


def test_a_vit_refuses_a_side_that_is_no_multiple_of_its_patch_and_names_the_nearest():
    with pytest.raises(UserError, match=r"100x100.*multiple of 16.*96 or 112"):
        resolve_model("vit_b_16").build(10, 100)


def test_a_side_below_the_minimum_is_refused():
    with pytest.raises(UserError, match="at least 63"):
        resolve_model("alexnet").build(10, 32)


@pytest.mark.parametrize(
    "wrapping",
    ["torch.compile(net)", "nn.DataParallel(net)", "torch.compile(nn.DataParallel(net))", "net.double()", "net.half()"],
)
def test_of_what_a_factory_wraps_the_network_itself_is_built_in_float32(write, wrapping):
    path = write(
        f"import torch\nfrom torch import nn\n\ndef net():\n    net = nn.Linear(4, 3)\n    return {wrapping}\n"
    )
    built = resolve_model(f"{path}:net").build(3)
    assert type(built) is nn.Linear
    assert built(torch.ones(2, 4)).dtype is torch.float32


def test_a_factory_that_gives_torchscript_is_told_what_to_give(write):
    path = write("import torch\n\ndef net():\n    return torch.jit.script(torch.nn.Linear(4, 3))\n")
    with pytest.raises(UserError, match=r":net: returned a TorchScript module; return what it was made from$"):
        resolve_model(f"{path}:net").build(3)


def test_a_users_factory_is_called_from_a_file(write):
    reference = write(LINEAR) + ":net"
    source = resolve_model(reference)
    assert (source.reference, source.name, source.origin) == (reference, "net", "user")
    assert re.fullmatch("[0-9a-f]{64}", source.fingerprint)
    assert source.preprocessing is None
    assert source.build(7).out_features == 7


def test_a_users_factory_is_called_from_an_installed_module():
    source = resolve_model("torch.nn:Identity")
    assert isinstance(source.build(3), torch.nn.Identity)


def test_only_arguments_that_the_factory_names_are_passed(write):
    reference = write("""
        from torch import nn
        def fixed():
            return nn.Linear(1, 2)
        def sized(num_classes, image_size=1):
            return nn.Linear(image_size, num_classes)
        def forwards(**options):
            assert set(options) == {"num_classes"}
            return nn.Linear(1, options["num_classes"])
    """)
    assert resolve_model(reference + ":fixed").build(9, 32).out_features == 2
    sized = resolve_model(reference + ":sized").build(9, 32)
    assert isinstance(sized, torch.nn.Linear)
    assert (sized.in_features, sized.out_features) == (32, 9)
    assert resolve_model(reference + ":forwards").build(9, 32).out_features == 9


def test_a_class_defined_in_the_file_can_be_pickled_because_its_module_is_registered(write):
    reference = write(
        "from torch import nn\nclass Net(nn.Linear):\n    def __init__(self):\n        super().__init__(1, 1)"
    )
    model = resolve_model(reference + ":Net").build(1)
    assert sys.modules[type(model).__module__].Net is type(model)
    assert type(resolve_model(reference + ":Net").build(1)) is type(model)


def test_a_changed_file_is_executed_again_and_has_another_fingerprint(write):
    first = resolve_model(write(LINEAR) + ":net")
    second = resolve_model(write(LINEAR.replace("Linear(4", "Linear(5")) + ":net")
    assert first.fingerprint != second.fingerprint
    assert second.build(1).in_features == 5


def test_another_version_of_what_it_imports_is_another_fingerprint(write, monkeypatch):
    plain, imaging = write(LINEAR) + ":net", "import PIL.Image\n" + LINEAR
    before = resolve_model(plain).fingerprint
    again = resolve_model(write(imaging) + ":net").fingerprint
    monkeypatch.setattr(neighbour_modules, "version_of", lambda top: {"PIL": "99.0"}.get(top, version_of(top)))
    assert resolve_model(write(LINEAR) + ":net").fingerprint == before
    assert resolve_model(write(imaging) + ":net").fingerprint != again


def test_a_file_can_import_its_neighbour_and_the_path_is_left_as_it_was(write):
    write("WIDTH = 6", "my_neighbour_of_the_model.py")
    before = list(sys.path)
    reference = write("""
        from torch import nn
        import my_neighbour_of_the_model
        def net():
            return nn.Linear(my_neighbour_of_the_model.WIDTH, 1)
    """)
    assert resolve_model(reference + ":net").build(1).in_features == 6
    assert sys.path == before


@pytest.mark.parametrize(
    ("text", "attribute", "message"),
    [
        (LINEAR, "ned", r"no function or class 'ned' \(did you mean net\?\); it has net$"),
        (LINEAR, "", "must be path/to/file.py:FACTORY"),
        ("import nowhere_to_be_found", "net", "cannot be imported: ModuleNotFoundError.*nowhere_to_be_found"),
        ("def net(:", "net", r"cannot be imported: SyntaxError.*\(line 1\)"),
        ("raise SystemExit(3)", "net", "cannot be imported: SystemExit: 3"),
    ],
)
def test_a_broken_module_is_told_in_one_line(write, text, attribute, message):
    with pytest.raises(UserError, match=message) as caught:
        resolve_model(f"{write(text)}:{attribute}")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("reference", ["no/such/file.py:net", "no_such_package.models:net", "model.py"])
def test_a_missing_module_or_factory_says_what_would_be_right(reference):
    with pytest.raises(UserError, match=r":FACTORY"):
        resolve_model(reference)


def test_a_factory_that_raises_or_returns_something_else_is_told(write):
    reference = write("def bad():\n    raise ValueError('no width')\ndef other():\n    return 3")
    with pytest.raises(UserError, match="ValueError: no width"):
        resolve_model(reference + ":bad").build(1)
    with pytest.raises(UserError, match="it returned int"):
        resolve_model(reference + ":other").build(1)


def test_declared_preprocessing_is_taken(write):
    declared = 'PREPROCESSING = {"resize": 40, "crop": 32, "mean": [0.5], "std": (0.25,), "interpolation": "bicubic"}\n'
    source = resolve_model(write(declared + LINEAR) + ":net")
    assert source.preprocessing == Preprocessing(40, (32, 32), (0.5,), (0.25,), "bicubic")


@pytest.mark.parametrize(
    ("declared", "message"),
    [
        ("[1]", "must be a dict"),
        ('{"resize": 32}', "lacks 'crop'"),
        (
            '{"resize": 32, "crop": [32, 32], "size": 1}',
            r"PREPROCESSING\['size'\]: unknown.*known: resize, crop",
        ),
        ('{"resize": 32, "crop": [32, 32, 3]}', r"'crop'\]: must be whole pixels.*it is \[32, 32, 3\]"),
        ('{"resize": 32.5, "crop": 32}', r"'resize'\]: must be a whole number.*it is 32.5"),
        ('{"resize": 32, "crop": None}', "lacks 'crop'"),
        ('{"resize": 32, "crop": 0}', r"'crop'\]: must be whole pixels"),
        ('{"resize": 32, "crop": 32, "std": [0, 0, 0], "mean": [0, 0, 0]}', r"'std'\]: must be positive"),
        ('{"resize": 32, "crop": 32, "mean": ["a"], "std": [1]}', r"'mean'\]: must be one number per channel"),
        ('{"resize": 32, "crop": 32, "mean": [0.5]}', "need one number per channel"),
        ('{"resize": 32, "crop": 48}', "crop 48x48 is larger than resize 32"),
        ('{"resize": 32, "crop": 32, "interpolation": "lanczos"}', "lanczos"),
    ],
)
def test_wrong_declared_preprocessing_is_refused(write, declared, message):
    with pytest.raises(UserError, match=message):
        resolve_model(write(f"PREPROCESSING = {declared}\n{LINEAR}") + ":net")
