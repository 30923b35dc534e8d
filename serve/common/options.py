"""The serving settings that a recipe, a program or a command line may change in `Serving`."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Annotated, Any

from pydantic import Field, field_validator

from serve.common.config import Config, Option
from serve.common.option_words import engine_options, limits, sizes
from serve.runtime.card.budget import SERVING, Budget
from serve.runtime.card.card import Card
from serve.runtime.card.execution import Execution
from serve.runtime.card.execution import Option as EngineOption
from serve.runtime.card.serving import Serving
from serve.runtime.errors import CardError, RequestError, UserError, did_you_mean
from serve.runtime.tasks.base import find_task, open_task

#: Settings that are the usual value of a request's parameter, which not every task has.
_PARAMETERS = ("k", "accept")
_OWN = frozenset(entry.name for entry in dataclasses.fields(Serving))


class ServingOptions(Config):
    """The serving settings of an archive. A setting that is not given keeps its value: the run's, or the default."""

    workers: int = Field(
        default=Serving.workers,
        ge=1,
        description="Worker processes; each loads the model. A worker of TorchServe uses all cores, a worker of our "
        "own server uses a share of them.",
    )
    threads: Annotated[int | None, Option(usual="one per core")] = Field(
        default=None, ge=1, description="Intra-op threads of a worker on the CPU. None means one for each of its cores."
    )
    batch_size: int = Field(
        default=Serving.batch_size, ge=1, le=1024, description="Largest number of images in one batch."
    )
    max_batch_delay_ms: int = Field(
        default=Serving.max_batch_delay_ms,
        ge=1,
        description="Milliseconds that a batch's first request waits for others; 1 means no wait. Batches form "
        "anyway while a worker is busy, so a longer wait rarely helps.",
    )
    decode_threads: Annotated[int | None, Option(usual="one per core, at most 8")] = Field(
        default=None,
        ge=1,
        le=1024,
        description="Threads of a worker that decode images; None: one per core, at most 8.",
    )
    queue_limit: int = Field(
        default=Serving.queue_limit,
        ge=1,
        description="Requests that may wait for an answer; the server refuses the next one (503). In TorchServe this "
        "limits the requests of one batch; --queue limits its queue.",
    )
    decoder: Annotated[str, Option(metavar="NAME")] = Field(
        default=Serving.decoder,
        description="Image decoder: cpu, reduced, nvimgcodec or torchcodec. Accuracy was measured with cpu, which is "
        "also the fallback; reduced decodes large JPEGs at a smaller scale. The other two are for GPUs.",
    )
    buckets: Annotated[tuple[int, ...], Option(metavar="SIZE,SIZE…", kind=str, read=sizes, usual="any size")] = Field(
        default=(),
        description="Batch sizes to prepare, ascending; smaller batches are padded to the next size.",
    )
    engines: Annotated[
        tuple[str, ...], Option("--engine", metavar="ENGINE", kind=list[str], read=tuple, usual="as measured")
    ] = Field(
        default=(),
        description="Engines to prefer, best first; add a device if there are two: exported[cuda]. The other engines "
        "that can open the artifact follow in their usual order.",
    )
    options: Annotated[
        Mapping[str, Mapping[str, EngineOption]],
        Option("--option", metavar="ENGINE.NAME=VALUE", kind=list[str], read=engine_options),
    ] = Field(default={}, description="Options of engines: {'openvino': {'precision': 'bf16'}}.")
    strict: Annotated[bool, Option(negatable=True)] = Field(
        default=Serving.strict, description="Allow only the first engine: if it does not work, loading fails."
    )
    k: int = Field(
        default=Serving.k, ge=1, description="Number of classes in an answer, unless the request says otherwise."
    )
    accept: Annotated[str, Option(metavar="TYPE", usual="the task's own")] = Field(
        default=Serving.accept,
        description="Header Accept of requests that leave it open.",
    )
    instance_limit: int = Field(
        default=Serving.instance_limit, ge=1, description="Largest number of images in one JSON request."
    )
    budget: Annotated[Budget, Option(metavar="LIMIT=VALUE", kind=list[str], read=limits)] = Field(
        default=SERVING,
        description="Limits of pixels and seconds for decoding an image, a request and a batch. A batch gets at most "
        "half of response_timeout_s.",
    )
    response_timeout_s: int = Field(
        default=Serving.response_timeout_s,
        ge=1,
        description="Seconds in which a batch must be answered; otherwise its worker is restarted.",
    )
    startup_timeout_s: int = Field(
        default=Serving.startup_timeout_s,
        ge=1,
        description="Seconds in which a worker must load and warm up.",
    )

    @field_validator("budget", mode="before")
    @classmethod
    def _name_what_differs(cls, value: object) -> object:
        """Take missing limits from the default. They are not unlimited."""
        if not isinstance(value, Mapping):
            return value
        known = dataclasses.asdict(SERVING)
        for name in value:
            if name not in known:
                raise ValueError(f"unknown limit {name}{did_you_mean(str(name), known)}; known: {', '.join(known)}")
        return {**known, **value}

    @field_validator("decoder")
    @classmethod
    def _know_decoder(cls, value: str) -> str:
        from serve.runtime.decoders.base import check_decoder  # imports torch

        with _as_value_error():
            return check_decoder(value)

    @field_validator("buckets")
    @classmethod
    def _ascend(cls, value: tuple[int, ...]) -> tuple[int, ...]:
        with _as_value_error():
            Execution("any", buckets=value)
        return value

    @field_validator("engines")
    @classmethod
    def _know_engines(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        from serve.runtime.engines.base import find_engine  # imports torch

        with _as_value_error():
            for word in value:
                name, _, device = word.removesuffix("]").partition("[")
                if device and device not in (runs_on := find_engine(name).devices):
                    raise UserError(f"{name} runs on {' and '.join(runs_on)}, not on {device}")
                find_engine(name)
        return value

    @field_validator("options")
    @classmethod
    def _know_options(cls, value: Mapping[str, Mapping[str, EngineOption]]) -> Mapping[str, Mapping[str, EngineOption]]:
        from serve.runtime.engines.base import find_engine  # imports torch

        with _as_value_error():
            for name, given in value.items():
                find_engine(name).settings(given)
        return value

    def check_task(self, name: str) -> None:
        """Check that requests for this task have the parameters whose usual values are set here.

        Raises:
            UserError: they have not.
        """
        task = find_task(name)
        for setting in _PARAMETERS:
            if setting in self.model_fields_set and setting not in task.parameters:
                known = ", ".join(each for each in _PARAMETERS if each in task.parameters) or "none of these"
                raise UserError(f"{setting}: an answer of {name} does not depend on it; it has {known}")

    def over(self, serving: Serving, card: Card) -> Serving:
        """Return ``serving`` with the settings given here.

        Args:
            serving: the artifact's settings otherwise.
            card: the artifact's card.

        Raises:
            UserError: the artifact cannot be served so.
        """
        self.check_task(card.task)
        given = {name: getattr(self, name) for name in self.model_fields_set if name in _OWN}
        try:
            made = replace(serving, **given, executions=tuple(self._executions(serving.executions, card)))
            open_task(card).options({}, made)  # the values suit the task
        except (CardError, RequestError) as error:
            raise UserError(f"{card.name}: {error}") from None
        return made

    def on_gpu(self) -> ServingOptions:
        """Return these options with all GPU executions preferred, after the named engines."""
        from serve.runtime.engines.base import engines  # imports torch

        words = (f"{name}[cuda]" for name, entry in engines().items() if "cuda" in entry.devices)
        return self.model_copy(update={"engines": (*self.engines, *words)})

    def _executions(self, usual: tuple[Execution, ...], card: Card) -> Iterable[Execution]:
        from serve.runtime.engines.base import engines_for  # imports torch

        named = {(entry.engine, entry.device) for entry in usual}
        possible = [(entry, device) for device in ("cuda", "cpu") for entry in engines_for(card)]
        known = [
            *usual,
            *(
                Execution(entry.name, device)
                for entry, device in possible
                if entry.never_runs(card, device) is None and (entry.name, device) not in named
            ),
        ]
        chosen = [entry for word in self.engines for entry in known if word in _words(entry)]
        for entry in dict.fromkeys([*chosen, *usual]):
            changes: dict[str, Any] = {"options": {**entry.options, **self.options.get(entry.engine, {})}}
            if "threads" in self.model_fields_set and entry.device == "cpu":
                changes["threads"] = self.threads
            if "buckets" in self.model_fields_set:
                changes["buckets"] = self.buckets
            yield replace(entry, **changes)


def _words(execution: Execution) -> tuple[str, str]:
    """Return the names for an execution in `ServingOptions.engines`."""
    return execution.engine, f"{execution.engine}[{execution.device}]"


@contextlib.contextmanager
def _as_value_error() -> Iterator[None]:
    """Convert a `UserError` in the block to pydantic's ValueError."""
    try:
        yield
    except UserError as error:
        raise ValueError(str(error)) from None
