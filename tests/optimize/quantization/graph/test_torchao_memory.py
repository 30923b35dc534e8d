"""Networks that torch.ao was given go when nobody else has them."""

from __future__ import annotations

import gc

import pytest
import torch
from torch import fx

from optimize import memory
from optimize.passes.ptq import Ptq
from optimize.passes.qat import Qat
from optimize.run.session import Session
from optimize.store.artifact import Artifact
from serve.common.config import Config


def networks() -> int:
    """Traced networks that are alive."""
    gc.collect()
    return sum(isinstance(found, fx.GraphModule) for found in gc.get_objects())


@pytest.mark.parametrize("config", [Ptq(images=32), Ptq(images=32, target="tensorrt"), Qat(epochs=1, images=32)])
def test_no_network_is_left_of_a_variant_that_was_quantized(
    config: Config, session: Session, trained: Artifact
) -> None:
    session.apply(trained, Ptq(images=16), "first")  # what is made once, such as patterns
    before = networks()
    step = session.apply(trained, config, "variant")
    assert not step.cached
    assert networks() <= before


def test_cycles_of_large_networks_are_not_left_to_the_collector() -> None:
    class Cycle:
        def __init__(self) -> None:
            self.own, self.weights = self, torch.zeros(1)

    def alive() -> int:
        return sum(isinstance(found, Cycle) for found in gc.get_objects())

    gc.disable()
    try:
        Cycle()
        memory.collect((1 << 28) - 1)
        assert alive() == 1
        memory.collect(1 << 28)
        assert alive() == 0
    finally:
        gc.enable()
