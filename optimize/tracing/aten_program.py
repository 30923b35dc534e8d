"""Export of a network as a program of ATen operators with a dynamic batch.

A network that is such a program already is not traced again. ``torch.export.export`` traces any module by running it. A
graph that it made itself, even if changed since, has no Python code left that could do anything else. Here its tensors
become inputs again. Its nodes already have noted values. Only new nodes and their readers are computed again. The
program is then built by its constructor, which torch does not promise to keep (2.11 to 2.14 have it).
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any, TypeGuard

import torch
import torch.fx.config
from torch import fx, nn
from torch._export.verifier import TrainingIRVerifier
from torch._guards import detect_fake_mode
from torch._ops import OpOverload
from torch._subclasses import FakeTensorMode
from torch.export.exported_program import ModuleCallEntry, ModuleCallSignature
from torch.export.graph_signature import (
    ExportGraphSignature,
    InputKind,
    InputSpec,
    OutputKind,
    OutputSpec,
    TensorArgument,
)
from torch.utils import _pytree as pytree

from optimize.errors import PassError
from optimize.tracing.constants import attribute
from optimize.tracing.node_values import are_alike, note_value
from serve.runtime.errors import one_line

#: Submodule that checks the images, since torch 2.9. It is not part of the program.
_GUARDS = "_guards_fn"
#: Modules of functions on sizes: ``operator.mul``, ``math.ceil``, ``torch.sym_max``. Also of ``operator.getitem``.
_OF_SIZES = ("_operator", "math", "torch")


def program_of(module: nn.Module, example: torch.Tensor) -> torch.export.ExportedProgram:
    """Export a module with a dynamic batch.

    Args:
        module: in eval mode, or the result of `torch.export.ExportedProgram.module`, changed or not.
        example: an input ``(N, C, H, W)``, N >= 2.

    Raises:
        Exception: any error of torch.export or of the module's own code.
    """
    if is_program(module) and (program := _as_program(module, example)) is not None:
        return program
    with unplaced():
        return torch.export.export(module, (example,), dynamic_shapes=({0: torch.export.Dim.DYNAMIC},))


def required_program(module: nn.Module, example: torch.Tensor) -> torch.export.ExportedProgram:
    """Export a module as `program_of` does, for callers that cannot continue without the program.

    Raises:
        PassError: the module cannot be exported, for example because it branches on tensor values.
    """
    try:
        return program_of(module, example)
    except Exception as error:
        raise PassError(f"torch.export cannot write this model: {one_line(error)}") from error


@contextlib.contextmanager
def unplaced() -> Iterator[None]:
    """Stop torch from recording the source lines of nodes within the block.

    Nothing here reads them, and files must not contain them. Recording them takes a tenth of the time to write an int8
    graph. Torch 2.11 records them regardless.
    """
    config: Any = fx.config
    before = getattr(config, "do_not_emit_stack_traces", False)
    config.do_not_emit_stack_traces = True
    try:
        yield
    finally:
        config.do_not_emit_stack_traces = before


def is_program(module: nn.Module) -> TypeGuard[fx.GraphModule]:
    """Tell whether a module is a graph from torch.export with operators and tensors only, and a dynamic batch."""
    if not isinstance(module, fx.GraphModule) or not all(_is_plain(module, node) for node in module.graph.nodes):
        return False
    inputs = module.graph.find_nodes(op="placeholder")
    return len(inputs) == 1 and _mode(inputs[0]) is not None and isinstance(_number(inputs[0]), torch.SymInt)


def _is_plain(module: fx.GraphModule, node: fx.Node) -> bool:
    """Tell whether a node is an operator or a tensor.

    Blocks under ``torch.cond``, ``torch.no_grad`` … are left to torch.
    """
    if node.op == "get_attr":
        return isinstance(attribute(module, str(node.target)), torch.Tensor)
    if node.op == "call_function":
        return isinstance(node.target, OpOverload) or getattr(node.target, "__module__", "") in _OF_SIZES
    return node.op in ("placeholder", "output") or node.target == _GUARDS


def _mode(images: fx.Node) -> FakeTensorMode | None:
    """Return the fake mode that knows the shapes of the graph's program."""
    return detect_fake_mode(images.meta.get("val"))


def _number(images: fx.Node) -> Any:
    """Return the number of images, a symbol if it is dynamic."""
    return images.meta["val"].shape[0]


def _as_program(module: fx.GraphModule, example: torch.Tensor) -> torch.export.ExportedProgram | None:
    """Return the program of a graph, or None if the value of a node cannot be computed for any number of images."""
    (images,), (output,) = (module.graph.find_nodes(op=op) for op in ("placeholder", "output"))
    mode = _mode(images)
    assert mode is not None
    sizes = mode.shape_env
    assert sizes is not None
    graph, copies, specs = fx.Graph(), dict[fx.Node, fx.Node](), list[InputSpec]()
    changed: set[fx.Node] = set()  # nodes of the module whose value differs from the noted one
    state: dict[str, torch.Tensor] = {}
    constants: dict[str, Any] = {}

    def take(name: str, kind: InputKind, value: torch.Tensor, target: str | None = None) -> fx.Node:
        node = graph.placeholder(name)
        node.meta["val"] = value
        specs.append(InputSpec(kind, TensorArgument(node.name), target, kind is InputKind.BUFFER or None))
        return node

    for number, (target, (kind, readers)) in enumerate(_tensors(module).items()):
        tensor = attribute(module, target)
        kept = constants if kind is InputKind.CONSTANT_TENSOR else state
        kept[target] = tensor
        value = mode.from_tensor(tensor.detach(), static_shapes=True)
        copies.update(dict.fromkeys(readers, take(f"{kind.name.lower()}_{number}", kind, value, target)))
        changed.update(reader for reader in readers if not are_alike(reader.meta.get("val"), value))
    batch = _number(images)
    # Torch inspects the batch size here to choose kernels (2.14: for convolutions). That must not become a condition.
    with torch.no_grad(), mode, sizes.suppress_guards():
        taken = torch.empty((batch, *example.shape[1:]), dtype=example.dtype, device=example.device)
        copies[images] = take(images.name, InputKind.USER_INPUT, taken)
        if not are_alike(images.meta["val"], taken):
            changed.add(images)
        for node in (node for node in module.graph.nodes if node.op == "call_function"):
            copies[node] = copied = graph.node_copy(node, copies.__getitem__)
            if "val" in node.meta and changed.isdisjoint(node.all_input_nodes):
                continue
            try:
                note_value(copied)
            except Exception:  # noqa: BLE001 - an undecidable condition on sizes, or an error of an operator
                return None
            if not are_alike(node.meta.get("val"), copied.meta["val"]):
                changed.add(node)
    answers = [copies[node] for node in pytree.tree_leaves(output.args)]
    if not all(isinstance(answer.meta["val"].shape[0], torch.SymInt) for answer in answers):
        return None
    graph.output(tuple(answers))
    graph.eliminate_dead_code()
    written: Any = module.graph._codegen
    tree = written.pytree_info
    return torch.export.ExportedProgram(
        nn.Module(),
        graph,
        ExportGraphSignature(
            specs, [OutputSpec(OutputKind.USER_OUTPUT, TensorArgument(answer.name), None) for answer in answers]
        ),
        state,
        {batch.node.expr: sizes.var_to_range[batch.node.expr]},
        [ModuleCallEntry("", ModuleCallSignature([], [], tree.in_spec, tree.out_spec, [images.name]))],
        ((example,), {}),
        constants,
        verifiers=[TrainingIRVerifier],
    )


def _tensors(module: fx.GraphModule) -> dict[str, tuple[InputKind, list[fx.Node]]]:
    """Return the tensors that a graph reads, by name, with their kind and the nodes that read them.

    They are in a program's order.
    """
    parameters = {name for name, _ in module.named_parameters(remove_duplicate=False)}
    buffers = {name for name, _ in module.named_buffers(remove_duplicate=False)}
    found: dict[str, tuple[InputKind, list[fx.Node]]] = {}
    for node in module.graph.find_nodes(op="get_attr"):
        name = str(node.target)
        kind = InputKind.BUFFER if name in buffers else InputKind.CONSTANT_TENSOR
        found.setdefault(name, (InputKind.PARAMETER if name in parameters else kind, []))[1].append(node)
    order = (InputKind.PARAMETER, InputKind.BUFFER, InputKind.CONSTANT_TENSOR)
    return dict(sorted(found.items(), key=lambda item: order.index(item[1][0])))
