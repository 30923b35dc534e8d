"""How many channels may stay for a network to take a share of its time: found by running real candidates, not a model.

Time is not a function of arithmetic: kernels work in blocks of channels, layers wait for memory. So each candidate is
built, its norms are folded, it is written as the engine reads it, and timed in turns with the whole network.
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
from optimize.measure.statistics import RatioInterval
from optimize.measure.timing import Timing, Wanted
from optimize.pruning.groups import Grouping
from optimize.pruning.surgery import remove
from optimize.store.atomic_files import write_json
from optimize.tracing.folding import fuse_module
from optimize.training.checkpoints import fingerprint
from serve.common.config import Config
from serve.runtime.card.card import Card, Format, sha256_file, write_card
from serve.runtime.card.execution import Execution
from serve.runtime.card.json_documents import sealed, unsealed
from serve.runtime.engines.base import execution_id, find_engine
from serve.runtime.errors import UserError

#: What a float network can be written as, the first that an engine opens.
_FORMATS: Final[tuple[Format, ...]] = ("onnx", "exported_program", "torchscript")

#: How many units of each group stay.
Kept = list[int]
#: Given whether numbers of units are few enough, the most that are; None: even the fewest are too many.
Search = Callable[[Callable[[Kept], bool]], Kept | None]
#: The units that go where so many of each group stay.
Removed = Callable[[Kept], set[int]]


class Latency(Config):
    """A share of the network's time that may stay, and what that is measured with."""

    share: float = Field(gt=0, lt=1, description="share of the whole network's time that may stay")
    execution: Wanted = Field(
        description="what runs the networks: an engine's name, or a mapping such as {engine: openvino, threads: 1}"
    )
    batch: int = Field(default=1, ge=1, description="images per call")
    rounds: int = Field(default=7, ge=1, description="turns of each network; from 6 on, a share has a 95 % interval")
    seconds: float = Field(default=0.2, gt=0, description="time of one turn of one network")

    @property
    def by(self) -> Execution:
        """What runs the networks; an engine that is only named, on its usual device."""
        wanted = self.execution
        return wanted if isinstance(wanted, Execution) else Execution(wanted, find_engine(wanted).devices[0])

    @property
    def format(self) -> Format:
        """What candidates are written as.

        Raises:
            UserError: the engine opens none of what a float network can be written as.
        """
        opened = find_engine(self.by.engine).formats
        found = next((each for each in _FORMATS if each in opened), None)
        if found is None:
            raise UserError(
                f"{self.by.engine} opens {' and '.join(opened)} files, and no float network as it is pruned"
            )
        return found

    def check(self) -> None:
        """Refuse what no engine here could be asked for.

        Raises:
            UserError: see `check_wanted`, the engine runs no float network, or there is no such device.
        """
        check_wanted((self.execution,))
        assert self.format
        device, there = torch.device(self.by.device), torch.cuda.device_count()
        if device.type == "cuda" and (device.index or 0) >= there:
            raise UserError(
                f"latency: {execution_id(self.by)} is to be timed on {device}, this machine has {there} CUDA devices"
            )


class Budget(Protocol):
    """How much of a network may stay.

    Attributes:
        notes: what was found out, for the artifact's card.
    """

    notes: tuple[str, ...]

    def widest(self, module: fx.GraphModule, grouping: Grouping, removed: Removed, search: Search, part: float) -> Kept:
        """The most units that may stay of each group.

        Args:
            module: what is cut, at least as small as the whole network; stays as it is.
            grouping: its channels.
            removed: which units go.
            search: see `Search`.
            part: how far the removal is to go, as an exponent of the share that may stay in the end.

        Raises:
            PassError: even the fewest that are allowed are too many.
        """


class Race:
    """Candidates against the whole network that they are cut out of; a context, which ends all processes.

    Args:
        whole: traced, in eval mode.
        config: what is measured with.
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
        """See `Budget`; asked by measured times.

        What the search ends at has been chosen for a low time, and is timed once more: if that is above the share, it
        counts as too slow, and the search goes on.

        The answer is kept with the run's unfinished work: times are never twice the same, and other widths would make
        worthless what a training that was interrupted behind it had come to.
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
            f"prune-channels: {share:.3g} of the time of {self._words()} cannot be reached: the least that was "
            f"measured, with as few channels as are allowed, is {_interval(least)}"
        )

    def _known(self, module: fx.GraphModule, part: float) -> Path | None:
        """Where the answer for a network is kept until all is made; None: nowhere."""
        if self._context.unfinished is None:
            return None
        return self._context.unfinished / f"widths-{fingerprint(module, self._config, 1)}-{part:.6f}.json"

    def _note(self, found: RatioInterval, share: float, tried: int) -> str:
        here = machine(torch.device(self._config.by.device))
        where = here["gpu"]["name"] if here["gpu"] else f"{here['cpu']}, {here['cores']} cores"
        return (
            f"time of {self._words()}, norms folded: {_interval(found)} of the whole network's, {share:.3g} asked for; "
            f"{tried} candidates were timed on {where}"
        )

    def _words(self) -> str:
        return f"a batch of {self._config.batch} in {execution_id(self._config.by)}"

    def _written(self, module: fx.GraphModule, name: str) -> Path:
        """A network as an artifact's folder, in the place of the one of the same name."""
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
    """The widths that were found before an interruption; None: there are none, or their file was changed."""
    try:
        return unsealed(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None


def _interval(found: RatioInterval) -> str:
    return f"{found.median:.2f} ({found.low:.2f} to {found.high:.2f})"
