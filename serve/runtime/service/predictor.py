"""Bytes in, top-k out, one outcome per item: an opened artifact as every server and measurement uses it."""

from __future__ import annotations

import dataclasses
import logging
import math
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from ..card.budget import Budget
from ..card.card import Card, Preprocessing, Probabilities, load_card
from ..card.execution import Execution
from ..decoders.base import CPU, Decoder
from ..device.device_faults import device_answers, is_lost, lacks_memory
from ..device.device_turns import turn_at
from ..device.transfer import Plain, Transfer, open_transfer
from ..display import Described
from ..engines.base import Engine, execution_id, find_engine, open_engine, preferred
from ..errors import BrokenError, Refusal, one_line
from ..images.image_preprocessing import normalise
from .image_loading import NO_MEMORY, load_within

_LOG = logging.getLogger(__name__)

# What is no number cannot be ranked, nor written as JSON. It may be one image's: half precision overflows.
_NOT_FINITE = Refusal(500, "the network gave no finite numbers (NaN or infinity) for the image")


@dataclass(frozen=True)
class Label(Described):
    """One class of an answer; ``probability`` is in [0, 1], see `probabilities_of`."""

    label: str
    index: int
    probability: float


#: What became of one item: its best classes, best first, or why there are none.
Outcome = list[Label] | Refusal


@dataclass(frozen=True)
class Classified:
    """The outcomes of decoded images, in order, and the seconds that the network and the ranking took."""

    outcomes: list[Outcome]
    infer: float
    postprocess: float


def infer(
    engine: Engine,
    images: torch.Tensor | Sequence[torch.Tensor],
    preprocessing: Preprocessing,
    dtype: torch.dtype,
    transfer: Transfer | None = None,
) -> torch.Tensor:
    """``uint8`` images, ``(N, C, H, W)`` or N of ``(C, H, W)``, to ``float32`` logits ``(N, classes)`` on the host.

    What a request pays for once its images are decoded: copy to the device, normalise (where the graph does not:
    ``dtype`` is then ``uint8``), run, copy back; ``transfer`` copies, if it is not left to torch.
    """
    transfer = transfer or Plain(engine.device)
    with torch.inference_mode():
        batch = transfer.send(images)
        inputs = batch if dtype == torch.uint8 else normalise(batch, preprocessing, engine.device, dtype)
        return transfer.receive(engine.run(inputs))


def probabilities_of(logits: torch.Tensor, kind: Probabilities) -> torch.Tensor:
    """Logits ``(N, classes)`` as probabilities: shares that sum to one, or of each class by itself (``sigmoid``)."""
    return logits.sigmoid() if kind == "sigmoid" else logits.softmax(dim=1)


@dataclass(frozen=True)
class PassedOver:
    """An execution that would have been preferred and does not work here: its name, and why."""

    execution: str
    reason: str


class Predictor(Described):
    """An artifact folder, opened by an execution. Safe to share between threads, which take turns at its engine.

    On a GPU it takes turns with the process's other models there, too; see `device_turns`.

    An engine that wants one thread of its own gets it from `service.Service`.

    Attributes:
        timings: of the `predict` that ended last, in whichever thread.
        seconds: what the last call of `warm_up` took for a batch, by its size.
        accuracy: what is known of it, for `describe`; see `evidence`.

    Args:
        folder: the artifact's folder; its files are checked against the card.
        execution: what runs it; None takes the preferred engine that works here, on the CPU.
        max_batch: images that go through the network at once; more are split.
        budget: what decoding may cost; by default each image is bounded, and requests are not.
        passed_over: what was tried before, for `describe`.
        decoder: what decodes the images that it takes; None: nothing but the runtime's own.

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
        decoder: Decoder | None = None,
    ) -> None:
        self.card: Card = load_card(folder)
        self.max_batch = max_batch
        self.budget = budget or Budget()
        self.passed_over = passed_over
        self.decoder = decoder
        self.accuracy: dict[str, Any] | None = None
        self.execution = execution or preferred(self.card, "cpu")
        self.engine: Engine = open_engine(folder, self.card, self.execution)
        self.device = self.engine.device
        self.seconds: dict[int, float] = {}
        self._dtype: torch.dtype = getattr(torch, self.card.input_dtype)
        self._transfer = open_transfer(self.device, self.card.preprocessing.shape)
        self._turn = turn_at(self.device)

    @property
    def any_thread(self) -> bool:
        """Whether one thread may run it and then another, never two at once; else who opened it alone."""
        return self.device.type == "cpu" and find_engine(self.execution.engine).any_thread

    def logits(self, images: torch.Tensor | Sequence[torch.Tensor]) -> torch.Tensor:
        """``uint8`` images to ``float32`` logits ``(N, classes)`` on the host.

        Args:
            images: ``(N, C, H, W)``, or N of ``(C, H, W)``, each on the host or the engine's device; N >= 1.
        """
        with self._turn:
            return infer(self.engine, images, self.card.preprocessing, self._dtype, self._transfer)

    def probabilities(self, batch: torch.Tensor) -> torch.Tensor:
        """As `logits`, as the probabilities that the card says, in [0, 1]."""
        return probabilities_of(self.logits(batch), self.card.probabilities)

    def warm_up(self, batch_sizes: Iterable[int], repeats: int = 3) -> None:
        """Run every batch size a few times: TorchScript optimises on its second run, CUDA on its first."""
        for size in sorted(set(batch_sizes)):
            batch = torch.zeros((size, *self.card.preprocessing.shape), dtype=torch.uint8)
            for _ in range(repeats):
                started = time.perf_counter()
                self.probabilities(batch)
                self.seconds[size] = min(time.perf_counter() - started, self.seconds.get(size, math.inf))

    def predict(self, items: Sequence[bytes], k: int = 5) -> list[Outcome]:
        """Classify the encoded images of one request; a bad one gets its own refusal and the others their answers.

        No more images are held decoded than go through the network at once. What the budget has too little for is
        refused.

        Args:
            items: encoded images (see `image_preprocessing.decode`).
            k: how many classes to answer; capped at the number of classes.

        Returns:
            One outcome per item, in order.
        """
        outcomes: list[Outcome] = [[] for _ in items]
        chunk: dict[int, torch.Tensor] = {}

        def answer_chunk() -> None:
            found = self.classify([*chunk.values()], [k] * len(chunk))
            for index, outcome in zip(chunk, found.outcomes, strict=True):
                outcomes[index] = outcome
            chunk.clear()

        for index, image in load_within(items, self.card.preprocessing, self.budget, self.decoder):
            if isinstance(image, Refusal):
                outcomes[index] = image
                continue
            chunk[index] = image
            if len(chunk) == self.max_batch:
                answer_chunk()
        if chunk:
            answer_chunk()
        return outcomes

    def classify(self, images: Sequence[torch.Tensor], wanted: Sequence[int]) -> Classified:
        """Classify decoded images, which go through the network together.

        Where memory is too short for them together they go in halves; where the engine fails for another reason
        too, so that one image's fault is not its neighbours'.

        Args:
            images: ``uint8`` of the network's input shape, each on the host or the engine's device; at least one.
            wanted: how many classes each is to get.

        Raises:
            BrokenError: the device is lost to this process.
        """
        started = time.perf_counter()
        rows = self._rows(images)
        inferred = time.perf_counter()
        outcomes: list[Outcome] = []
        for found in rows:
            if isinstance(found, Refusal):
                outcomes.append(found)
            else:
                outcomes += self._best(found, wanted[len(outcomes) : len(outcomes) + len(found)])
        return Classified(outcomes, inferred - started, time.perf_counter() - inferred)

    def _rows(self, images: Sequence[torch.Tensor]) -> list[torch.Tensor | Refusal]:
        """Logits ``(N, classes)`` of the batch's parts, in order, with a refusal for each image that has none."""
        try:
            return [self.logits(images)]
        except Exception as error:  # noqa: BLE001 - a library raises what it likes
            if is_lost(error) or not device_answers(self.device):
                raise BrokenError(
                    f"{self.card.name}: {self.device} is lost to this process: {one_line(error)}"
                ) from None
            refusal = NO_MEMORY if lacks_memory(error) else Refusal(500, f"the engine failed: {one_line(error)}")
            if len(images) == 1:
                _LOG.error("%s: %s fails: %s", self.card.name, self.execution_name, one_line(error))
                return [refusal]
        if self.device.type == "cuda":
            torch.cuda.empty_cache()
        middle = len(images) // 2
        return self._rows(images[:middle]) + self._rows(images[middle:])

    def _best(self, logits: torch.Tensor, wanted: Sequence[int]) -> list[Outcome]:
        """The best classes of each row, best first; equal ones by index."""
        finite = logits.isfinite().all(dim=1).tolist()
        probabilities = probabilities_of(logits, self.card.probabilities)
        count = probabilities.shape[1]
        # One more than is wanted, to see whether that is as good: of equal values topk takes any. For 8 rows of 1000
        # classes a stable sort takes 0.3 ms, and this 0.02 (torch 2.14).
        found = probabilities.topk(min(max(wanted, default=0) + 1, count), dim=1)
        values, order = found.values.tolist(), found.indices.tolist()
        outcomes: list[Outcome] = []
        for number, (best, indices, k) in enumerate(zip(values, order, wanted, strict=True)):
            if not finite[number]:
                outcomes.append(_NOT_FINITE)
                continue
            if len(set(best)) < len(best):
                row = probabilities[number].sort(descending=True, stable=True)
                best, indices = row.values.tolist(), row.indices.tolist()  # noqa: PLW2901
            classes = self.card.classes
            outcomes.append([Label(classes[i], i, value) for value, i in zip(best[:k], indices[:k], strict=True)])
        return outcomes

    def _facts(self) -> dict[str, str]:
        shape = self.card.preprocessing.shape
        return {
            "name": self.card.name,
            "model": self.card.model,
            "execution": self.execution_name,
            "device": str(self.device),
            "input": " × ".join(map(str, shape)),
            "classes": str(len(self.card.classes)),
        }

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
            "decoder": CPU if self.decoder is None else self.decoder.name,
            "max_batch": self.max_batch,
            "input": {"shape": list(card.preprocessing.shape), "dtype": card.input_dtype},
            "classes": len(card.classes),
            "probabilities": card.probabilities,
            "content": card.content,
            # It was measured with the runtime's own decoder; others give other pixels.
            "accuracy": self.accuracy if self.decoder is None else None,
            "data": dict(card.data),
            "target": card.target,
            "lineage": [{"name": entry.name, "operation": entry.operation} for entry in card.lineage],
            "versions": dict(card.versions),
            "notes": list(card.notes),
            "certificate": card.certificate.to_json() if card.certificate else None,
        }
