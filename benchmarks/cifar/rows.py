"""The rows of the table in their order: what each is, which recipe makes it, what it aims at and whom that beats."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Literal

Network = Literal["resnet20", "resnet56"]

EXAMPLES: Final = Path(__file__).parents[2] / "examples"

#: What all rows start from: how a checkpoint is brought to the images, or a network trained where there is none.
START: Final = "cifar.yaml"

MODELS: Final[Mapping[Network, str]] = {
    "resnet20": f"{EXAMPLES / 'cifar_resnet.py'}:resnet20",
    "resnet56": f"{EXAMPLES / 'cifar_resnet.py'}:resnet56",
}


@dataclass(frozen=True)
class Row:
    """One line of the table.

    Attributes:
        name: the word for it on the command line.
        title: in the table.
        recipe: a file of `EXAMPLES`.
        stage: of the recipe, that is judged.
        aim: difference of top-1 to the control, in percentage points, that is to be reached.
        beats: whose published difference that is better than.
        network: what it is made of.
        teacher: the network that teaches it, and not its control: what a teacher gives is what is looked at.
        faster: how many times as fast as the control it is to be, in the best float engine of each, at batch 16.
        fewer: how many times fewer multiply-accumulates it is to have.
    """

    name: str
    title: str
    recipe: str
    stage: str
    aim: float
    beats: str = ""
    network: Network = "resnet20"
    teacher: Network | None = None
    faster: float | None = None
    fewer: float | None = None


ROWS: Final = (
    Row("w8a8-ptq", "W8A8, calibrated", "w8a8.yaml", "ptq-onnx", -0.1),
    Row("w8a8-qat", "W8A8, trained", "w8a8.yaml", "qat-onnx", 0.0),
    Row("w4a4", "W4A4, LSQ, self-distilled", "w4a4.yaml", "w4a4-packed", -0.4, "APoT −0.51"),
    Row("w3a3", "W3A3, from W4A4", "w3a3.yaml", "w3a3-packed", -0.45, "APoT −0.47"),
    Row("w2a2", "W2A2, from W3A3", "w2a2.yaml", "w2a2-packed", -1.8, "APoT −2.00"),
    Row("ternary", "ternary weights, A8", "ternary.yaml", "ternary-packed", -0.6, "TTQ −0.64"),
    Row("binary", "binary weights, A8", "binary.yaml", "binary-packed", -1.5, "DoReFa −1.59, IR-Net −0.9"),
    Row("w4a4-ptq", "W4A4, calibrated with AdaRound", "w4a4-ptq.yaml", "w4a4-ptq-packed", -2.5),
    Row("pruned", "1.35 times fewer MACs", "pruned.yaml", "pruned-onnx", -0.4, "Distiller −0.49", fewer=1.35),
    Row(
        "pruned-56",
        "ResNet-56, 2.1 times fewer MACs, 1.6 times as fast",
        "pruned-56.yaml",
        "pruned-onnx",
        -0.2,
        "L1 −0.60, ResRep 0.00",
        network="resnet56",
        faster=1.6,
        fewer=2.1,
    ),
    Row("sparse-70", "70 % of the weights zero", "sparse.yaml", "sparse-70-onnx", -0.3),
    Row("sparse-24", "2:4 sparse", "sparse.yaml", "sparse-24-onnx", -0.2),
    Row(
        "distilled",
        "taught by ResNet-56, against training alone",
        "distilled.yaml",
        "distilled-onnx",
        0.85,
        "Distiller +0.83",
        teacher="resnet56",
    ),
    Row("acnet", "ACNet blocks, merged", "acnet.yaml", "merged-onnx", 0.3, "ACNet +0.5"),
    Row("acnet-int8", "ACNet blocks, merged, int8", "acnet.yaml", "merged-onnx-int8", -0.5),
)
