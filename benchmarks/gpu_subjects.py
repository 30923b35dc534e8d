"""What `benchmarks.gpu` runs: networks, pictures that look like photographs to them, and artifacts of both."""

from __future__ import annotations

import importlib.util
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torchvision
from torch import nn

from serve.runtime.card.card import Card, InputType, Preprocessing, load_card, sha256_file, write_card
from serve.runtime.images.image_preprocessing import load, normalise
from serve.runtime.model_files.program_file import save_program

_EXPORTED_BATCH = 2  # a batch of 1 would be taken for a constant


class Tiny(nn.Sequential):
    """A network of a few layers, to try the benchmark out."""

    def __init__(self) -> None:
        super().__init__(
            nn.Conv2d(3, 8, 3, stride=2, padding=1, bias=False),
            nn.BatchNorm2d(8),
            nn.ReLU(),
            nn.Conv2d(8, 16, 3, stride=2, padding=1),
            nn.ReLU(),
            nn.AdaptiveAvgPool2d(1),
            nn.Flatten(),
            nn.Linear(16, 10),
        )


#: Model → the side of its input in pixels.
MODELS = {"resnet18": 224, "resnet50": 224, "mobilenet_v2": 224, "convnext_tiny": 224, "tiny": 32}


@dataclass
class Subject:
    """A network with what it is compared by.

    Attributes:
        name: of `MODELS`.
        module: in eval mode, float32, on the CPU.
        trained: whether its weights are trained ones.
        pictures: ``uint8`` images ``(N, 3, H, W)`` on the CPU.
        wanted: its logits for them, computed in float32 on the CPU.
        preprocessing: of its artifacts.
        work: where its artifacts are written.
    """

    name: str
    module: nn.Module
    trained: bool
    pictures: torch.Tensor
    wanted: torch.Tensor
    preprocessing: Preprocessing
    work: Path
    photos: Path | None = None
    _inputs: dict[tuple[torch.device, torch.dtype], torch.Tensor] = field(default_factory=dict)

    def inputs(self, device: torch.device, dtype: torch.dtype) -> torch.Tensor:
        """The pictures as the network takes them, on a device; kept there until another is asked for."""
        if (device, dtype) not in self._inputs:
            self._inputs = {(device, dtype): normalise(self.pictures, self.preprocessing, device, dtype)}
        return self._inputs[device, dtype]

    def artifact(self, kind: str, dtype: torch.dtype) -> Path:
        """An artifact folder of the network, batch norms folded: ``exported_program`` or ``onnx``.

        Raises:
            ImportError: what writes the format is not installed.
        """
        precision = str(dtype).removeprefix("torch.")
        folder = self.work / self.name / f"{kind}-{precision}"
        if (folder / "card.json").exists():
            return folder
        folder.mkdir(parents=True, exist_ok=True)
        module = folded(self.module).to(dtype)
        example = torch.zeros(_EXPORTED_BATCH, *self.preprocessing.shape, dtype=dtype)
        file = (
            _write_program(module, example, folder)
            if kind == "exported_program"
            else _write_onnx(module, example, folder)
        )
        input_dtype: InputType = "float32" if dtype == torch.float32 else "float16"
        card = Card(
            name=f"{self.name}-{precision}",
            model=self.name,
            task="classification",
            format=kind,
            file=file,
            precision=precision,
            input_dtype=input_dtype,
            device="any",
            preprocessing=self.preprocessing,
            classes=tuple(str(index) for index in range(self.wanted.shape[1])),
            files={path.name: sha256_file(path) for path in folder.iterdir()},
        )
        write_card(folder, card)
        load_card(folder)
        return folder


def make_subject(name: str, work: Path, images: int, photos: Path | None) -> Subject:
    """A network, with trained weights if torch's hub has them on this machine (nothing is downloaded).

    Random weights get batch statistics and a classifier without a bias for one class, so that activations are as large
    as in a trained network and answers depend on the image.
    """
    side = MODELS[name]
    preprocessing = Preprocessing(resize=round(side * 8 / 7), crop=(side, side))
    if photos is None:
        pictures = draw(images, side, side)
    else:
        found = [load(path.read_bytes(), preprocessing) for path in jpeg_files(photos)[:images]]
        pictures = torch.stack(found)
    torch.manual_seed(0)
    module, trained = (Tiny(), False) if name == "tiny" else _torchvision_model(name)
    batch = normalise(pictures, preprocessing, torch.device("cpu"), torch.float32)
    with torch.no_grad():
        if not trained:
            _settle(module, batch)
        module.eval()
        wanted = torch.cat([module(part) for part in torch.split(batch, 32)])
        if not trained:
            head = [layer for layer in module.modules() if isinstance(layer, nn.Linear)][-1]
            shift = wanted.mean(0)
            head.bias.sub_(shift)
            wanted = wanted - shift
    return Subject(name, module, trained, pictures, wanted, preprocessing, work, photos)


def _torchvision_model(name: str) -> tuple[nn.Module, bool]:
    module: nn.Module = torchvision.models.get_model(name, weights=None)
    weights = torchvision.models.get_model_weights(name).DEFAULT
    kept = Path(torch.hub.get_dir()) / "checkpoints" / weights.url.rpartition("/")[2]
    if not kept.exists():
        return module, False
    module.load_state_dict(torch.load(kept, map_location="cpu", weights_only=True))
    return module, True


def _settle(module: nn.Module, batch: torch.Tensor) -> None:
    """Give batch norms the statistics of a batch; nothing else of the network is changed."""
    norms = [layer for layer in module.modules() if isinstance(layer, nn.BatchNorm2d)]
    module.eval()
    for norm in norms:
        norm.momentum = None  # the plain average
        norm.reset_running_stats()
        norm.train()
    module(batch[:32])


def folded(module: nn.Module) -> nn.Module:
    """A copy in eval mode whose batch norms are part of the convolutions before them."""
    from torch.fx.experimental.optimization import fuse

    return fuse(module.eval())


def _write_program(module: nn.Module, example: torch.Tensor, folder: Path) -> str:
    program = torch.export.export(module, (example,), dynamic_shapes=({0: torch.export.Dim.DYNAMIC},))
    save_program(program, folder / "model.pt2")
    return "model.pt2"


def _write_onnx(module: nn.Module, example: torch.Tensor, folder: Path) -> str:
    for library in ("onnx", "onnxscript"):
        if importlib.util.find_spec(library) is None:
            raise ImportError(f"{library} is not installed, which writes ONNX graphs")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.onnx.export(
            module,
            (example,),
            folder / "model.onnx",
            input_names=["input"],
            output_names=["logits"],
            dynamic_shapes=({0: torch.export.Dim.DYNAMIC},),
            dynamo=True,
            external_data=False,
            verbose=False,
        )
    return "model.onnx"


def draw(count: int, height: int, width: int, seed: int = 0) -> torch.Tensor:
    """Pictures ``uint8`` ``(count, 3, height, width)`` with the spectrum of photographs.

    Amplitude falls with frequency (Field 1987), in some faster than in others; the channels go together; contrast and
    colour differ from picture to picture. All alike, a network without training would tell them apart by little more
    than its rounding.
    """
    generator = torch.Generator().manual_seed(seed)

    def each(low: float, high: float, channels: int = 1) -> torch.Tensor:
        return low + (high - low) * torch.rand(count, channels, 1, 1, generator=generator)

    slope, contrast, colour = each(0.4, 1.6), each(15, 70), each(60, 180, 3)
    image = torch.zeros(count, 3, height, width)
    for cells in (2, 4, 8, 16, 32, 64):
        if cells > min(height, width):
            break
        grey = torch.randn(count, 1, cells, cells, generator=generator)
        tint = torch.randn(count, 3, cells, cells, generator=generator)
        layer = nn.functional.interpolate(grey + 0.4 * tint, size=(height, width), mode="bicubic", align_corners=False)
        image += layer * (2 / cells) ** slope
    return (image * contrast + colour).round_().clamp_(0, 255).to(torch.uint8)


def jpegs(subject: Subject, count: int) -> list[bytes]:
    """JPEG files: those of the photographs' folder, else drawn ones of 500x375 pixels."""
    if subject.photos is not None:
        found = [path.read_bytes() for path in jpeg_files(subject.photos)]
        return [found[index % len(found)] for index in range(count)]
    encode: Callable[..., Any] = torchvision.io.encode_jpeg
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # torchvision 0.29 hands encoding over to TorchCodec
        return [bytes(encode(image, quality=90).numpy()) for image in draw(count, 375, 500, seed=1)]


def jpeg_files(folder: Path) -> list[Path]:
    """The JPEG files under a folder, in order; at least one, or the program ends."""
    found = sorted(path for path in folder.rglob("*") if path.suffix.lower() in (".jpg", ".jpeg"))
    if not found:
        raise SystemExit(f"error: {folder} has no JPEG files")
    return found
