"""Bytes in, top-k out, one outcome per item: an opened artifact as every server and measurement uses it."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from .card import Card, Preprocessing, load_card
from .engines import Engine, open_engine
from .errors import ImageError
from .images import PIXEL_LIMIT, load, normalise


@dataclass(frozen=True)
class Label:
    """One class of an answer; ``probability`` is the softmax over all classes, in [0, 1]."""

    label: str
    index: int
    probability: float


#: What became of one item: its best classes, best first, or the fault that was found in it.
Outcome = list[Label] | ImageError


@dataclass
class Timings:
    """Where the time of the last `Predictor.predict` went, in milliseconds."""

    decode: float = 0.0
    inference: float = 0.0
    batch_sizes: list[int] = field(default_factory=list)


def infer(engine: Engine, batch: torch.Tensor, preprocessing: Preprocessing, dtype: torch.dtype) -> torch.Tensor:
    """``uint8`` images ``(N, C, H, W)`` on the host to ``float32`` logits ``(N, classes)`` on the host.

    What a request pays for once its images are decoded: copy to the device, normalise, run, copy back.
    """
    with torch.inference_mode():
        inputs = normalise(batch, preprocessing, engine.device, dtype)
        return engine.run(inputs).float().cpu()


class Predictor:
    """An artifact folder, opened on a device.

    Args:
        folder: the artifact's folder; its files are checked against the card.
        device: ``"cpu"``, ``"cuda"`` or ``"cuda:N"``.
        max_batch: images that go through the network at once; more are split.
        threads: intra-op threads of the engine; None leaves the libraries' default.
        allow_fallback: see `open_engine`.
        pixel_limit: larger images are refused before they are decoded.

    Raises:
        CardError: the folder is not a whole artifact.
        EngineError: it cannot run on ``device``.
    """

    def __init__(
        self,
        folder: Path,
        device: str | torch.device = "cpu",
        *,
        max_batch: int = 32,
        threads: int | None = None,
        allow_fallback: bool = False,
        pixel_limit: int = PIXEL_LIMIT,
    ) -> None:
        self.card: Card = load_card(folder)
        self.max_batch = max_batch
        self.pixel_limit = pixel_limit
        self.engine: Engine = open_engine(
            folder, self.card, torch.device(device), threads=threads, allow_fallback=allow_fallback
        )
        self.device = self.engine.device
        self.timings = Timings()
        self._dtype: torch.dtype = getattr(torch, self.card.input_dtype)

    def logits(self, batch: torch.Tensor) -> torch.Tensor:
        """``uint8`` images ``(N, C, H, W)`` on the host to ``float32`` logits ``(N, classes)`` on the host."""
        return infer(self.engine, batch, self.card.preprocessing, self._dtype)

    def probabilities(self, batch: torch.Tensor) -> torch.Tensor:
        """As `logits`, with the softmax taken."""
        return self.logits(batch).softmax(dim=1)

    def warm_up(self, batch_sizes: Iterable[int], repeats: int = 3) -> None:
        """Run every batch size a few times: TorchScript optimises on its second run, CUDA on its first."""
        for size in sorted(set(batch_sizes)):
            batch = torch.zeros((size, *self.card.preprocessing.shape), dtype=torch.uint8)
            for _ in range(repeats):
                self.probabilities(batch)

    def predict(self, items: Sequence[bytes], k: int | Sequence[int] = 5) -> list[Outcome]:
        """Classify encoded images; a bad one gets its own error and the others their answers.

        Args:
            items: encoded images (see `images.decode`).
            k: how many classes to answer, for all items or for each; capped at the number of classes.

        Returns:
            One outcome per item, in order.
        """
        wanted = [k] * len(items) if isinstance(k, int) else list(k)
        started = time.perf_counter()
        outcomes: list[Outcome] = []
        images: list[torch.Tensor] = []
        owners: list[int] = []
        for index, item in enumerate(items):
            try:
                images.append(load(item, self.card.preprocessing, self.pixel_limit))
            except ImageError as error:
                outcomes.append(error)
            else:
                outcomes.append([])
                owners.append(index)
        decoded = time.perf_counter()
        sizes = []
        for start in range(0, len(images), self.max_batch):
            chunk = images[start : start + self.max_batch]
            sizes.append(len(chunk))
            for owner, row in zip(owners[start:], self.probabilities(torch.stack(chunk)), strict=False):
                outcomes[owner] = self.top(row, wanted[owner])
        done = time.perf_counter()
        self.timings = Timings((decoded - started) * 1e3, (done - decoded) * 1e3, sizes)
        return outcomes

    def top(self, probabilities: torch.Tensor, k: int) -> list[Label]:
        """The ``k`` best classes of one row of probabilities, best first; equal ones by index."""
        values, indices = probabilities.sort(descending=True, stable=True)
        classes = self.card.classes
        return [
            Label(classes[index], index, value)
            for value, index in zip(values[:k].tolist(), indices[:k].tolist(), strict=True)
        ]

    def describe(self) -> dict[str, Any]:
        """What is served and what executes it, for the endpoint's ``describe``."""
        card = self.card
        return {
            "artifact": card.name,
            "model": card.model,
            "format": card.format,
            "precision": card.precision,
            "provider": self.engine.provider,
            "device": str(self.device),
            "max_batch": self.max_batch,
            "input": {"shape": list(card.preprocessing.shape), "dtype": card.input_dtype},
            "classes": len(card.classes),
            "content": card.content,
            "measurements": dict(card.measurements),
        }
