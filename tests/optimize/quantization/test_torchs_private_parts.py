"""What quantization stands on in torch and torch promises nobody: which parts, and what they must do (2.11 to 2.14).

``torch.ao.quantization`` is deprecated (torchao takes over), and some of what is used has a leading underscore.
Each is used in one place, and each test here says by itself what that place needs of it: where another release of torch
breaks one, this says which, and what is lost, before a network does.
"""

from __future__ import annotations

import ast
import copy
import re
from pathlib import Path

import pytest
import torch
import torch.ao.quantization.fx._decomposed
from torch import nn
from torch.ao.nn.intrinsic.modules.fused import _FusedModule
from torch.ao.nn.quantized import Conv2d as PackedConv2d
from torch.ao.nn.quantized.modules.linear import LinearPackedParams
from torch.ao.quantization import FakeQuantizeBase, QConfigMapping, get_default_qconfig_mapping
from torch.ao.quantization.backend_config import get_tensorrt_backend_config
from torch.ao.quantization.backend_config.x86 import get_x86_backend_config
from torch.ao.quantization.observer import ObserverBase
from torch.ao.quantization.quantize_fx import _convert_to_reference_decomposed_fx, convert_fx, prepare_fx
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.conv import _ConvNd

ROOT = Path(__file__).parents[3]

#: What has a leading underscore in torch, or is of its deprecated quantization, by the module that uses it: all of it.
USED = {
    "torch.ao.nn.intrinsic.modules.fused._FusedModule",
    "torch.ao.quantization.fx._decomposed",
    "torch.ao.quantization.quantize_fx._convert_to_reference_decomposed_fx",
    "torch.nn.modules.batchnorm._BatchNorm",
    "torch.nn.modules.conv._ConvNd",
}
#: Attributes of ``torch`` with a leading underscore that quantization calls.
CALLED = {
    "torch._make_per_channel_quantized_tensor",
    "torch._make_per_tensor_quantized_tensor",
    "torch._ops.OpOverload",
    "torch.cpu._is_vnni_supported",
}


def prepared_net() -> tuple[torch.fx.GraphModule, torch.Tensor]:
    """A calibrated convolution with ReLU and a linear layer."""
    torch.manual_seed(0)
    module = nn.Sequential(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(144, 3)).eval()
    images = torch.randn(4, 1, 8, 8)
    prepared = prepare_fx(
        module, get_default_qconfig_mapping("x86"), (images,), backend_config=get_x86_backend_config()
    )
    prepared(images)
    return prepared, images


def private_names(path: Path) -> set[str]:
    """Torch's private names that a module imports or spells out."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        names = []
        if isinstance(node, ast.ImportFrom) and node.module and node.module.startswith("torch"):
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.Import):
            names = [alias.name for alias in node.names if alias.name.startswith("torch")]
        elif isinstance(node, ast.Attribute):
            names = [ast.unparse(node)]
        found |= {name for name in names if re.match(r"torch\.[\w.]*\b_[a-z]\w*|torch\.[\w.]*\._[A-Z]\w*", name)}
    return {name for name in found if name.startswith("torch.") and "(" not in name}


def test_no_other_private_part_of_torch_is_used_by_quantization() -> None:
    rooms = [ROOT / "optimize" / room for room in ("quantization", "certify")]
    integers = ROOT / "serve" / "runtime" / "device" / "cpu_integers.py"
    modules = [*(path for room in rooms for path in room.glob("*.py")), integers]
    found = {name for path in modules for name in private_names(path)}
    assert found - {f"{name.rpartition('.')[0]}" for name in found} <= USED | CALLED


def test_the_reference_form_has_quantizers_with_ranges_around_float_operators() -> None:
    """`_convert_to_reference_decomposed_fx`: what every graph and every certificate is made from."""
    prepared, images = prepared_net()
    reference = _convert_to_reference_decomposed_fx(copy.deepcopy(prepared), backend_config=get_x86_backend_config())
    program = torch.export.export(reference, (images,))
    calls = [node for node in program.graph.nodes if node.op == "call_function"]
    names = [str(node.target) for node in calls]
    assert "quantized_decomposed.quantize_per_tensor.default" in names
    assert "quantized_decomposed.quantize_per_channel.default" in names
    first = next(node for node in calls if "quantize_per_tensor" in str(node.target))
    scale, zero, low, high, dtype = first.args[1:6]
    assert isinstance(scale, float)
    assert (type(zero), low, dtype) == (int, 0, torch.uint8)
    assert high in (127, 255)


@pytest.mark.parametrize("half", [0.5, 1.5, 2.5, -0.5, -1.5])
def test_decomposed_quantizers_multiply_by_the_inverse_and_round_ties_to_even(half: float) -> None:
    """`torch.ops.quantized_decomposed`: what the integers mean is defined by it."""
    quantize = torch.ops.quantized_decomposed.quantize_per_tensor.default
    scale = 0.1
    (found,) = quantize(torch.tensor([half * scale], dtype=torch.float64).float(), scale, 10, 0, 255, torch.uint8)
    inverse = torch.tensor(half * scale, dtype=torch.float32) * torch.tensor(1 / scale, dtype=torch.float32)
    assert found.item() == int(torch.round(inverse).item()) + 10
    (clamped,) = quantize(torch.tensor([1e6]), scale, 10, 0, 127, torch.uint8)
    assert clamped.item() == 127, "the range is narrower than the type"


def test_a_layer_and_its_activation_become_one_module_of_a_known_class() -> None:
    """`_FusedModule`: whose first part is the layer with the weights."""
    prepared, _ = prepared_net()
    fused = [layer for layer in prepared.modules() if isinstance(layer, _FusedModule)]
    assert [type(layer[0]) for layer in fused] == [nn.Conv2d]


def test_packed_layers_give_their_weights_back() -> None:
    """``_weight_bias`` of a packed layer: by it quantized layers are counted."""
    prepared, _ = prepared_net()
    converted = convert_fx(copy.deepcopy(prepared), backend_config=get_x86_backend_config())
    packed = [layer for layer in converted.modules() if isinstance(layer, PackedConv2d)]
    weight, bias = packed[0]._weight_bias()
    assert weight.qscheme() == torch.per_channel_affine
    assert bias is not None
    assert any(isinstance(layer, LinearPackedParams) for layer in converted.modules())


def test_watchers_are_observers_or_fake_quantizers() -> None:
    prepared, _ = prepared_net()
    watchers = [layer for name, layer in prepared.named_modules() if name.startswith("activation_post_process")]
    assert watchers
    assert all(isinstance(layer, ObserverBase | FakeQuantizeBase) for layer in watchers)
    assert all(callable(layer.calculate_qparams) for layer in watchers)


def test_a_qconfig_mapping_tells_what_was_set_by_name_and_by_class() -> None:
    """Its dictionaries are read where a layer's own setting must not be overridden."""
    mapping = QConfigMapping().set_module_name("a", None).set_object_type(nn.Linear, None)
    assert mapping.module_name_qconfigs == {"a": None}
    assert mapping.object_type_qconfigs == {nn.Linear: None}
    assert mapping.global_qconfig is None


def test_backend_configs_have_patterns() -> None:
    for backend in (get_x86_backend_config(), get_tensorrt_backend_config()):
        assert nn.Conv2d in {config.pattern for config in backend.configs}


def test_bases_of_layers_are_what_all_of_a_kind_have_in_common() -> None:
    assert issubclass(nn.Conv2d, _ConvNd)
    assert issubclass(nn.ConvTranspose2d, _ConvNd)
    assert issubclass(nn.BatchNorm2d, _BatchNorm)


def test_a_quantized_tensor_can_be_made_of_its_integers() -> None:
    """`torch._make_per_tensor_quantized_tensor`: how a packed layer is given the reference's integers."""
    integers = torch.arange(256, dtype=torch.uint8)
    made = torch._make_per_tensor_quantized_tensor(integers, 0.5, 3)
    assert torch.equal(made.int_repr(), integers)
    assert (made.q_scale(), made.q_zero_point(), made.dtype) == (0.5, 3, torch.quint8)


def test_a_quantized_weight_can_be_made_of_its_integers_and_packed() -> None:
    """`torch._make_per_channel_quantized_tensor` and ``set_weight_bias``: how a packed layer gets other scales."""
    integers = torch.arange(-9, 9, dtype=torch.int8).reshape(2, 1, 3, 3)
    scales, zeros = torch.tensor([0.5, 0.25]), torch.zeros(2, dtype=torch.int64)
    made = torch._make_per_channel_quantized_tensor(integers, scales, zeros, 0)
    layer = PackedConv2d(1, 2, 3)
    layer.set_weight_bias(made, torch.tensor([1.0, 2.0]))
    weight, bias = layer._weight_bias()
    assert torch.equal(weight.int_repr(), integers)
    assert weight.q_per_channel_scales().tolist() == scales.tolist()
    assert weight.qscheme() == torch.per_channel_affine
    assert bias is not None
    assert bias.tolist() == [1.0, 2.0]


def test_the_nodes_of_a_traced_file_are_operators_that_can_be_called(tmp_path: Path) -> None:
    """``inlined_graph`` of TorchScript: kinds, inputs by name, constants as values."""
    prepared, images = prepared_net()
    converted = convert_fx(copy.deepcopy(prepared), backend_config=get_x86_backend_config())
    frozen = torch.jit.freeze(torch.jit.trace(converted, images, check_trace=False))
    torch.jit.save(frozen, str(tmp_path / "model.pt"))
    nodes = list(torch.jit.load(str(tmp_path / "model.pt")).inlined_graph.nodes())
    convolution = next(node for node in nodes if node.kind().startswith("quantized::conv2d"))
    image, packed, scale, zero = convolution.inputs()
    assert image.node().kind() == "aten::quantize_per_tensor"
    constants = [value.node().output().toIValue() for value in (scale, zero)]
    assert [type(value) for value in constants] == [float, int]
    assert isinstance(packed.node().output().toIValue(), torch.ScriptObject)
