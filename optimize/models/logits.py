"""Turns a network with any kind of answer into one that returns logits ``(N, classes, …)``, and then other outputs.

Training, quantizing and serving need logits.

A forward may return a tuple, a dict or a record with its logits, and it may end in a softmax or a sigmoid. Both are
detected by running it. The network's class is then replaced by a subclass, as `torch.nn.utils.parametrize` does, so
that all names of its layers stay.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import MethodType
from typing import Any, Literal

import torch
from torch import fx, nn
from torch.overrides import TorchFunctionMode
from torch.utils.weak import WeakTensorKeyDictionary

from serve.runtime.card.card import LOGITS
from serve.runtime.errors import UserError, one_line
from serve.runtime.outputs import first_output

#: What a network returns: logits, or the result of a softmax, a log-softmax or a sigmoid.
Ending = Literal["logits", "softmax", "log-softmax", "sigmoid"]

#: The description of each ending for a reader.
ENDINGS: Mapping[Ending, str] = {
    "softmax": (
        "the network ends in a softmax: its logits are used for comparisons, and its probabilities are served unchanged"
    ),
    "log-softmax": "the network ends in a log-softmax, whose outputs are logits, too",
    "sigmoid": (
        "the network ends in a sigmoid for each class: its logits are used for comparisons, and each class is "
        "served with its own probability"
    ),
}

#: One step from an answer to its tensor: an item or an attribute, and its name or number.
_Step = tuple[Literal["item", "attribute"], Any]

#: The largest error of a sum of probabilities in float32.
_SUM = 1e-3
#: Factors for the last weights, to see whether answers stay within [0, 1] only because of the weights.
_FACTORS = (1e3, -1e3)
#: Bounds for probabilities without known logits: log(p) from -80, log(p / (1 - p)) up to 16, also in half precision.
_LEAST, _MOST, _TINY, _NEXT_TO_ONE = -80.0, 16.0, 1e-35, 6e-8
_ACTIVATIONS: Mapping[Ending, frozenset[Any]] = {
    "softmax": frozenset(
        {torch.softmax, torch.special.softmax, nn.functional.softmax, torch.Tensor.softmax, nn.Softmax, "softmax"}
    ),
    "sigmoid": frozenset(
        {torch.sigmoid, torch.special.expit, nn.functional.sigmoid, torch.Tensor.sigmoid, nn.Sigmoid, "sigmoid"}
    ),
}


def materialised(module: nn.Module, shape: tuple[int, int, int]) -> nn.Module:
    """Give lazy layers their shapes with a batch of empty images ``(2, *shape)``. The mode stays.

    Raises:
        UserError: the forward fails on it.
    """
    tensors = (*module.parameters(), *module.buffers())
    if any(isinstance(tensor, nn.UninitializedParameter | nn.UninitializedBuffer) for tensor in tensors):
        training = module.training
        try:
            with torch.no_grad():
                module.eval()(torch.zeros(2, *shape))
        except Exception as error:  # noqa: BLE001 - the user's forward may raise anything
            raise UserError(f"the model fails on an input of shape {(2, *shape)}: {one_line(error)}") from None
        module.train(training)
    return module


def with_outputs(module: nn.Module, shape: tuple[int, int, int], names: Sequence[str] = ()) -> nn.Module:
    """Make a network return one tensor, or the tuple of the outputs with these names.

    A forward may return a tensor, or a tuple, a dict or a record with tensors. A tensor's name is its key, its field or
    its number, with dots in between: ``out``, ``0``, ``features.1``. The name of a single tensor is ``logits``. A
    forward that fails is left unchanged.

    Args:
        module: its class is changed in place.
        shape: ``(C, H, W)`` of an image.
        names: names of the outputs. Without names it is the only tensor, or the one called ``logits``.

    Raises:
        UserError: an output does not exist. Or there are no names, several tensors, and none is called ``logits``. The
            message names all with their shapes.
    """
    try:
        answer = _answer(module, torch.zeros(2, *shape))
    except Exception:  # noqa: BLE001 - the caller reports the fault
        return module
    found = {_name(steps): (steps, tensor) for steps, tensor in _tensors(answer)}
    if missing := [name for name in names if name not in found]:
        raise UserError(f"outputs: the model returns no {missing[0]!r}; it returns {_listed(found) or 'no tensor'}")
    paths = [found[name][0] for name in names] if names else [_logits_in(answer, found)]
    if paths == [()]:
        return module
    return with_forward(module, lambda forward: _taken(forward, paths))


def _logits_in(answer: Any, found: Mapping[str, tuple[tuple[_Step, ...], torch.Tensor]]) -> tuple[_Step, ...]:
    """Return the steps to the only tensor of an answer, or to the one called ``logits``."""
    steps = [steps for steps, _ in found.values()]
    called = [each for each in steps if each and each[-1][1] == LOGITS]
    if len(steps) != 1 and len(called) != 1:
        raise UserError(
            f"the model gives a {type(answer).__name__} of {len(found)} tensors ({_listed(found) or 'none'}); it must "
            "return only its logits, or name them 'logits', or name its outputs with --outputs, logits first"
        )
    return steps[0] if len(steps) == 1 else called[0]


def _name(steps: tuple[_Step, ...]) -> str:
    return ".".join(str(name) for _, name in steps) or LOGITS


def _listed(found: Mapping[str, tuple[tuple[_Step, ...], torch.Tensor]]) -> str:
    return ", ".join(f"{name} {tuple(tensor.shape)}" for name, (_, tensor) in found.items())


def _answer(module: nn.Module, images: torch.Tensor) -> Any:
    """Return a network's answer in eval mode. The mode and the random numbers are restored."""
    training = [(part, part.training) for part in module.modules()]
    try:
        with torch.no_grad(), torch.random.fork_rng(devices=[]):
            return module.eval()(images)
    finally:
        for part, mode in training:
            part.training = mode


def _tensors(answer: Any, steps: tuple[_Step, ...] = ()) -> Iterator[tuple[tuple[_Step, ...], torch.Tensor]]:
    """Yield each tensor of an answer with the steps to it."""
    entries: list[tuple[_Step, Any]] = []
    if isinstance(answer, torch.Tensor):
        yield steps, answer
    elif isinstance(answer, Mapping):  # including Hugging Face's ModelOutput
        entries = [(("item", key), value) for key, value in answer.items()]
    elif dataclasses.is_dataclass(answer):
        entries = [(("attribute", field.name), getattr(answer, field.name)) for field in dataclasses.fields(answer)]
    elif isinstance(answer, tuple) and hasattr(answer, "_fields"):
        entries = [(("attribute", name), getattr(answer, name)) for name in answer._fields]
    elif isinstance(answer, list | tuple):
        entries = [(("item", number), value) for number, value in enumerate(answer)]
    elif hasattr(answer, "logits"):
        entries = [(("attribute", "logits"), answer.logits)]
    for step, value in entries:
        yield from _tensors(value, (*steps, step))


def _taken(forward: Callable[..., Any], paths: Sequence[tuple[_Step, ...]]) -> Callable[..., Any]:
    def forward_of_outputs(self: nn.Module, images: torch.Tensor) -> Any:
        answer = forward(self, images)
        outputs = tuple(_at(answer, steps) for steps in paths)
        return outputs if len(outputs) > 1 else outputs[0]

    return forward_of_outputs


def _at(answer: Any, steps: tuple[_Step, ...]) -> Any:
    for kind, name in steps:
        answer = answer[name] if kind == "item" else getattr(answer, name)
    return answer


class _Held(nn.Module):
    """Wraps a graph module, whose own class is generated again with each of its changes."""

    def __init__(self, graph: fx.GraphModule) -> None:
        super().__init__()
        self.network = graph

    def forward(self, images: torch.Tensor) -> Any:
        return self.network(images)


def with_forward(module: nn.Module, change: Callable[[Callable[..., Any]], Callable[..., Any]]) -> nn.Module:
    """Give the module another forward, which is made from that of its class. Its class is changed in place."""
    if isinstance(module, fx.GraphModule):
        module = _Held(module)
    kind = type(module)
    forward = change(_forward_of(module))
    # Only images are arguments, and the subclass's forward shows that to a tracer.
    module.__class__ = type(kind.__name__, (kind,), {"forward": forward, "__module__": __name__})
    return module


def _forward_of(module: nn.Module) -> Callable[..., Any]:
    """Return a module's forward as a function of itself and the images: its class's, or a replacement of it."""
    own = vars(module).pop("forward", None)
    if own is None:
        return type(module).forward
    if isinstance(own, MethodType) and own.__self__ is module:
        return own.__func__
    return lambda self, images: own(images)


def ending_of(module: nn.Module, images: torch.Tensor) -> Ending:
    """Find out by measurement what a network's answers are.

    Answers of a softmax are at least 0 and sum to one. For a log-softmax their exponentials do. Answers of a sigmoid
    are within [0, 1], even if the last weights are a thousand times as large.

    Args:
        module: its first output is ``(N, classes, …)``, in eval mode.
        images: several real ones, ``float32 (N, C, H, W)``, normalised.
    """
    try:
        with torch.no_grad(), torch.random.fork_rng(devices=[]):
            answers = first_output(module(images))
    except Exception:  # noqa: BLE001 - the caller reports the fault
        return "logits"
    if not isinstance(answers, torch.Tensor) or answers.ndim < 2 or not answers.isfinite().all():
        return "logits"
    if (answers >= 0).all() and _sum_to_one(answers):
        return "softmax"
    if (answers <= 0).all() and _sum_to_one(answers.exp()):
        return "log-softmax"
    return "sigmoid" if _within(answers) and _stays_within(module, images, answers) else "logits"


def _sum_to_one(probabilities: torch.Tensor) -> bool:
    return bool(((probabilities.sum(1) - 1).abs() < _SUM).all())


def _within(answers: torch.Tensor) -> bool:
    return bool(((answers >= 0) & (answers <= 1)).all())


def _stays_within(module: nn.Module, images: torch.Tensor, answers: torch.Tensor) -> bool:
    """Return whether answers stay within [0, 1] for any weights of the last layer. Logits can be there by chance."""
    last: list[str] = []
    hooks = [
        layer.register_forward_hook(lambda *_, name=name: last.append(name))
        for name, layer in module.named_modules()
        if next(layer.parameters(recurse=False), None) is not None
    ]
    try:
        with torch.no_grad():
            module(images[:1])
    finally:
        for hook in hooks:
            hook.remove()
    if not last:
        return False
    for factor in _FACTORS:
        other = copy.deepcopy(module)
        with torch.no_grad():
            for parameter in other.get_submodule(last[-1]).parameters(recurse=False):
                parameter.mul_(factor)
            found = first_output(other(images))
        if not _within(found) or torch.equal(found, answers):
            return False
    return True


def giving_logits(module: nn.Module, ending: str) -> nn.Module:
    """Make a network return the logits of its probabilities. Its class is changed in place.

    If its last step is a softmax or a sigmoid, the input of that step is returned, in eager mode and in a trace.
    Otherwise it is the logarithm of the probabilities.

    Args:
        module: its first output is ``(N, classes, …)``. Other outputs stay.
        ending: see `ending_of`.
    """
    if ending == "softmax":
        return with_forward(module, lambda forward: _before(forward, "softmax", _log))
    if ending == "sigmoid":
        return with_forward(module, lambda forward: _before(forward, "sigmoid", _log_odds))
    return module


def _log(probabilities: torch.Tensor) -> torch.Tensor:
    # Clamped twice: first for the gradient, then for half precision, where the first bound is 0.
    return probabilities.clamp_min(_TINY).log().clamp_min(_LEAST)


def _log_odds(probabilities: torch.Tensor) -> torch.Tensor:
    sure = probabilities.clamp(_NEXT_TO_ONE, 1 - _NEXT_TO_ONE)
    return (sure / (1 - sure)).log().clamp(-_MOST, _MOST)


class _ActivationRecorder(TorchFunctionMode):
    """Records the input of each call of an activation, for as long as its output lives."""

    def __init__(self, functions: frozenset[Any]) -> None:
        super().__init__()
        self.functions = functions
        self.inputs = WeakTensorKeyDictionary()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        answer = func(*args, **(kwargs or {}))
        if func in self.functions:
            self.inputs[answer] = args[0] if args else (kwargs or {}).get("input")
        return answer


def _before(
    forward: Callable[..., Any], ending: Ending, otherwise: Callable[[torch.Tensor], torch.Tensor]
) -> Callable[..., Any]:
    functions = _ACTIVATIONS[ending]

    def forward_of_logits(self: nn.Module, images: Any) -> Any:
        if isinstance(images, fx.Proxy):
            whole = forward(self, images)
            given = _given_in_graph(first_output(whole), functions)
        else:
            with _ActivationRecorder(functions) as recorded:
                whole = forward(self, images)
            given = recorded.inputs.get(first_output(whole))
        logits = otherwise(first_output(whole)) if given is None else given
        return (logits, *whole[1:]) if isinstance(whole, tuple) else logits

    return forward_of_logits


def _given_in_graph(answer: Any, functions: frozenset[Any]) -> Any:
    """Return the input of the activation that produced a traced answer. None if another node did."""
    node = answer.node
    if node.op == "call_module":
        root: Any = answer.tracer.root
        what: Any = type(root.get_submodule(str(node.target)))
    else:
        what = node.target
    if what not in functions:
        return None
    given = node.args[0] if node.args else node.kwargs.get("input")
    return answer.tracer.proxy(given) if isinstance(given, fx.Node) else None
