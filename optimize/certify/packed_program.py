"""Runs torch's packed int8 program operator by operator, each on the integers that the reference gives it.

The file is TorchScript, traced and frozen: a straight line of operators, whose packed weights are constants. It is the
file that is served, and its kernels are those that the process selected.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from optimize.certify.reference_program import Batch, Layer
from serve.runtime.errors import PipelineError, one_line

#: TorchScript operators that only build structures, by kind.
_STRUCTURE = ("prim::ListConstruct", "prim::TupleConstruct")
#: Operators that pass on a quantized tensor, perhaps clamped, and for which the reference has no quantizer.
_PASSES_ON = ("aten::clamp", "aten::clamp_", "aten::dropout", "aten::contiguous", "aten::alias", "aten::clone")


class PackedLayers:
    """A packed program whose quantized tensors are those of a reference program's layers.

    Args:
        script: a loaded module.
        layers: the layers of the reference program.

    Attributes:
        ended: the operator that failed in the last full run, and why. Nothing behind it is known. None: all ran.
    """

    def __init__(self, script: Any, layers: Sequence[Layer]) -> None:
        self._graph = script.inlined_graph
        self._script = script
        self._layers = layers
        self._nodes = list(self._graph.nodes())
        self._number_of: dict[str, int] = {}
        self._given: set[int] = set()
        self.ended: str | None = None

    def match(self, batch: Batch) -> list[int]:
        """Find the tensor that is each layer's result, and return the numbers of the layers found.

        Both programs are made from one prepared model, in its order. Each layer's scale, zero point and shape are
        known. Layers that torch fuses further, or leaves out, are not found.

        Args:
            batch: as the reference received it.
        """
        values = self._begun(batch.images)
        waiting = list(self._layers)
        for node in self._ran(values):
            name = node.outputsAt(0).debugName() if node.outputsSize() == 1 else ""
            tensor = values.get(name)
            if not isinstance(tensor, torch.Tensor) or not tensor.is_quantized:
                continue
            given = next(node.inputs(), None)
            source = given.debugName() if given is not None else ""
            found = next((n for n, layer in enumerate(waiting) if _is_of(tensor, layer, batch)), None)
            passes_on = node.kind() in _PASSES_ON and source in self._number_of
            if passes_on and (found != 0 or self._keeps_range(node, values, self._number_of[source])):
                self._number_of[name] = self._number_of.pop(source)
            elif found is not None:
                self._number_of[name] = waiting[found].number
                waiting = waiting[found + 1 :]
        return sorted(self._number_of.values())

    def integers(self, batch: Batch, only: int | None = None) -> dict[int, torch.Tensor]:
        """Return each layer's integers, as the kernels compute them from the batch's integers of earlier layers.

        Args:
            batch: the given integers. A layer without integers in it keeps its computed ones.
            only: the last layer to compute.
        """
        values = self._begun(batch.images)
        found: dict[int, torch.Tensor] = {}
        self._given = set(self._number_of.values())
        absent = batch.integers.keys() - self._given
        for node in self._ran(values):
            name = node.outputsAt(0).debugName() if node.outputsSize() == 1 else ""
            number = self._number_of.get(name)
            if number is None:
                met = {each for each in absent if _has(values.get(name), batch.integers[each])}
                self._given |= met
                absent -= met
                continue
            computed = values[name]
            found[number] = computed.int_repr()
            if number == only:
                break
            if number in batch.integers:
                values[name] = torch._make_per_tensor_quantized_tensor(
                    batch.integers[number].contiguous(), computed.q_scale(), computed.q_zero_point()
                )
        return found

    def astray(self, layer: Layer) -> tuple[str, ...]:
        """Return the names of earlier layers that gave a layer other integers, in `integers`, than the batch's.

        They have no step of their own here, so that the layer got the computed integers.
        """
        return tuple(self._layers[number].name for number in layer.before if number not in self._given)

    def _keeps_range(self, node: Any, values: dict[str, Any], number: int) -> bool:
        """Tell whether a node is the clamp that keeps a layer's integers within the quantizer's range, and no layer.

        The next layer can have the same scale and zero point, and may be an operator that cannot be found.
        """
        if not node.kind().startswith("aten::clamp"):
            return False
        _, low, high = (values[given.debugName()] for given in node.inputs())
        quantizer = self._layers[number].quantizer
        most = (quantizer.high - quantizer.zero_point) * quantizer.scale
        return low is None and isinstance(high, int | float) and math.isclose(high, most, rel_tol=1e-6)

    def _begun(self, images: torch.Tensor) -> dict[str, Any]:
        own, image = list(self._graph.inputs())[-2:]
        return {own.debugName(): self._script, image.debugName(): images}

    def _ran(self, values: dict[str, Any]) -> Iterator[Any]:
        """Each node, when it has been run. See `ended`."""
        self.ended = None
        for node in self._nodes:
            try:
                self._run(node, values)
            except Exception as error:  # noqa: BLE001 - an operator may refuse in any way
                self.ended = str(error) if isinstance(error, PipelineError) else f"{node.kind()}: {one_line(error)}"
                return
            yield node

    def _run(self, node: Any, values: dict[str, Any]) -> None:
        """Compute a node's outputs from its inputs."""
        kind: str = node.kind()
        outputs = [output.debugName() for output in node.outputs()]
        given = [values[value.debugName()] for value in node.inputs()]
        if kind == "prim::Constant":
            values[outputs[0]] = node.outputsAt(0).toIValue()
        elif kind == "prim::GetAttr":
            values[outputs[0]] = getattr(given[0], node.s("name"))
        elif kind in _STRUCTURE:
            values[outputs[0]] = given
        elif kind in ("prim::ListUnpack", "prim::TupleUnpack"):
            values.update(zip(outputs, given[0], strict=True))
        elif kind == "prim::NumToTensor":
            values[outputs[0]] = torch.tensor(given[0])
        elif kind == "aten::Int":
            values[outputs[0]] = int(given[0])
        else:
            values[outputs[0]] = self._called(node, given)

    def _called(self, node: Any, given: Sequence[Any]) -> Any:
        namespace, _, name = node.kind().partition("::")
        operator = getattr(getattr(torch.ops, namespace), name, None)
        if operator is None:
            raise PipelineError(f"torch's packed program has {node.kind()}, which cannot be run alone")
        named = dict(_keywords(operator, node.schema(), given))
        with torch.no_grad():
            return operator(*given[: len(given) - len(named)], **named)


def _keywords(operator: Any, schema: str, given: Sequence[Any]) -> Iterator[tuple[str, Any]]:
    """Those arguments, the last ones, that an operator takes by name alone: ``approximate`` of ``aten::gelu``.

    Args:
        operator: with all its overloads.
        schema: of the one that is called, ``aten::add.Tensor(Tensor self, …``; other words have no such arguments.
        given: all arguments, in the schema's order, as TorchScript has them.
    """
    overload = schema.partition("(")[0].partition("::")[2].partition(".")[2] or "default"
    called = getattr(operator, overload, None)
    if called is not None:
        for argument, value in zip(called._schema.arguments, given, strict=False):
            if argument.kwarg_only:
                yield argument.name, value


def _has(tensor: Any, integers: torch.Tensor) -> bool:
    """Tell whether a value is a quantized tensor with these integers."""
    if not isinstance(tensor, torch.Tensor) or not tensor.is_quantized or tensor.shape != integers.shape:
        return False
    return torch.equal(tensor.int_repr(), integers)


def _is_of(tensor: torch.Tensor, layer: Layer, batch: Batch) -> bool:
    quantizer = layer.quantizer
    return (
        tensor.qscheme() == torch.per_tensor_affine
        and tensor.q_zero_point() == quantizer.zero_point
        and math.isclose(tensor.q_scale(), quantizer.scale, rel_tol=1e-6)
        and tensor.shape == batch.integers[layer.number].shape
    )
