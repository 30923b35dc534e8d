"""Small real artifacts of every kind, made with torch alone, and images to send to them."""

from __future__ import annotations

import dataclasses
import functools
import tempfile
import warnings
from pathlib import Path
from typing import Any

import torch
from torch import nn

from benchmarks.hostile.pictures import encoded, picture
from serve.runtime.card.card import Card, Device, Format, Preprocessing, read_card, sha256_file, write_card
from serve.runtime.card.known_answer import KNOWN_FILE, KnownAnswer
from serve.runtime.images.image_preprocessing import decode, place
from serve.runtime.model_files.program_file import save_program
from serve.runtime.service.predictor import Predictor
from serve.runtime.tasks.base import Task, open_task

CLASSES = ("ant", "bee", "cat", "dog", "eel")
PREPROCESSING = Preprocessing(resize=36, crop=(32, 32))


def small_network(seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    network = nn.Sequential(
        nn.Conv2d(3, 8, 3, stride=2, padding=1),
        nn.BatchNorm2d(8),
        nn.ReLU(),
        nn.Conv2d(8, 16, 3, stride=2, padding=1),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(16, len(CLASSES)),
    ).eval()
    head = network[-1]
    assert isinstance(head, nn.Linear)
    with torch.no_grad():
        head.weight.mul_(20)  # so that classes differ by more than rounding
    return network


def write_artifact(
    folder: Path,
    name: str,
    model_format: Format,
    file: str,
    *,
    precision: str = "float32",
    device: Device = "any",
    extra: tuple[str, ...] = (),
    outputs: tuple[str, ...] = ("logits",),
) -> Path:
    """Seal the files of ``folder`` with a card."""
    card = Card(
        name=name,
        model="small",
        task="classification",
        format=model_format,
        file=file,
        precision=precision,
        input_dtype="float16" if precision == "float16" else "bfloat16" if precision == "bfloat16" else "float32",
        device=device,
        preprocessing=PREPROCESSING,
        classes=CLASSES,
        files={entry: sha256_file(folder / entry) for entry in (file, *extra)},
        outputs=outputs,
    )
    write_card(folder, card)
    return folder


def task_of(**changes: Any) -> Task:
    """The task of an artifact that has a card and nothing else."""
    card = Card(
        name="small",
        model="small",
        task="classification",
        format="onnx",
        file="model.onnx",
        precision="float32",
        input_dtype="float32",
        device="any",
        preprocessing=PREPROCESSING,
        classes=CLASSES,
        files={"model.onnx": "0" * 64},
    )
    return open_task(dataclasses.replace(card, **changes))


def torchscript(folder: Path, name: str = "script", device: Device = "any") -> Path:
    folder.mkdir(parents=True)
    (folder / "model.pt").write_bytes(torchscript_file())
    (folder / "weights.safetensors").write_bytes(b"for later passes" * 4096)
    return write_artifact(folder, name, "torchscript", "model.pt", device=device, extra=("weights.safetensors",))


def segmenter(folder: Path) -> Path:
    """An artifact that gives each pixel one of `CLASSES` by its colour, and sees all of a picture."""
    torch.manual_seed(0)
    network = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.ReLU(), nn.Conv2d(8, len(CLASSES), 1)).eval()
    folder.mkdir(parents=True)
    (folder / "model.pt").write_bytes(traced(network))
    write_artifact(folder, "maps", "torchscript", "model.pt")
    whole = Preprocessing(resize=(32, 32), crop=(32, 32))
    write_card(folder, dataclasses.replace(read_card(folder), task="segmentation", preprocessing=whole))
    return folder


def vectors(folder: Path, task: str, **changes: Any) -> Path:
    """An artifact of `small_network` for a task with one vector for an image."""
    folder.mkdir(parents=True)
    (folder / "model.pt").write_bytes(torchscript_file())
    write_artifact(folder, "small", "torchscript", "model.pt")
    write_card(folder, dataclasses.replace(read_card(folder), task=task, **changes))
    return folder


def know(folder: Path, *, raised: float = 0.0) -> Path:
    """Write beside an artifact what it answers to an image, ``raised`` being added to the logit of its first class."""
    predictor = Predictor(folder)
    image = jpeg(4)
    placed = place(decode(image, 3), predictor.card.preprocessing)
    facts = predictor.task.known(predictor.ended(placed.pixels[None]), placed.placement)
    facts["logits"][0] += raised
    known = KnownAnswer(image, "classification", predictor.execution_name, facts)
    (folder / KNOWN_FILE).write_text(known.text)
    return folder


@functools.cache
def torchscript_file() -> bytes:
    """Made once a process, as the others are: tests ask for it a hundred times."""
    return traced(small_network())


def traced(network: nn.Module) -> bytes:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "model.pt"  # its stem stands in the file
        torch.jit.trace(network, torch.zeros(1, 3, 32, 32)).save(str(path))
        return path.read_bytes()


def int8(folder: Path) -> Path:
    folder.mkdir(parents=True)
    (folder / "model.pt").write_bytes(int8_file())
    return write_artifact(folder, "int8", "torchscript", "model.pt", precision="int8", device="cpu")


@functools.cache
def int8_file() -> bytes:
    from torch.ao.quantization import (
        HistogramObserver,
        QConfig,
        QConfigMapping,
        default_per_channel_weight_observer,
    )
    from torch.ao.quantization.quantize_fx import convert_fx, prepare_fx

    from serve.runtime.engines.torchscript import use_int8_kernels

    use_int8_kernels()
    example = torch.zeros(1, 3, 32, 32)
    activation = HistogramObserver.with_args(quant_min=0, quant_max=127)  # 7 bits, as torch's default for x86
    recipe = QConfigMapping().set_global(QConfig(activation, default_per_channel_weight_observer))
    prepared = prepare_fx(small_network(), recipe, (example,))
    torch.manual_seed(1)
    for _ in range(4):
        prepared(torch.randn(8, 3, 32, 32))
    converted: Any = convert_fx(prepared)
    return traced(converted)


def exported(folder: Path, seed: int = 0, dtype: torch.dtype = torch.float32) -> Path:
    folder.mkdir(parents=True)
    (folder / "model.pt2").write_bytes(exported_file(seed, dtype))
    return write_artifact(
        folder, "exported", "exported_program", "model.pt2", precision=str(dtype).removeprefix("torch.")
    )


@functools.cache
def exported_file(seed: int, dtype: torch.dtype) -> bytes:
    example = torch.zeros(2, 3, 32, 32, dtype=dtype)
    batch = torch.export.Dim("batch")
    program = torch.export.export(small_network(seed).to(dtype), (example,), dynamic_shapes=({0: batch},))
    with tempfile.TemporaryDirectory() as folder:
        save_program(program, Path(folder) / "model.pt2")
        return (Path(folder) / "model.pt2").read_bytes()


def onnx(folder: Path, name: str = "onnx", device: Device = "any") -> Path:
    folder.mkdir(parents=True)
    (folder / "model.onnx").write_bytes(onnx_file())
    return write_artifact(folder, name, "onnx", "model.onnx", device=device)


@functools.cache
def onnx_file() -> bytes:
    with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        path = Path(folder) / "model.onnx"
        torch.onnx.export(
            small_network(),
            (torch.zeros(2, 3, 32, 32),),
            path,
            dynamo=True,
            external_data=False,
            dynamic_shapes=({0: torch.export.Dim("batch")},),
            output_names=["logits"],
            verbose=False,
        )
        return path.read_bytes()


def jpeg(seed: int = 0, size: tuple[int, int] = (60, 45)) -> bytes:
    return encoded(picture(seed, size), quality=95)
