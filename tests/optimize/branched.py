"""What the tests of merged and expanded networks have in common: sessions of `branch_nets`, and how answers compare."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch
from torch import nn

from optimize.models.checkpoint import Checkpoint
from optimize.models.model_names import resolve_model
from optimize.run.session import Session
from optimize.store.artifact import Artifact
from optimize.store.objects import Store
from tests.optimize.workbench import noise_context, with_running_statistics

NETS = Path(__file__).with_name("branch_nets.py")


def layers(module: nn.Module) -> list[nn.Module]:
    """Its convolutions and norms."""
    return [layer for layer in module.modules() if isinstance(layer, nn.Conv2d | nn.BatchNorm2d)]


def same_answers(changed: nn.Module, module: nn.Module, *shape: int) -> bool:
    """Whether two networks answer alike, to 1e-4 of the largest number, on a batch of noise of this shape."""
    batch = torch.randn(shape, generator=torch.Generator().manual_seed(7))
    with torch.no_grad():
        expected = module.eval()(batch)
        return float((changed.eval()(batch) - expected).abs().max()) < 1e-4 * float(expected.abs().max())


def session_of(factory: str, root: Path) -> Session:
    """A session of one of the networks, on noise."""
    return Session(Store(root), resolve_model(f"{NETS}:{factory}"), noise_context())


def baseline(session: Session, net: Callable[[], nn.Module]) -> Artifact:
    """The network with weights and statistics at random."""
    torch.manual_seed(0)
    weights = with_running_statistics(net()).state_dict()
    return session.baseline(checkpoint=Checkpoint(weights, "c" * 64)).artifact
