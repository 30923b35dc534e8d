"""Finds the parts of a network to compute again in a backward, by the memory that autograd keeps for each.

The parts of a module are submodules. The parts of a traced module (torch.fx) are pieces of its graph between which only
one tensor passes. Among all choices by size, the one that keeps the least memory is taken. That memory consists of the
inputs of the parts, the tensors outside of them, and the contents of the largest part, which exist again during its
backward.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx, nn
from torch.fx.passes.split_module import split_module
from torch.utils._pytree import tree_leaves


@dataclass(frozen=True)
class Found:
    """The parts of a network.

    Attributes:
        module: the module with these parts. It computes the same as the network, with the same layers.
        names: names of submodules.
        left: share of the kept memory that remains, at the start of the largest part's backward.
    """

    module: nn.Module
    names: tuple[str, ...]
    left: float


class _Kept:
    """Counts the bytes that autograd keeps, by the computing module. Parameters and buffers do not count."""

    def __init__(self, module: nn.Module) -> None:
        self.bytes: Counter[str] = Counter()
        self.owner = ""
        self._known = {_place(tensor) for tensor in (*module.parameters(), *module.buffers())}

    def pack(self, tensor: torch.Tensor) -> torch.Tensor:
        """See `torch.autograd.graph.saved_tensors_hooks`. Kept tensors keep their place in memory."""
        if _place(tensor) not in self._known:
            self._known.add(_place(tensor))
            self.bytes[self.owner] += tensor.untyped_storage().nbytes()
        return tensor

    def hooks(self) -> torch.autograd.graph.saved_tensors_hooks:
        """Count within the block."""
        return torch.autograd.graph.saved_tensors_hooks(self.pack, lambda tensor: tensor)


def block_names(module: nn.Module, example: torch.Tensor, images: int) -> Found:
    """Return the submodules of ``module`` to compute again.

    Args:
        module: in training mode.
        example: a few images, at least four.
        images: the images of a step. Their memory is extrapolated from that of the example and of half of it.
    """
    seen = _extrapolated([_by_module(module, part) for part in _twice(example)], images, len(example))
    kept, total = seen.kept, sum(seen.kept.values())
    within = {
        name: sum(size for owner, size in kept.items() if _inside(owner, name))
        for name in seen.passed
        if name not in seen.changed
    }
    choices = []
    for most in sorted(set(within.values())):
        worth = {name for name, size in within.items() if seen.passed[name] < size <= most}
        names = tuple(_outermost(module, "", worth))
        outside = sum(size for owner, size in kept.items() if not any(_inside(owner, name) for name in names))
        largest = max((within[name] for name in names), default=0)
        choices.append((outside + sum(seen.passed[name] for name in names) + largest, names))
    left, names = min(choices, default=(total, ()))
    return Found(module, names, left / max(total, 1))


@dataclass(frozen=True)
class _Seen:
    """The memory of one forward.

    Attributes:
        kept: bytes that autograd keeps, by the computing module or node.
        passed: bytes that enter a module, or leave a node.
        changed: modules or nodes whose passed values are overwritten later. They cannot be computed from again.
    """

    kept: Mapping[str, int]
    passed: Mapping[str, int]
    changed: frozenset[str]


def _extrapolated(seen: Sequence[_Seen], images: int, count: int) -> _Seen:
    """Extrapolate to ``images`` from the memory of half of ``count`` images and of all of them."""

    def of_all(half: Mapping[str, int], whole: Mapping[str, int]) -> dict[str, int]:
        return {
            name: whole[name] + (whole[name] - half.get(name, 0)) * (images - count) // (count - count // 2)
            for name in whole
        }

    half, whole = seen
    return _Seen(of_all(half.kept, whole.kept), of_all(half.passed, whole.passed), whole.changed)


def _by_module(module: nn.Module, example: torch.Tensor) -> _Seen:
    """Measure the memory kept by each innermost module, and the inputs of each module that has others."""
    kept, entering, path = _Kept(module), Counter[str](), [""]
    watched: list[tuple[str, torch.Tensor, int]] = []

    def enters(name: str, *, watch: bool) -> Any:
        def hook(_: nn.Module, given: tuple[Any, ...], named: dict[str, Any]) -> None:
            path.append(name)
            kept.owner = name
            if watch:
                tensors = [leaf for leaf in tree_leaves((given, named)) if isinstance(leaf, torch.Tensor)]
                entering[name] += sum(map(_size, tensors))
                watched.extend((name, tensor, tensor._version) for tensor in tensors)

        return hook

    def leaves(*_: object) -> None:
        path.pop()
        kept.owner = path[-1]

    hooks = []
    for name, layer in module.named_modules():
        if name:
            watch = next(layer.children(), None) is not None
            hooks.append(layer.register_forward_pre_hook(enters(name, watch=watch), with_kwargs=True))
            hooks.append(layer.register_forward_hook(leaves))
    try:
        with kept.hooks():
            module(example)
    finally:
        for handle in hooks:
            handle.remove()
    return _Seen(kept.bytes, entering, _written_to(watched))


def _written_to(watched: Sequence[tuple[str, torch.Tensor, int]]) -> frozenset[str]:
    """Return the names whose tensors were written to since they were recorded."""
    return frozenset(name for name, tensor, version in watched if tensor._version != version)


def _outermost(module: nn.Module, prefix: str, wanted: set[str]) -> Iterator[str]:
    for name, child in module.named_children():
        if prefix + name in wanted:
            yield prefix + name
        else:
            yield from _outermost(child, f"{prefix}{name}.", wanted)


def segmented(module: fx.GraphModule, example: torch.Tensor, images: int) -> Found:
    """Divide ``module`` into consecutive parts to compute again. Arguments as in `block_names`.

    The parts share its layers.
    """
    seen = _extrapolated([_by_node(module, part) for part in _twice(example)], images, len(example))
    atoms = list(_atoms(module.graph, seen.changed))
    weights = [sum(seen.kept.get(node.name, 0) for node in atom) for atom in atoms]
    total = sum(weights)
    choices = []
    for most in {max(total // count, *weights) for count in range(1, len(atoms) + 1)}:
        parts, sums = [0], [weights[0]]
        for weight in weights[1:]:
            if sums[-1] + weight > most:
                sums.append(0)
            sums[-1] += weight
            parts.append(len(sums) - 1)
        ends = [atoms[place][-1] for place in range(len(atoms) - 1) if parts[place] != parts[place + 1]]
        choices.append((sum(seen.passed[end.name] for end in ends) + max(sums), parts))
    left, parts = min(choices)
    part_of = {node: part for part, atom in zip(parts, atoms, strict=True) for node in atom}
    divided = split_module(module, module, lambda node: part_of[node], keep_original_order=True)
    names = tuple(str(node.target) for node in divided.graph.nodes if node.op == "call_module")
    return Found(divided, names, left / max(total, 1))


def _by_node(module: fx.GraphModule, example: torch.Tensor) -> _Seen:
    """Measure the memory that each node keeps, and the size of its result."""
    kept, leaving = _Kept(module), Counter[str]()
    watched: list[tuple[str, torch.Tensor, int]] = []

    class Counting(fx.Interpreter):
        def run_node(self, n: fx.Node) -> Any:
            kept.owner = n.name
            result = super().run_node(n)
            tensors = [leaf for leaf in tree_leaves(result) if isinstance(leaf, torch.Tensor)]
            leaving[n.name] = sum(map(_size, tensors))
            watched.extend((n.name, tensor, tensor._version) for tensor in tensors)
            return result

    with kept.hooks():
        Counting(module).run(example)
    return _Seen(kept.bytes, leaving, _written_to(watched))


def _atoms(graph: fx.Graph, changed: Set[str]) -> Iterator[list[fx.Node]]:
    """Yield the computing nodes in order, divided wherever only one value passes from earlier to later nodes.

    There is no division after a value that is ``changed`` later.
    """
    nodes = [node for node in graph.nodes if node.op not in ("placeholder", "output")]
    place = {node: number for number, node in enumerate(nodes)}
    last = {node: max((place.get(user, len(nodes)) for user in node.users), default=-1) for node in graph.nodes}
    inputs = [node for node in graph.nodes if node.op == "placeholder"]
    atom: list[fx.Node] = []
    for number, node in enumerate(nodes):
        atom.append(node)
        passing = [each for each in (*inputs, *nodes[: number + 1]) if last[each] > number and each.op != "get_attr"]
        if number + 1 == len(nodes) or (passing == [node] and node.name not in changed):
            yield atom
            atom = []


def _twice(example: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return half of some images, and all of them."""
    return example[: len(example) // 2], example


def _inside(owner: str, name: str) -> bool:
    return f"{owner}.".startswith(f"{name}.")


def _place(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def _size(tensor: torch.Tensor) -> int:
    return tensor.numel() * tensor.element_size()
