"""Folds batch norms into the layers before them and removes dropouts: a network for inference, not for training."""

from __future__ import annotations

import torch
from torch import fx, nn
from torch.nn.utils.fusion import fuse_conv_bn_eval, fuse_linear_bn_eval

from optimize.tracing.foreign_layers import is_hooked
from optimize.tracing.needed_dropouts import DROPOUTS, written_into
from optimize.tracing.trace import LEFT, note_shapes, trace
from optimize.tracing.zero_padding import fold_padding

_CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)
_LAYERS = (nn.Linear, *_CONVOLUTIONS)
_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)
#: Weights smaller than this share of the layer's largest are far below the resolution of a float32 sum.
_NOTHING = 1e-20


def fuse_module(module: nn.Module, example: torch.Tensor) -> fx.GraphModule:
    """Return a new traced module in eval mode with batch norms folded and dropouts removed.

    ``example`` is an input ``(N, C, H, W)``. It gives the rank of inner tensors.

    A norm is folded only if it is the only reader of the layer before it. Neither module may be called anywhere else,
    nor its weights read. A norm after a linear layer is folded only on ``(N, features)`` inputs, where both use the
    same axis. `BatchNorm1d` on ``(N, L, C)`` uses another one.

    Zero padding becomes the padding of the convolution that reads it. See `optimize.tracing.zero_padding`.

    `LEFT` of the module's ``meta`` names norms that were not folded because of a hook.

    A dropout stays if its result is overwritten, so that the network can be trained further; see
    `optimize.tracing.needed_dropouts`.
    """
    graph_module = trace(module, example)
    note_shapes(graph_module, example)
    kept = written_into(graph_module, example)
    modules = dict(graph_module.named_modules(remove_duplicate=False))
    for node in list(graph_module.graph.nodes):
        if node.op != "call_module":
            continue
        layer = modules[str(node.target)]
        if isinstance(layer, (nn.Identity, *DROPOUTS)) and node not in kept and not is_hooked(layer):
            _bypass(graph_module, node)
        elif type(layer) in _NORMS and (before := _foldable(graph_module, modules, node)) is not None:
            folded = _fold(modules[before], layer)
            if type(folded) not in _LAYERS and not _same(folded, modules[before], layer, node):
                continue
            graph_module.set_submodule(before, folded)
            modules[before] = folded
            _bypass(graph_module, node)
    fold_padding(graph_module)
    graph_module.delete_all_unused_submodules()
    graph_module.graph.lint()
    graph_module.recompile()
    return graph_module.eval()


def _foldable(graph_module: fx.GraphModule, modules: dict[str, nn.Module], norm: fx.Node) -> str | None:
    """Return the name of the layer that ``norm`` can be folded into, or None."""
    layer = modules[str(norm.target)]
    assert isinstance(layer, _NORMS)
    before = norm.all_input_nodes[0]
    candidate = modules[str(before.target)] if before.op == "call_module" else None
    if layer.running_mean is None or not isinstance(candidate, _LAYERS):
        return None
    # A parametrised weight is computed, not stored. Torch's folding mixes up the channels of a grouped transposed
    # convolution, whose weight is (in, out / groups, …).
    grouped = getattr(candidate, "transposed", False) and candidate.groups != 1
    if nn.utils.parametrize.is_parametrized(candidate) or grouped:
        return None
    # A hook sees the tensor between them, and may change it.
    if hooked := next((str(node.target) for node in (before, norm) if is_hooked(modules[str(node.target)])), None):
        graph_module.meta[LEFT][str(norm.target)] = f"{norm.target} is not folded: {hooked} has a hook"
        return None
    calls = [_identity(modules, node) for node in graph_module.graph.nodes if node.op == "call_module"]
    read = [str(node.target).rpartition(".")[0] for node in graph_module.graph.nodes if node.op == "get_attr"]
    calls += [id(modules[owner]) for owner in read]
    if len(before.users) != 1 or calls.count(id(candidate)) != 1 or calls.count(id(layer)) != 1:
        return None
    if isinstance(candidate, nn.Linear) and not _is_matrix(before):
        return None
    return str(before.target)


def _is_matrix(node: fx.Node) -> bool:
    return len(node.meta["tensor_meta"].shape) == 2


def _identity(modules: dict[str, nn.Module], node: fx.Node) -> int:
    return id(modules[str(node.target)])


def _fold(layer: nn.Module, norm: nn.Module) -> nn.Module:
    folded: nn.Module
    if isinstance(layer, nn.Linear):
        folded = fuse_linear_bn_eval(layer, norm)  # type: ignore[arg-type]
    else:
        transposed = isinstance(layer, (nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d))
        folded = fuse_conv_bn_eval(layer, norm, transpose=transposed)  # type: ignore[arg-type, type-var]
    _flush(folded)
    return folded


def _flush(layer: nn.Module) -> None:
    """Set weights to zero that are too small to change an answer.

    A channel that died in training has tiny weights, and a tiny scale in its norm. Their products are subnormal
    numbers, which make a whole network 5 to 7 times slower on a CPU.
    """
    with torch.no_grad():
        largest = max((float(tensor.abs().max()) for tensor in layer.parameters(recurse=False)), default=0.0)
        for tensor in layer.parameters(recurse=False):
            tensor[tensor.abs() < _NOTHING * largest] = 0.0


def _same(folded: nn.Module, layer: nn.Module, norm: nn.Module, node: fx.Node) -> bool:
    """Tell whether a folded layer of a foreign class computes the same as layer and norm did.

    Such a layer may pad by itself, use its weight for more than a convolution, or ignore the bias that it did not have.
    """
    (before,) = node.all_input_nodes
    shape = before.all_input_nodes[0].meta["tensor_meta"].shape
    batch = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        expected = norm(layer(batch))
        try:
            found = folded(batch)
        except Exception:  # noqa: BLE001 - the user's forward may raise anything
            return False
    return bool((found - expected).abs().max() <= 1e-4 * expected.abs().max())


def _bypass(graph_module: fx.GraphModule, node: fx.Node) -> None:
    node.replace_all_uses_with(node.all_input_nodes[0])
    graph_module.graph.erase_node(node)
