"""The same channels removed by Torch-Pruning (https://github.com/VainF/Torch-Pruning), where it can do the network."""

from __future__ import annotations

import copy
import warnings

import pytest
import torch

from optimize.pruning.groups import group
from optimize.pruning.propagation import channels_of
from optimize.pruning.surgery import remove
from optimize.tracing.trace import trace
from tests.optimize.families import build, side
from tests.optimize.pruning.test_channel_groups import some
from tests.optimize.workbench import with_running_statistics

pytestmark = pytest.mark.peers
tp = pytest.importorskip("torch_pruning")

#: Not those of grouped convolutions, of which it narrows every group where we remove whole groups; of a channel
#: shuffle; and of layer norms, through which it goes on.
FAMILIES = (
    *("alexnet", "densenet", "efficientnet", "googlenet", "inception", "mnasnet", "mobilenet_v2", "mobilenet_v3"),
    *("resnet", "squeezenet", "vgg"),
)


@pytest.mark.parametrize("name", FAMILIES)
def test_torch_pruning_leaves_the_same_network(name: str) -> None:
    batch = torch.randn(2, 3, side(name), side(name), generator=torch.Generator().manual_seed(0))
    ours = trace(with_running_statistics(build(name)))
    theirs = copy.deepcopy(ours)
    grouping = group(channels_of(ours, batch), {})
    units = some(grouping)
    remove(ours, grouping, units)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # its own, of operations that it takes for elementwise ones
        dependencies = tp.DependencyGraph().build_dependency(theirs, example_inputs=batch)
        left = set(units)
        for layer in grouping.channels.layers.values():
            sets = grouping.channels.labels.sets(layer.out).tolist()
            places = [place for place, unit in enumerate(sets) if unit in left]
            left -= {sets[place] for place in places}
            if places:
                module = theirs.get_submodule(layer.name)
                prune = tp.prune_linear_out_channels if module.weight.ndim == 2 else tp.prune_conv_out_channels
                dependencies.get_pruning_group(module, prune, idxs=places).prune()
    assert not left
    found, expected = ours.state_dict(), theirs.state_dict()
    assert {key: tensor.shape for key, tensor in found.items()} == {k: t.shape for k, t in expected.items()}
    with torch.no_grad():
        torch.testing.assert_close(ours(batch), theirs(batch), rtol=1e-5, atol=1e-6)
