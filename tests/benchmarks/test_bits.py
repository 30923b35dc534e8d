"""What a bit less costs is told of the very network, in weights and in activations."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

from benchmarks.bits import OBSERVERS, WAYS, main

NET = """
from torch import nn

def small(num_classes=10):
    convolutions = nn.Conv2d(3, 16, 3, 2), nn.ReLU(), nn.Conv2d(16, 16, 3, 2), nn.ReLU()
    return nn.Sequential(*convolutions, nn.AdaptiveAvgPool2d(3), nn.Flatten(), nn.Linear(144, num_classes))
"""


@pytest.mark.slow
def test_each_way_has_its_figures_and_fewer_bits_cost_more(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "net.py").write_text(NET)
    built: dict[str, object] = {}
    exec(NET, built)
    torch.manual_seed(0)
    module = built["small"]()  # type: ignore[operator]
    assert isinstance(module, nn.Module)
    torch.save(module.state_dict(), tmp_path / "net.pt")
    given = [f"{tmp_path / 'net.py'}:small", "--checkpoint", str(tmp_path / "net.pt"), "--val-images", "64"]
    main([*given, "--images", "32", "--store", str(tmp_path / "store")])
    said, _, printed = capsys.readouterr().out.partition("\n\n")
    assert said.startswith("Made by `python -m benchmarks.bits net.py:small --checkpoint net.pt --val-images 64 ")
    _, _, *rows = printed.splitlines()
    cells = [[cell.strip() for cell in row.strip("|").split("|")] for row in rows]
    assert [row[0] for row in cells] == list(WAYS)
    ratios = [[float(cell.removesuffix(" dB")) for cell in row[1 : 1 + len(OBSERVERS)]] for row in cells]
    whole, *narrow = ratios
    assert all(ratio > 20 for ratio in whole)
    assert all(less < more for row in narrow for less, more in zip(row, whole, strict=True))
    assert all(0 <= float(cell.removesuffix("%")) <= 100 for row in cells for cell in row[1 + len(OBSERVERS) :])
