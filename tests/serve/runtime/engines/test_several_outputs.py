"""A network with two outputs of different shapes, in every engine of the CPU that needs no compiler."""

from __future__ import annotations

import warnings
from pathlib import Path

import pytest
import torch
from torch import nn

from serve.runtime.card.card import Format, load_card
from serve.runtime.card.execution import Execution
from serve.runtime.engines.base import open_engine
from serve.runtime.model_files.program_file import save_program
from serve.runtime.model_files.telemetry import import_openvino
from serve.runtime.outputs import Outputs
from serve.runtime.service.predictor import Predictor
from tests.serve import artifacts

NAMES = ("logits", "features")
FILES: dict[Format, tuple[str, ...]] = {
    "torchscript": ("model.pt",),
    "exported_program": ("model.pt2",),
    "onnx": ("model.onnx",),
    "openvino": ("model.xml", "model.xml.bin"),
}


class Two(nn.Module):
    """Gives whole numbers for whole numbers, which are exact in every engine."""

    def forward(self, x: torch.Tensor) -> Outputs:
        return 2 * x[:, 0, 0, :5], torch.relu(x[:, :, 1, :4])


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    network, example = Two().eval(), torch.zeros(2, 3, 32, 32)
    folders: dict[str, Path] = {kind: tmp_path_factory.mktemp(kind) for kind in FILES}
    paths = {kind: folders[kind] / files[0] for kind, files in FILES.items()}
    program = torch.export.export(network, (example,), dynamic_shapes=({0: torch.export.Dim("batch")},))
    paths["torchscript"].write_bytes(artifacts.traced(network))
    save_program(program, paths["exported_program"])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.onnx.export(program, f=paths["onnx"], output_names=NAMES, external_data=False, verbose=False)
    openvino = import_openvino()
    openvino.save_model(openvino.Core().read_model(paths["onnx"]), paths["openvino"], compress_to_fp16=False)
    paths["openvino"].with_suffix(".bin").rename(folders["openvino"] / "model.xml.bin")
    for kind, (file, *extra) in FILES.items():
        artifacts.write_artifact(folders[kind], "two", kind, file, extra=tuple(extra), outputs=NAMES)
    return folders


@pytest.mark.parametrize("buckets", [(), (2, 4)])
@pytest.mark.parametrize(
    ("kind", "engine"),
    [
        ("torchscript", "torchscript"),
        ("exported_program", "exported"),
        ("onnx", "onnxruntime"),
        ("onnx", "openvino"),
        ("openvino", "openvino"),
    ],
)
def test_two_outputs_of_different_shapes_are_kept_in_order(
    kind: str, engine: str, buckets: tuple[int, ...], folders: dict[str, Path]
) -> None:
    folder = folders[kind]
    opened = open_engine(folder, load_card(folder), Execution(engine, buckets=buckets))
    for count in (1, 3, 4, 7):
        batch = torch.randint(-9, 10, (count, 3, 32, 32), generator=torch.Generator().manual_seed(count)).float()
        with torch.inference_mode():
            logits, features = opened.run(batch)
        assert torch.equal(logits, 2 * batch[:, 0, 0, :5])
        assert torch.equal(features, batch[:, :, 1, :4].clamp(min=0))


def test_a_predictor_names_the_outputs_and_gives_them_all(folders: dict[str, Path]) -> None:
    predictor = Predictor(folders["onnx"], Execution("onnxruntime"))
    images = torch.randint(0, 256, (3, 3, 32, 32), dtype=torch.uint8)
    outputs = predictor.outputs(images)
    assert predictor.describe()["outputs"] == [*NAMES]
    assert [output.shape for output in outputs] == [(3, 5), (3, 3, 4)]
    assert torch.equal(predictor.logits(images), outputs[0])
