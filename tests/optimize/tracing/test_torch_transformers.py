"""Torch's own transformer layers are traced as the layers that they are made of, which are quantized."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from optimize.passes.ptq import PTQ, Ptq
from optimize.passes.qat import QAT, Qat
from optimize.tracing.trace import trace
from serve.runtime.device.cpu_integers import ANY_X86, TENSORRT
from tests.optimize.workbench import is_meant, noise_context, parent_of


class Encoded(nn.Module):
    """Patches, an encoder as torch has it, and a head."""

    def __init__(self, *, batch_first: bool = True, masked: bool = False, **settings: Any) -> None:
        super().__init__()
        self.batch_first, self.masked = batch_first, masked
        self.patches, self.head = nn.Conv2d(1, 16, 4, 4), nn.Linear(16, 4)
        layer = nn.TransformerEncoderLayer(16, 4, 32, batch_first=batch_first, **settings)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        x = self.patches(images).flatten(2).transpose(1, 2)
        x = x if self.batch_first else x.transpose(0, 1)
        x = self.encoder(x, mask=torch.zeros(16, 16)) if self.masked else self.encoder(x)
        return self.head(x.mean(1 if self.batch_first else 0))


WAYS: dict[str, dict[str, Any]] = {
    "the batch first": {},
    "tokens first": {"batch_first": False},
    "norms first": {"norm_first": True, "activation": "gelu"},
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("target", [ANY_X86, TENSORRT])
def test_an_encoder_is_meant_in_int8(way, target, tmp_path):
    torch.manual_seed(0)
    is_meant(Encoded(**WAYS[way]), tmp_path, target, above=20)


@pytest.mark.parametrize("way", WAYS)
def test_an_encoder_is_quantized_and_trained_so(way, tmp_path):
    torch.manual_seed(0)
    context, gates = noise_context(), {"min_sqnr": 0.0, "min_agreement": 0.0}
    parent = parent_of(Encoded(**WAYS[way]).eval(), context, tmp_path / "parent")
    for name in ("ptq", "qat"):
        (tmp_path / name).mkdir()
    told = [
        PTQ.apply(parent, Ptq(observer="minmax", **gates), context, tmp_path / "ptq").notes,
        QAT.apply(parent, Qat(epochs=1, max_steps=1, augment=False, **gates), context, tmp_path / "qat").notes,
    ]
    # The patches and the head, and of both blocks: query, key, value and output, and the two layers behind.
    assert [notes[0].split(",")[0] for notes in told] == ["14 quantized layers"] * 2


def test_an_encoder_that_goes_by_its_mask_is_one_call():
    torch.manual_seed(0)
    module, batch = Encoded(masked=True).eval(), torch.randn(3, 1, 16, 16)
    traced = trace(module, batch)
    with torch.no_grad():
        torch.testing.assert_close(traced(batch), module(batch), rtol=1e-4, atol=1e-5)


@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")  # torch's word on images
@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpointed_activations_are_traced_as_what_they_are_of(reentrant):
    class Checkpointed(nn.Module):
        """A size that it asks for is one that the images settle."""

        def __init__(self) -> None:
            super().__init__()
            self.block, self.head = nn.Sequential(nn.Conv2d(1, 4, 3), nn.SiLU()), nn.Linear(4, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = checkpoint(self.block, x, use_reentrant=reentrant)
            return self.head(x.mean((2, 3)) if x.shape[-1] > 4 else x[:, :, 0, 0])

    torch.manual_seed(0)
    module, batch = Checkpointed().eval(), torch.randn(3, 1, 16, 16)
    traced = trace(module, batch)
    with torch.no_grad():
        assert torch.equal(traced(batch), module(batch))
    traced(batch).sum().backward()
    assert all(weight.grad is not None for weight in module.parameters())
