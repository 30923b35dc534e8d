"""An opened artifact: encoded images in, answers of its task out. Every server and measurement uses it."""

from __future__ import annotations

import dataclasses
import functools
import logging
import math
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from ..card.budget import Budget
from ..card.card import Card, Preprocessing, load_card
from ..card.execution import Execution
from ..card.serving import Serving
from ..decoders.base import CPU, Decoder
from ..device.device_faults import device_answers, is_lost, lacks_memory
from ..device.device_turns import turn_at
from ..device.transfer import Plain, Transfer, open_transfer
from ..display import Described
from ..engines.base import Engine, execution_id, find_engine, open_engine, preferred
from ..errors import BrokenError, EngineError, Refusal, one_line
from ..images.image_preprocessing import normalise
from ..images.placement import PlacedImage, Placement
from ..outputs import Outputs
from ..tasks.base import Outcome, Task, open_task
from .image_loading import NO_MEMORY, load_within

_LOG = logging.getLogger(__name__)


@dataclass(frozen=True)
class Computed:
    """The outcomes of decoded images, in order, with the seconds for inference and for making answers."""

    outcomes: list[Outcome]
    infer: float
    postprocess: float


def infer(
    engine: Engine,
    images: torch.Tensor | Sequence[torch.Tensor],
    preprocessing: Preprocessing,
    dtype: torch.dtype,
    transfer: Transfer | None = None,
    *,
    ending: Callable[[Outputs], Outputs] | None = None,
) -> Outputs:
    """Run ``uint8`` images, ``(N, C, H, W)`` or N of ``(C, H, W)``, to outputs on the host, floats as ``float32``.

    This is the cost of a request after decoding: copy to the device, normalise, run, end, copy back. It does not
    normalise if ``dtype`` is ``uint8``: the graph does then. ``transfer`` does the copies. None: torch does. ``ending``
    runs on the outputs where they lie.
    """
    transfer = transfer or Plain(engine.device)
    with torch.inference_mode():
        batch = transfer.send(images)
        inputs = batch if dtype == torch.uint8 else normalise(batch, preprocessing, engine.device, dtype)
        outputs = engine.run(inputs)
        if not isinstance(outputs, tuple):  # rows of a single tensor would pass for outputs
            raise EngineError(f"{engine.provider} must return a tuple of outputs, it returned {type(outputs).__name__}")
        return transfer.receive(ending(outputs) if ending is not None else outputs)


@dataclass(frozen=True)
class PassedOver:
    """An execution that would be preferred but does not work here, with the reason."""

    execution: str
    reason: str


class Predictor(Described):
    """An artifact, opened by an execution. Threads may share it, and take turns at its engine.

    On a GPU it also takes turns with the process's other models; see `device_turns`.

    An engine that needs its own thread gets it from `service.Service`.

    Attributes:
        timings: times of the last `predict`, in whichever thread.
        task: makes answers from the network's outputs.
        seconds: seconds for a batch by its size, from the last call of `warm_up`.
        accuracy: the known accuracy, for `describe`; see `evidence`.

    Args:
        folder: the artifact's folder. Its files are checked against the card.
        execution: how to run it. None: the preferred engine that works here, on the CPU.
        max_batch: most images in a batch. More are split.
        budget: what decoding may cost. By default each image is limited, but requests are not.
        passed_over: executions that were tried before, for `describe`.
        decoder: decodes the images that it accepts. None: only the runtime's own decoder.
        serving: the serving settings, if answers may need more than the task's usual ending. None: they do not.

    Raises:
        CardError: the artifact is incomplete.
        UserError: there is no such engine or task, or the engine has no such option.
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
        serving: Serving | None = None,
    ) -> None:
        self.card: Card = load_card(folder)
        self.task: Task = open_task(self.card)
        self.max_batch = max_batch
        self.budget = budget or Budget()
        self.passed_over = passed_over
        self.decoder = decoder
        self.accuracy: dict[str, Any] | None = None
        self.execution = execution or preferred(self.card, "cpu")
        wide = serving is not None and self.task.widely(serving)
        # What answers are made of: the card whose outputs the engine returns, and the ending behind them.
        self._answering = self.card if wide else self.card.ended
        self._ending = self.task.wide_ending if wide else None if self.card.ending else self.task.ending
        self.engine: Engine = open_engine(folder, self._answering, self.execution)
        self._folder = folder
        self.device = self.engine.device
        self.seconds: dict[int, float] = {}
        self._dtype: torch.dtype = getattr(torch, self.card.input_dtype)
        self._transfer = open_transfer(self.device, self.card.preprocessing.shape)
        self._turn = turn_at(self.device)

    @property
    def any_thread(self) -> bool:
        """Whether different threads may run it, one at a time. If not, only the thread that opened it may."""
        return self.device.type == "cpu" and find_engine(self.execution.engine).any_thread

    def ended(self, images: torch.Tensor | Sequence[torch.Tensor]) -> Outputs:
        """Return the tensors of the task's ending on the host, of which answers are made, floats as ``float32``.

        Args:
            images: ``uint8``, ``(N, C, H, W)`` or N of ``(C, H, W)``, on the host or the engine's device. N >= 1.

        Raises:
            EngineError: the engine returns another number of outputs.
        """
        return self._run(self.engine, self._answering, images, self._ending)

    def outputs(self, images: torch.Tensor | Sequence[torch.Tensor]) -> Outputs:
        """Return the network's outputs, which the card names, on the host, floats as ``float32``.

        For the argument and errors see `ended`. If the file has the ending, the first call opens it once more.
        """
        return self._run(self._network, self.card, images, None)

    @functools.cached_property
    def _network(self) -> Engine:
        """The engine that returns the network's own outputs."""
        same = self._answering == self.card
        return self.engine if same else open_engine(self._folder, self.card, self.execution)

    def _run(
        self,
        engine: Engine,
        card: Card,
        images: torch.Tensor | Sequence[torch.Tensor],
        ending: Callable[[Outputs], Outputs] | None,
    ) -> Outputs:
        def checked(found: Outputs) -> Outputs:
            if len(found) != len(card.outputs):
                raise EngineError(
                    f"{card.name}: {self.execution_name} returns {len(found)} outputs, and the card names "
                    f"{', '.join(card.outputs)}"
                )
            return found if ending is None else ending(found)

        with self._turn:
            return infer(engine, images, card.preprocessing, self._dtype, self._transfer, ending=checked)

    def logits(self, images: torch.Tensor | Sequence[torch.Tensor]) -> torch.Tensor:
        """Return the first output, for example ``float32`` logits ``(N, classes)``. For the argument see `outputs`."""
        return self.outputs(images)[0]

    def warm_up(self, batch_sizes: Iterable[int], repeats: int = 3) -> None:
        """Run every batch size a few times. TorchScript optimises on its second run, CUDA on its first."""
        options, preprocessing = self.task.options({}), self.card.preprocessing
        whole = Placement.of(*preprocessing.crop, preprocessing)
        for size in sorted(set(batch_sizes)):
            batch = torch.zeros((size, *self.card.preprocessing.shape), dtype=torch.uint8)
            for _ in range(repeats):
                started = time.perf_counter()
                self.task.answers(self.ended(batch), [options] * size, [whole] * size)
                self.seconds[size] = min(time.perf_counter() - started, self.seconds.get(size, math.inf))

    def predict(self, items: Sequence[bytes], options: Any = None) -> list[Outcome]:
        """Answer the encoded images of one request. A bad image gets its own refusal, the others their answers.

        At most one batch of decoded images is held. Images beyond the budget are refused.

        Args:
            items: encoded images (see `image_preprocessing.decode`).
            options: what the task's ``options`` returned, for all images. None: its defaults.

        Returns:
            One outcome per item, in order.
        """
        options = self.task.options({}) if options is None else options
        outcomes: list[Outcome] = [None] * len(items)
        chunk: dict[int, PlacedImage] = {}

        def answer_chunk() -> None:
            found = self.compute([*chunk.values()], [options] * len(chunk))
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

    def compute(self, images: Sequence[PlacedImage], options: Sequence[Any]) -> Computed:
        """Answer decoded images as one batch.

        If memory is too short, the batch is halved and tried again. The same happens if the engine fails otherwise, so
        that one image cannot fail its neighbours.

        Args:
            images: on the host or the engine's device. At least one.
            options: the task's options for each image.

        Raises:
            BrokenError: the device is lost to this process.
        """
        started = time.perf_counter()
        rows = self._rows([image.pixels for image in images])
        inferred = time.perf_counter()
        outcomes: list[Outcome] = []
        for found in rows:
            if isinstance(found, Refusal):
                outcomes.append(found)
            else:
                part = slice(len(outcomes), len(outcomes) + len(found[0]))
                placements = [image.placement for image in images[part]]
                outcomes += self.task.answers(found, options[part], placements)
        return Computed(outcomes, inferred - started, time.perf_counter() - inferred)

    def _rows(self, images: Sequence[torch.Tensor]) -> list[Outputs | Refusal]:
        """Return the outputs of the batch's parts, in order, with a refusal for each image without any."""
        try:
            return [self.ended(images)]
        except Exception as error:  # noqa: BLE001 - a library may raise anything
            if is_lost(error) or not device_answers(self.device):
                raise BrokenError(
                    f"{self.card.name}: {self.device} can no longer be used by this process: {one_line(error)}"
                ) from None
            refusal = NO_MEMORY if lacks_memory(error) else Refusal(500, f"the engine failed: {one_line(error)}")
            if len(images) == 1:
                _LOG.error("%s: %s fails: %s", self.card.name, self.execution_name, one_line(error))
                return [refusal]
        if self.device.type == "cuda":
            torch.cuda.empty_cache()
        middle = len(images) // 2
        return self._rows(images[:middle]) + self._rows(images[middle:])

    def _facts(self) -> dict[str, str]:
        shape = self.card.preprocessing.shape
        return {
            "name": self.card.name,
            "model": self.card.model,
            "task": self.card.task,
            "execution": self.execution_name,
            "device": str(self.device),
            "input": " × ".join(map(str, shape)),
            "classes": str(len(self.card.classes)),
        }

    @property
    def execution_name(self) -> str:
        """Name of the execution, the same for every GPU."""
        return execution_id(dataclasses.replace(self.execution, device=self.execution.device_type))

    def describe(self) -> dict[str, Any]:
        """Return what is served and what runs it, for the ``describe`` endpoint."""
        card = self.card
        return {
            "artifact": card.name,
            "model": card.model,
            "task": card.task,
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
            "outputs": list(card.outputs),
            **self.task.described(),
            "content": card.content,
            # Accuracy was measured with the runtime's own decoder. Others return other pixels.
            "accuracy": self.accuracy if self.decoder is None else None,
            "data": dict(card.data),
            "target": card.target,
            "lineage": [{"name": entry.name, "operation": entry.operation} for entry in card.lineage],
            "versions": dict(card.versions),
            "notes": list(card.notes),
            "certificate": card.certificate.to_json() if card.certificate else None,
        }
