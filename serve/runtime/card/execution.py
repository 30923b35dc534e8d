"""An execution: an engine on a device, with its threads, batch buckets and options, and the process around it.

An artifact defines what the numbers in a file mean, an execution how they are computed. Measurements, recommendations,
archives and servers always use a pair of both.
"""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, Final

from ..device.cores import cores
from ..display import Described
from ..errors import CardError, UserError, did_you_mean
from . import fields

#: The value of an engine's option.
Option = bool | int | float | str

#: Environment of every execution's process. It must be set before libraries load, because libgomp reads it then.
#: torch's threads then spin for some 10 microseconds before they sleep. A passive policy costs each parallel region a
#: wake-up: INT8 ResNet-18 takes 1.6 times as long, MobileNetV2 4.8 times. Endless spinning takes the cores from other
#: work (torch 2.14, libgomp of GCC 13).
ENVIRONMENT: Final[Mapping[str, str]] = MappingProxyType({"GOMP_SPINCOUNT": "10000"})

#: The environment before any library was loaded. Some libraries change it: torch's optimizers import ``torch._dynamo``,
#: which sets ``TORCHINDUCTOR_CACHE_DIR`` (torch 2.14). A measurement must depend on the user's settings, not on the
#: history of this process.
STARTED_WITH: Final[dict[str, str]] = dict(os.environ)

#: Parameters of mallopt(3): M_ARENA_MAX, M_MMAP_MAX and M_TRIM_THRESHOLD (bytes).
_KEPT: Final = ((-8, 1), (-4, 0), (-1, (1 << 31) - 1))

_ENGINE = re.compile(r"[a-z][a-z0-9-]{0,63}")
_DEVICE = re.compile(r"cpu|cuda(:\d{1,3})?")
_MOST_THREADS = 4096
_LARGEST_BUCKET = 1 << 16


@dataclass(frozen=True)
class Execution(Described):
    """One way to run an artifact. A record: it opens nothing, and threads may share it.

    Attributes:
        engine: name of the engine, see `engines`.
        device: ``cpu``, ``cuda`` or ``cuda:N``.
        threads: intra-op threads on the CPU. None: one for each core that the process may use.
        buckets: ascending batch sizes that the engine is prepared for. A smaller batch is padded to the next. Empty:
            any size, without padding.
        options: the engine's own options by name. Missing ones have the engine's defaults.
    """

    engine: str
    device: str = "cpu"
    threads: int | None = None
    buckets: tuple[int, ...] = ()
    options: Mapping[str, Option] = field(default_factory=dict, hash=False)

    def __post_init__(self) -> None:
        try:
            self._check()
        except CardError as error:
            raise UserError(str(error)) from None

    def _check(self) -> None:
        if not isinstance(self.engine, str) or not _ENGINE.fullmatch(self.engine):
            raise CardError(f"execution: engine must be a word of a-z, 0-9 and '-', found {fields.shown(self.engine)}")
        if not isinstance(self.device, str) or not _DEVICE.fullmatch(self.device):
            raise CardError(f"execution: device must be cpu, cuda or cuda:N, found {fields.shown(self.device)}")
        if self.threads is not None:
            fields.whole("execution: threads", self.threads, 1, _MOST_THREADS)
        for size in fields.sequence("execution: buckets", self.buckets):
            fields.whole("execution: a bucket", size, 1, _LARGEST_BUCKET)
        if sorted(set(self.buckets)) != list(self.buckets):
            raise CardError(f"execution: buckets must ascend, found {list(self.buckets)}")
        for name, value in fields.mapping("execution: options", self.options).items():
            if not isinstance(value, bool | int | float | str):
                raise CardError(
                    f"execution: option {name} must be a number, a word, true or false, found {fields.shown(value)}"
                )

    @property
    def device_type(self) -> str:
        """``cpu`` or ``cuda``."""
        return self.device.partition(":")[0]

    @property
    def cores(self) -> int:
        """Number of intra-op threads: ``threads``, or the cores that this process may use."""
        return self.threads if self.threads is not None else cores()

    def to_json(self) -> dict[str, Any]:
        """Return JSON values. `from_json` reads them back to an equal record."""
        return {
            "engine": self.engine,
            "device": self.device,
            "threads": self.threads,
            "buckets": list(self.buckets),
            "options": dict(self.options),
        }

    @classmethod
    def from_json(cls, body: object) -> Execution:
        """Read the result of `to_json`. Missing fields have their defaults.

        Raises:
            UserError: a field is unknown or has an illegal value.
        """
        if not isinstance(body, Mapping):
            raise UserError(f"an execution must be a mapping, found {fields.shown(body)}")
        known = [entry.name for entry in dataclasses.fields(cls)]
        for name in body:
            if name not in known:
                raise UserError(
                    f"execution: unknown field {name!r}{did_you_mean(str(name), known)}; known: {', '.join(known)}"
                )
        if "engine" not in body:
            raise UserError("execution: the engine is missing")
        values: dict[str, Any] = {
            name: tuple(value) if isinstance(value, list) else value for name, value in body.items()
        }
        return cls(**values)


def unset(execution: Execution, *, computes_with_torch: bool) -> str | None:
    """Return the settings of `ENVIRONMENT` that this process lacks, as a message. None: nothing that matters.

    The project's commands set them for a server. A TorchServe that somebody starts directly lacks them.

    Args:
        execution: the execution of the process.
        computes_with_torch: whether its engine uses torch's threads, which `ENVIRONMENT` concerns.
    """
    if not computes_with_torch or execution.device_type != "cpu" or execution.cores == 1:
        return None
    missing = [f"{name}={value}" for name, value in ENVIRONMENT.items() if name not in os.environ]
    if not missing:
        return None
    return f"speeds were measured with {' '.join(missing)}, which is not set here: set it before you start the server"


def settle(execution: Execution, *, computes_with_torch: bool) -> None:
    """Set torch's threads and memory in a process that runs only this execution. Call it before anything runs.

    If an engine has its own thread pool, torch stays on the calling thread. A second pool would spin beside the
    engine's between the preparation of a batch and its answer. An engine that computes with torch on the CPU keeps its
    memory, see `keep_memory`.

    Args:
        execution: the execution of the process.
        computes_with_torch: whether its engine uses torch's threads.
    """
    import torch  # this module sets the environment before torch loads

    torch.set_num_threads(execution.cores if computes_with_torch else 1)
    if computes_with_torch and execution.device_type == "cpu":
        keep_memory()


def keep_memory() -> None:
    """Make this process keep the memory of torch's activations between calls.

    torch (2.14) allocates each activation by malloc. glibc returns those of some MB at once, and the kernel clears new
    pages at the next call. Whether that happens depends on the layout of the heap, and so on the process. MobileNetV2
    takes 160 to 240 ms for 16 images instead of 119, and 31 or 43 ms for 4. The process's peak stays the same, but its
    memory no longer shrinks. Threads share one heap, because only the process's first can grow to the size of a batch.

    Nothing changes if the user has set anything of malloc's, or if the allocator is not glibc's.
    """
    if any(name.startswith("MALLOC_") or name == "GLIBC_TUNABLES" for name in os.environ):
        return
    with contextlib.suppress(AttributeError):  # not glibc
        mallopt = ctypes.CDLL(None).mallopt
        for parameter, value in _KEPT:
            mallopt(parameter, value)


def compute_alone() -> None:
    """Keep torch on the calling thread, in a process whose engine thread owns torch's threads; see `settle`.

    libgomp gives each thread that computes in parallel its own team, which stays. Once the teams have more threads than
    cores, none of them spins as `ENVIRONMENT` says, and each parallel region costs a wake-up. One resized photograph of
    12 megapixels made float ResNet-18 take 32 ms instead of 23, until the server ended.
    """
    import torch

    # A thread adopts the process's number when it first computes in parallel, and overwrites its own setting (torch
    # 2.14, at::internal::lazy_init_num_threads). Reading the number does that now.
    torch.get_num_threads()
    torch.set_num_threads(1)
