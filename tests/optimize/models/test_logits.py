"""Networks whose answer is no plain tensor of logits: what is taken of it, and which probabilities are served."""

from __future__ import annotations

import copy
import dataclasses
import json
import math
from collections import OrderedDict
from pathlib import Path
from types import MethodType
from typing import Any, NamedTuple

import pytest
import torch
from torch import nn
from torch.nn import functional

import optimize as opt
from optimize.models.logits import ending_of, giving_logits, materialised, with_outputs
from optimize.models.pickling import pickled_by_value
from optimize.tasks.classification import CLASSIFICATION
from optimize.tracing.trace import trace
from serve.runtime.card.card import Card, Preprocessing, read_card
from serve.runtime.card.json_documents import sealed
from serve.runtime.errors import Refusal, UserError
from serve.runtime.images.placement import PlacedImage, Placement
from serve.runtime.tasks.classification import KnownLogits, probabilities_of
from tests.narrow import layer
from tests.programs import Programs

SHAPE = (3, 8, 8)
IMAGES = torch.randn(8, *SHAPE, generator=torch.Generator().manual_seed(7))


class Plain(nn.Module):
    """Logits of some size; subclasses say what becomes of them."""

    def __init__(self, classes: int = 4) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.conv = nn.Conv2d(3, 6, 3)
        self.last = nn.Softmax(1)
        self.sure = nn.Sigmoid()
        self.fc = nn.Linear(6, classes)
        with torch.no_grad():
            self.fc.weight.mul_(5)

    def features(self, x: torch.Tensor) -> torch.Tensor:
        return self.fc(torch.relu(self.conv(x)).mean((2, 3)))

    def forward(self, x: torch.Tensor) -> Any:
        return self.end(self.features(x))

    def end(self, logits: torch.Tensor) -> Any:
        return logits


class Record(NamedTuple):
    logits: torch.Tensor
    hidden: torch.Tensor


@dataclasses.dataclass
class Output:
    logits: torch.Tensor
    loss: torch.Tensor | None = None


def net(end: Any) -> nn.Module:
    return type("Net", (Plain,), {"end": end})().eval()


def reference() -> torch.Tensor:
    with torch.no_grad():
        return Plain().eval()(IMAGES)


SOFTMAXES = {
    "layer": lambda self, y: self.last(y),
    "function": lambda self, y: functional.softmax(y, dim=-1),
    "torch": lambda self, y: torch.softmax(y, 1),
    "method": lambda self, y: y.softmax(1),
    "temperature": lambda self, y: (y / 2).softmax(1),
    "by hand": lambda self, y: y.exp() / y.exp().sum(1, keepdim=True),
    "two in one": lambda self, y: (self.last(y) + self.last(2 * y)) / 2,
}


@pytest.mark.parametrize("end", SOFTMAXES.values(), ids=SOFTMAXES.keys())
def test_a_softmax_is_measured_and_its_probabilities_come_back_from_the_logits(end):
    network = net(end)
    with torch.no_grad():
        expected = network(IMAGES)
    assert ending_of(network, IMAGES) == "softmax"
    changed = giving_logits(network, "softmax")
    with torch.no_grad():
        assert torch.allclose(changed(IMAGES).softmax(1), expected, atol=1e-6)
        assert torch.allclose(trace(changed, IMAGES)(IMAGES), changed(IMAGES), atol=1e-5)
        exported = torch.export.export(changed, (IMAGES,)).module()
        assert torch.allclose(exported(IMAGES), changed(IMAGES), atol=1e-5)
    assert set(dict(changed.named_parameters())) == {"conv.weight", "conv.bias", "fc.weight", "fc.bias"}


@pytest.mark.parametrize(
    "end", [lambda s, y: s.sure(y), lambda s, y: torch.sigmoid(y), lambda s, y: 1 / (1 + (-y).exp())]
)
def test_a_sigmoid_is_measured_and_each_class_keeps_its_probability(end):
    network = net(end)
    with torch.no_grad():
        expected = network(IMAGES)
    assert ending_of(network, IMAGES) == "sigmoid"
    changed = giving_logits(network, "sigmoid")
    with torch.no_grad():
        assert torch.allclose(probabilities_of(changed(IMAGES), "sigmoid"), expected, atol=1e-6)
        assert torch.allclose(trace(changed, IMAGES)(IMAGES), changed(IMAGES), atol=1e-4)


@pytest.mark.parametrize(
    ("end", "ending"),
    [
        (lambda s, y: y, "logits"),
        (lambda s, y: functional.log_softmax(y, 1), "log-softmax"),
        (lambda s, y: y.abs() / 1e3, "logits"),  # within [0, 1], by its weights alone
        (lambda s, y: 0 * y, "logits"),
        (lambda s, y: torch.relu(y), "logits"),
        (lambda s, y: y * math.nan, "logits"),
        (lambda s, y: y.softmax(1) * 2, "logits"),
    ],
)
def test_other_answers_are_told_apart_from_probabilities(end, ending):
    assert ending_of(net(end), IMAGES) == ending


def test_logits_before_a_saturated_softmax_are_exact_and_those_by_a_logarithm_finite():
    exact = giving_logits(net(lambda s, y: s.last(1000 * y)), "softmax")
    by_logarithm = giving_logits(net(lambda s, y: s.last(1000 * y).clone()), "softmax")
    with torch.no_grad():
        assert torch.equal(exact(IMAGES), 1000 * reference())
    logits = by_logarithm(IMAGES)
    logits.sum().backward()
    assert logits.isfinite().all()
    assert all(parameter.grad.isfinite().all() for parameter in by_logarithm.parameters() if parameter.grad is not None)
    with torch.no_grad():
        assert by_logarithm.half()(IMAGES.half()).isfinite().all()


ONE_TENSOR = {
    "tuple": lambda self, y: (y,),
    "list": lambda self, y: [y],
    "logits": lambda self, y: {"hidden": 2 * y, "logits": y},
    "one entry": lambda self, y: {"anything": y},
    "ordered": lambda self, y: OrderedDict(logits=y, attentions=(y, y)),
    "nested": lambda self, y: ({"out": y}, None),
    "named tuple": lambda self, y: Record(y, 2 * y),
    "dataclass": lambda self, y: Output(y),
}


@pytest.mark.parametrize("end", ONE_TENSOR.values(), ids=ONE_TENSOR.keys())
def test_the_logits_are_taken_out_of_what_holds_them(end):
    changed = with_outputs(net(end), SHAPE)
    with torch.no_grad():
        assert torch.equal(changed(IMAGES), reference())
        assert torch.allclose(trace(changed, IMAGES)(IMAGES), reference(), atol=1e-6)


@pytest.mark.parametrize("bound", [False, True])
def test_a_forward_that_was_put_into_a_module_is_the_one_that_counts(bound):
    network = Plain().eval()
    given = Plain().eval()
    put: Any = lambda x: given.features(x).softmax(1)  # noqa: E731
    network.forward = MethodType(lambda self, x: self.features(x).softmax(1), network) if bound else put  # type: ignore[method-assign]
    assert ending_of(network, IMAGES) == "softmax"
    changed = giving_logits(network, "softmax")
    with torch.no_grad():
        assert torch.equal(changed(IMAGES), reference())
        if bound:
            assert torch.equal(copy.deepcopy(changed)(IMAGES), reference())


def test_a_softmax_within_a_dict_is_found_behind_it():
    network = with_outputs(net(lambda self, y: {"scores": y.softmax(1)}), SHAPE)
    assert ending_of(network, IMAGES) == "softmax"
    with torch.no_grad():
        assert torch.equal(giving_logits(network, "softmax")(IMAGES), reference())


def test_a_graph_module_is_changed_likewise():
    network = with_outputs(trace(net(lambda self, y: {"logits": y.softmax(1)}), IMAGES), SHAPE)
    changed = giving_logits(network, ending_of(network, IMAGES))
    with torch.no_grad():
        assert torch.allclose(changed(IMAGES), reference(), atol=1e-6)


def test_several_tensors_are_refused_with_their_shapes():
    with pytest.raises(UserError, match=r"boxes \(2, 4\), scores \(2,\).*name them 'logits'") as caught:
        with_outputs(net(lambda self, y: {"boxes": y, "scores": y[:, 0]}), SHAPE)
    assert "\n" not in str(caught.value)


OUTPUTS = {
    "dict": (lambda self, y: {"mask": 2 * y, "class": y}, ("class", "mask")),
    "nested": (lambda self, y: ({"out": y}, [None, 2 * y]), ("0.out", "1.1")),
    "named tuple": (lambda self, y: Record(y, 2 * y), ("logits", "hidden")),
}


@pytest.mark.parametrize(("end", "names"), OUTPUTS.values(), ids=OUTPUTS.keys())
def test_named_outputs_are_kept_in_the_order_of_their_names(end, names):
    changed = with_outputs(net(end), SHAPE, names)
    for answered in (changed(IMAGES), trace(changed, IMAGES)(IMAGES)):
        assert isinstance(answered, tuple)
        assert len(answered) == 2
        assert torch.allclose(answered[0], reference(), atol=1e-6)
        assert torch.allclose(answered[1], 2 * reference(), atol=1e-6)


def test_the_name_of_a_single_tensor_is_logits():
    assert torch.equal(with_outputs(net(lambda self, y: y), SHAPE, ("logits",))(IMAGES), reference())


def test_one_named_output_is_a_tensor():
    changed = with_outputs(net(lambda self, y: {"mask": 2 * y, "class": y}), SHAPE, ("class",))
    assert torch.equal(changed(IMAGES), reference())


def test_an_output_that_does_not_exist_is_refused_with_those_that_do():
    with pytest.raises(UserError, match=r"outputs: the model returns no 'box'; it returns boxes \(2, 4\)$"):
        with_outputs(net(lambda self, y: {"boxes": y}), SHAPE, ("box",))


@pytest.mark.parametrize(("ending", "activation"), [("softmax", lambda y: y.softmax(1)), ("sigmoid", torch.sigmoid)])
def test_the_ending_of_the_first_output_is_found_and_the_others_stay(ending, activation):
    changed = with_outputs(net(lambda self, y: (2 * y, activation(y))), SHAPE, ("1", "0"))
    assert ending_of(changed, IMAGES) == ending
    network = giving_logits(changed, ending)
    for each in (network, trace(network, IMAGES)):
        logits, other = each(IMAGES)
        assert torch.allclose(logits, reference(), atol=1e-5)
        assert torch.allclose(other, 2 * reference(), atol=1e-6)


def test_lazy_layers_get_their_shapes_and_keep_their_mode():
    network = nn.Sequential(nn.LazyConv2d(4, 3), nn.LazyBatchNorm2d(), nn.Flatten(), nn.LazyLinear(4))
    materialised(network, SHAPE)
    assert network.training
    assert network[3].weight.shape == (4, 4 * 6 * 6)
    assert layer(network, "1", nn.BatchNorm2d).num_features == 4
    with pytest.raises(UserError, match=r"fails on an input of shape \(2, 5, 8, 8\)"):
        materialised(nn.Sequential(nn.Conv2d(3, 1, 1), nn.LazyLinear(2)), (5, 8, 8))


def test_the_loss_of_a_sigmoid_is_each_class_s_own():
    logits, labels = torch.tensor([[2.0, -1.0, 0.5]]), torch.tensor([0])
    p = [1 / (1 + math.exp(-value)) for value in logits[0].tolist()]
    expected = -(math.log(p[0]) + math.log(1 - p[1]) + math.log(1 - p[2]))
    assert CLASSIFICATION.loss(logits, labels, "sigmoid").item() == pytest.approx(expected, rel=1e-5)
    assert CLASSIFICATION.loss(logits, labels, "softmax").item() == pytest.approx(
        -math.log(math.exp(2) / (math.exp(2) + math.exp(-1) + math.exp(0.5))), rel=1e-5
    )
    own = CLASSIFICATION.soft_loss(logits, logits, 2.0, "sigmoid")
    assert own < CLASSIFICATION.soft_loss(logits + 1, logits, 2.0, "sigmoid")


def test_a_known_answer_of_a_sigmoid_is_compared_as_one():
    known = KnownLogits((2.0, -3.0), probabilities="sigmoid")
    assert known.difference([1 / (1 + math.exp(-2)), 1 / (1 + math.exp(3))]) == pytest.approx(0, abs=1e-9)
    assert known.difference([0.99, 0.01]) > known.difference([0.88, 0.05])


class Ended(nn.Module):
    """Digits in, probabilities out."""

    def __init__(self, end: nn.Module) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.conv, self.norm, self.fc, self.end = nn.Conv2d(3, 8, 3, stride=2), nn.BatchNorm2d(8), nn.Linear(8, 10), end

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"scores": self.end(self.fc(self.norm(self.conv(x)).relu().mean((2, 3))))}


@pytest.mark.parametrize("end", [nn.Softmax(1), nn.Sigmoid()])
def test_what_the_network_says_is_what_every_artifact_serves(tmp_path: Path, end: nn.Module):
    network = Ended(end).eval()
    with torch.no_grad():
        network.fc.weight.mul_(20)
    base = opt.load(network, data="digits", store=tmp_path, preprocessing=opt.PreprocessingConfig(resize=8, crop=8))
    fused, quantized = opt.apply(base, opt.Fuse()), opt.apply(base, opt.Ptq(images=32))
    pixels = base.session.context.pixels(6)
    images = base.session.context.example(6)
    with torch.no_grad():
        expected = network(images)["scores"]
    for variant in (base, fused):
        card = variant.artifact.card
        assert card.probabilities == ("softmax" if isinstance(end, nn.Softmax) else "sigmoid")
        predictor = variant.predictor()
        assert torch.allclose(probabilities_of(predictor.logits(pixels), card.probabilities), expected, atol=1e-4)
        whole = Placement.of(8, 8, card.preprocessing)
        found = predictor.compute([PlacedImage(image, whole) for image in pixels], [10] * 6).outcomes
        for row, outcome in zip(expected, found, strict=True):
            assert not isinstance(outcome, Refusal)
            assert {label.index: label.probability for label in outcome} == pytest.approx(
                dict(enumerate(row.tolist())), abs=1e-4
            )
    assert quantized.artifact.card.probabilities == base.artifact.card.probabilities
    with torch.no_grad():
        given = probabilities_of(quantized.predictor().logits(pixels), quantized.artifact.card.probabilities)
        assert torch.allclose(given, expected, atol=0.1)
    assert any("the network ends in a" in note for note in base.artifact.card.notes)


def test_a_card_and_a_known_answer_that_do_not_say_mean_a_softmax(tmp_path: Path):
    assert read_card(write_example(tmp_path)).probabilities == "softmax"
    assert KnownLogits.parsed({"logits": [1.0, 2.0]}).probabilities == "softmax"


def write_example(folder: Path) -> Path:
    card = Card(
        *("a", "b", "classification", "torchscript", "m", "float32", "float32", "any"),
        *(Preprocessing(8, (8, 8)), ("x",), {"m": "0" * 64}),
    )
    body = dataclasses.asdict(card)
    del body["probabilities"]
    (folder / "card.json").write_text(json.dumps(sealed(body)))
    return folder


def test_a_changed_network_travels_to_another_process(tmp_path: Path, programs: Programs):
    network = giving_logits(with_outputs(net(lambda self, y: {"scores": self.last(y)}), SHAPE), "softmax")
    (tmp_path / "network").write_bytes(pickled_by_value(network))
    code = (
        "import pathlib, pickle, sys, torch; network = pickle.loads(pathlib.Path(sys.argv[1]).read_bytes());"
        "print(network(torch.ones(1, 3, 8, 8)).tolist())"
    )
    done = programs.run("-c", code, tmp_path / "network")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)[0] == pytest.approx(network(torch.ones(1, *SHAPE))[0].tolist(), rel=1e-5)
