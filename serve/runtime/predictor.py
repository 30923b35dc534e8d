"""Bytes in, top-k out, one outcome per item: an opened artifact as every server and measurement uses it."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from .budget import Budget
from .card import Card, Preprocessing, load_card
from .engines.base import Engine, execution_id, open_engine, preferred
from .errors import Refusal
from .execution import Execution
from .images import normalise
from .intake import take_in


@dataclass(frozen=True)
class Label:
    """One class of an answer; ``probability`` is the softmax over all classes, in [0, 1]."""

    label: str
    index: int
    probability: float


#: What became of one item: its best classes, best first, or why there are none.
Outcome = list[Label] | Refusal


@dataclass
class Timings:
    """Where the time of the last `Predictor.predict` went, in milliseconds."""

    decode: float = 0.0
    inference: float = 0.0
    batch_sizes: list[int] = field(default_factory=list)


def infer(engine: Engine, batch: torch.Tensor, preprocessing: Preprocessing, dtype: torch.dtype) -> torch.Tensor:
    """``uint8`` images ``(N, C, H, W)`` on the host to ``float32`` logits ``(N, classes)`` on the host.

    What a request pays for once its images are decoded: copy to the device, normalise (where the graph does not:
    ``dtype`` is then ``uint8``), run, copy back.
    """
    with torch.inference_mode():
        if dtype == torch.uint8:
            return engine.run(batch.to(engine.device, non_blocking=True)).float().cpu()
        inputs = normalise(batch, preprocessing, engine.device, dtype)
        return engine.run(inputs).float().cpu()


@dataclass(frozen=True)
class PassedOver:
    """An execution that would have been preferred and does not work here: its name, and why."""

    execution: str
    reason: str


class Predictor:
    """An artifact folder, opened by an execution.

    Args:
        folder: the artifact's folder; its files are checked against the card.
        execution: what runs it; None takes the preferred engine that works here, on the CPU.
        max_batch: images that go through the network at once; more are split.
        budget: what decoding may cost; by default each image is bounded, and requests are not.
        passed_over: what was tried before, for `describe`.

    Raises:
        CardError: the folder is not a whole artifact.
        UserError: there is no such engine, or it has no such option.
        EngineError: the artifact cannot be run so.
    """

    def __init__(
        self,
        folder: Path,
        execution: Execution | None = None,
        *,
        max_batch: int = 32,
        budget: Budget | None = None,
        passed_over: tuple[PassedOver, ...] = (),
    ) -> None:
        self.card: Card = load_card(folder)
        self.max_batch = max_batch
        self.budget = budget or Budget()
        self.passed_over = passed_over
        self.execution = execution or preferred(self.card, "cpu")
        self.engine: Engine = open_engine(folder, self.card, self.execution)
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

    def predict(
        self, items: Sequence[bytes], k: int | Sequence[int] = 5, requests: Sequence[int] | None = None
    ) -> list[Outcome]:
        """Classify encoded images; a bad one gets its own refusal and the others their answers.

        No more images are held decoded than go through the network at once. What the budget has too
        little for is refused; see `budget.admit` for whose images come first.

        Args:
            items: encoded images (see `images.decode`).
            k: how many classes to answer, for all items or for each; capped at the number of classes.
            requests: the number of the request that each item came with, for the budget; None: all with one.

        Returns:
            One outcome per item, in order.
        """
        wanted = [k] * len(items) if isinstance(k, int) else list(k)
        owners = [0] * len(items) if requests is None else list(requests)
        started = time.perf_counter()
        outcomes: list[Outcome] = [[] for _ in items]
        chunk: dict[int, torch.Tensor] = {}
        sizes: list[int] = []
        inference = 0.0

        def answer_chunk() -> None:
            nonlocal inference
            begun = time.perf_counter()
            for index, row in zip(chunk, self.probabilities(torch.stack([*chunk.values()])), strict=True):
                outcomes[index] = self.top(row, wanted[index])
            sizes.append(len(chunk))
            chunk.clear()
            inference += time.perf_counter() - begun

        for index, image in take_in(items, owners, self.card.preprocessing, self.budget):
            if isinstance(image, Refusal):
                outcomes[index] = image
                continue
            chunk[index] = image
            if len(chunk) == self.max_batch:
                answer_chunk()
        if chunk:
            answer_chunk()
        total = time.perf_counter() - started
        self.timings = Timings((total - inference) * 1e3, inference * 1e3, sizes)
        return outcomes

    def top(self, probabilities: torch.Tensor, k: int) -> list[Label]:
        """The ``k`` best classes of one row of probabilities, best first; equal ones by index."""
        values, indices = probabilities.sort(descending=True, stable=True)
        classes = self.card.classes
        return [
            Label(classes[index], index, value)
            for value, index in zip(values[:k].tolist(), indices[:k].tolist(), strict=True)
        ]

    @property
    def execution_name(self) -> str:
        """What runs it, in one word, whichever GPU it is on."""
        return execution_id(dataclasses.replace(self.execution, device=self.execution.device_type))

    def describe(self) -> dict[str, Any]:
        """What is served and what executes it, for the endpoint's ``describe``."""
        card = self.card
        return {
            "artifact": card.name,
            "model": card.model,
            "format": card.format,
            "precision": card.precision,
            "execution": self.execution_name,
            "passed_over": [dataclasses.asdict(entry) for entry in self.passed_over],
            "provider": self.engine.provider,
            "device": str(self.device),
            "threads": self.execution.cores,
            "max_batch": self.max_batch,
            "input": {"shape": list(card.preprocessing.shape), "dtype": card.input_dtype},
            "classes": len(card.classes),
            "content": card.content,
        }
