"""Finds how many channels may stay for a share of a network's time, by running real candidates instead of a model.

Time is no function of arithmetic: kernels work in blocks of channels, and layers wait for memory. So each candidate is
built, its norms are folded, and it is written in the engine's format. It is then timed in turns with the whole network.
"""

from __future__ import annotations

import copy
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any, Final, Protocol, Self

import torch
from pydantic import Field
from torch import fx

from optimize.context import Context
from optimize.errors import PassError
from optimize.export.onnx_graph.write import export_onnx
from optimize.export.program import write_program, write_script
from optimize.measure.chosen_executions import check_wanted
from optimize.measure.machine import machine
from optimize.measure.relative_times import Shares
from optimize.measure.timing import Timing, Wanted
from optimize.pruning.groups import Grouping
from optimize.pruning.surgery import remove
from optimize.statistics import RatioInterval
from optimize.store.atomic_files import write_json
from optimize.tracing.folding import fuse_module
from optimize.training.checkpoints import fingerprint
from serve.common.config import Config
from serve.runtime.card.card import Card, Format, sha256_file, write_card
from serve.runtime.card.execution import Execution
from serve.runtime.card.json_documents import sealed, unsealed
from serve.runtime.engines.base import execution_id, find_engine
from serve.runtime.errors import UserError

#: Formats of a float network. The first one that an engine opens is used.
_FORMATS: Final[tuple[Format, ...]] = ("onnx", "exported_program", "torchscript")

#: The number of units of each group that stay.
Kept = list[int]
#: Takes a test of whether the numbers of units are small enough, and returns the largest that pass. None: even the
#: smallest are too large.
Search = Callable[[Callable[[Kept], bool]], Kept | None]
#: Returns the units to remove for given numbers of units that stay.
Removed = Callable[[Kept], set[int]]


class Latency(Config):
    """A share of the network's time that may stay, and how to measure it."""

    share: float = Field(gt=0, lt=1, description="share of the whole network's time that may remain")
    execution: Wanted = Field(
        description="engine that runs the networks: a name, or a mapping such as {engine: openvino, threads: 1}"
    )
    batch: int = Field(default=1, ge=1, description="images per call")
    rounds: int = Field(
        default=7, ge=1, description="measurements of each network; with 6 or more, a share has a 95 % interval"
    )
    seconds: float = Field(default=0.2, gt=0, description="length of one measurement of one network, in seconds")

    @property
    def by(self) -> Execution:
        """The execution of the networks. An engine given by name runs on its usual device."""
        wanted = self.execution
        return wanted if isinstance(wanted, Execution) else Execution(wanted, find_engine(wanted).devices[0])

    @property
    def format(self) -> Format:
        """The format of candidates.

        Raises:
            UserError: the engine opens no format of a float network.
        """
        opened = find_engine(self.by.engine).formats
        found = next((each for each in _FORMATS if each in opened), None)
        if found is None:
            raise UserError(
                f"{self.by.engine} opens {' and '.join(opened)} files, not the float networks that pruning makes"
            )
        return found

    def check(self) -> None:
        """Refuse an execution that is impossible on this machine.

        Raises:
            UserError: see `check_wanted`. Or the engine runs no float network, or the device does not exist.
        """
        check_wanted((self.execution,))
        assert self.format
        device, there = torch.device(self.by.device), torch.cuda.device_count()
        if device.type == "cuda" and (device.index or 0) >= there:
            raise UserError(
                f"latency: {execution_id(self.by)} cannot be timed on {device}: this machine has {there} CUDA devices"
            )


class Budget(Protocol):
    """The share of a network that may stay.

    Attributes:
        notes: results for the artifact's card.
    """

    notes: tuple[str, ...]

    def widest(self, module: fx.GraphModule, grouping: Grouping, removed: Removed, search: Search, part: float) -> Kept:
        """Return the largest number of units that may stay, for each group.

        Args:
            module: the network to cut, at most as large as the whole one. It is not changed.
            grouping: its channels.
            removed: gives the units to remove.
            search: see `Search`.
            part: how far to go with the removal, as an exponent of the final share.

        Raises:
            PassError: even the smallest allowed numbers are too large.
        """


class Race:
    """Times candidates against the whole network. It is a context manager that ends all its processes.

    Args:
        whole: traced, in eval mode.
        config: how to measure.
        context: of the run.
    """

    def __init__(self, whole: fx.GraphModule, config: Latency, context: Context) -> None:
        self.notes: tuple[str, ...] = ()
        self._whole, self._config, self._context, self._example = whole, config, context, context.example()

    def __enter__(self) -> Self:
        self._folder = Path(tempfile.mkdtemp(prefix="pruning-"))
        config = self._config
        timing = Timing(rounds=config.rounds, seconds=config.seconds)
        whole = self._written(self._whole, "whole")
        self._shares = Shares(whole, config.by, self._context, config.batch, timing)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._shares.__exit__(kind, error, trace)
        shutil.rmtree(self._folder, ignore_errors=True)

    def widest(self, module: fx.GraphModule, grouping: Grouping, removed: Removed, search: Search, part: float) -> Kept:
        """See `Budget`. The test is a measured time.

        The search ends at a candidate that was chosen for a low time, so it is timed once more. If the new time is
        above the share, the candidate counts as too slow and the search continues.

        The result is stored with the run's unfinished work. Times never repeat exactly, and other widths would make the
        progress of an interrupted training worthless.
        """
        known = self._known(module, part)
        if known is not None and (found := _kept(known)) is not None:
            self.notes = (*self.notes, found["note"])
            return list(found["kept"])
        share: float = self._config.share**part
        times: dict[tuple[int, ...], RatioInterval] = {}

        def time_of(kept: Kept) -> RatioInterval:
            smaller = copy.deepcopy(module)
            remove(smaller, grouping, removed(kept))
            self._context.listener.progressed(0.0, f"timing candidate {len(times) + 1}")
            return self._shares.of(self._written(smaller, "candidate"))

        def reached(kept: Kept) -> bool:
            if tuple(kept) not in times:
                times[tuple(kept)] = time_of(kept)
            return times[tuple(kept)].median <= share

        while (stay := search(reached)) is not None:
            again = time_of(stay)
            if again.median <= share:
                note = self._note(again, share, len(times))
                if known is not None:
                    write_json(sealed({"kept": stay, "note": note}), known)
                self.notes = (*self.notes, note)
                return stay
            times[tuple(stay)] = again
        least = min(times.values(), key=lambda found: found.median)
        raise PassError(
            f"prune-channels: {share:.3g} of the time of {self._words()} cannot be reached: with the minimum "
            f"number of channels it is {_interval(least)}"
        )

    def _known(self, module: fx.GraphModule, part: float) -> Path | None:
        """Return the file that keeps the result for a network until the run is complete, or None."""
        if self._context.unfinished is None:
            return None
        return self._context.unfinished / f"widths-{fingerprint(module, self._config, 1)}-{part:.6f}.json"

    def _note(self, found: RatioInterval, share: float, tried: int) -> str:
        here = machine(torch.device(self._config.by.device))
        where = here["gpu"]["name"] if here["gpu"] else f"{here['cpu']}, {here['cores']} cores"
        return (
            f"time of {self._words()}, norms folded: {_interval(found)} of the whole network's, {share:.3g} "
            f"requested; {tried} candidates were timed on {where}"
        )

    def _words(self) -> str:
        return f"a batch of {self._config.batch} in {execution_id(self._config.by)}"

    def _written(self, module: fx.GraphModule, name: str) -> Path:
        """Write a network as an artifact's folder, replacing the one of the same name."""
        folder = self._folder / name
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir()
        kind, folded = self._config.format, fuse_module(copy.deepcopy(module), self._example)
        if kind == "onnx":
            file = "model.onnx"
            export_onnx(folded, self._example, folder / file)
        elif kind == "exported_program":
            file, kind = write_program(folded, self._example, folder)
        else:
            file = write_script(folded, self._example, folder)
        write_card(
            folder,
            Card(
                name=name,
                model="pruning",
                task=self._context.task.name,
                format=kind,
                file=file,
                precision="float32",
                input_dtype="float32",
                device="any",
                preprocessing=self._context.preprocessing,
                classes=self._context.data.classes,
                files={path.name: sha256_file(path) for path in folder.iterdir()},
            ),
        )
        return folder


def _kept(path: Path) -> dict[str, Any] | None:
    """Return the widths found before an interruption. None: there are none, or their file was changed."""
    try:
        return unsealed(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None


def _interval(found: RatioInterval) -> str:
    return f"{found.median:.2f} ({found.low:.2f} to {found.high:.2f})"
