"""``inductor``: a ``torch.export`` program compiled by AOTInductor for this machine, when it is first opened here.

The result is native code, which this process trusts. It is compiled from the verified artifact on the machine that runs
it, kept in the user's cache (see `compile_cache`), and never packed.
"""

from __future__ import annotations

import contextlib
import importlib
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from ..card.card import Card
from ..card.execution import Execution
from ..device.buckets import StaticBatches
from ..device.cuda_graphs import CudaGraphs, agree
from ..errors import EngineError
from ..model_files.compile_cache import cache_folder, device_key, kept
from ..model_files.isolated_run import run_isolated
from ..model_files.program_file import program_on
from ..outputs import Outputs, as_outputs
from .base import Engine, EngineOption, EngineType, register

_FILE = "model.pt2"
_CHECKED_BATCHES = (1, 2, 3)

#: Largest difference between the compiled network and its program, relative to an output's largest number.
_TOLERANCE = {torch.float32: 0.01, torch.float16: 0.03, torch.bfloat16: 0.1}
#: The same for programs with integers. A step of 8 bits is 0.004 of the largest value, and ties move several steps.
_INTEGER_TOLERANCE = 0.1


class InductorEngine:
    """See `Engine`.

    Without buckets one package serves every batch. The program's batch is dynamic, AOTInductor keeps it so, and
    compiling takes minutes. With buckets there is a package for each, compiled for exactly its shape, as torch's
    documentation advises for few shapes.
    """

    def __init__(self, folder: Path, card: Card, execution: Execution) -> None:
        settings = INDUCTOR.settings(execution.options)
        self.device = torch.device(execution.device)
        self.provider = f"aotinductor/{self.device.type}"
        self._dtype: torch.dtype = getattr(torch, card.input_dtype)
        self._shape = card.preprocessing.shape
        self._batches: StaticBatches | None = None
        self._graphs: CudaGraphs | None = None
        graphs = settings["cudagraph"]
        if graphs and (self.device.type != "cuda" or not execution.buckets):
            raise EngineError(f"{card.name}: inductor's option cudagraph needs a CUDA device and buckets")
        with on_device(self.device), torch.inference_mode(False), torch.no_grad():
            self._packages = {
                bucket: _package(folder / card.file, card, self.device, settings, bucket)
                for bucket in execution.buckets or (0,)
            }
            if execution.buckets:
                self._batches = StaticBatches(execution.buckets, self._shape, self._dtype, self.device)
            if graphs and self._batches is not None:
                self._graphs = CudaGraphs(lambda x: self._compute(len(x), x), self._batches, self.device, card.name)
                self.provider += "/cudagraph"

    def run(self, batch: torch.Tensor) -> Outputs:
        """Return the outputs for a batch."""
        if self._graphs is not None:
            return self._graphs.run(batch)
        with on_device(self.device):
            if self._batches is not None:
                batches = self._batches
                return batches.run(batch, lambda bucket: self._compute(bucket, batches.input(bucket)))
            # The compiled code assumes a contiguous input of its dtype and does not check it (torch 2.14).
            if batch.shape[1:] != self._shape or batch.dtype != self._dtype:
                raise ValueError(f"inputs must be {self._shape} of {self._dtype}, got {batch.shape[1:]}, {batch.dtype}")
            return self._compute(0, batch.contiguous())

    def _compute(self, bucket: int, inputs: torch.Tensor) -> Outputs:
        return as_outputs(self._packages[bucket](inputs))


def on_device(device: torch.device) -> contextlib.AbstractContextManager[object]:
    """Make a CUDA device the current one for a block. On the CPU it does nothing."""
    return torch.cuda.device(device) if device.type == "cuda" else contextlib.nullcontext()


def _package(path: Path, card: Card, device: torch.device, settings: Mapping[str, Any], bucket: int) -> Any:
    """Return the compiled network, from the cache or compiled now. ``bucket`` 0 is for every batch size."""
    folder = cache_folder(
        "inductor",
        {
            "model": card.files[card.file],
            "torch": torch.__version__,
            "device": device_key(device),
            "options": {name: settings[name] for name in ("freezing", "max_autotune", "hint")},
            "bucket": bucket,
        },
    )

    def make(package: Path) -> None:
        if card.target is not None:
            # This registers the operators quantized_decomposed (torch 2.11 to 2.14). The program cannot be read without
            # them.
            importlib.import_module("torch.ao.quantization.fx._decomposed")
        program = program_on(path, device)
        shape = (bucket or settings["hint"], *card.preprocessing.shape)
        example = torch.randn(shape, device=device).to(getattr(torch, card.input_dtype))
        rounds = card.target is not None
        compile_program(program, example, package, settings, static=bool(bucket), name=card.name, rounds=rounds)

    return _loaded(kept(folder, _FILE, make), device)


def compile_program(
    program: torch.export.ExportedProgram,
    example: torch.Tensor,
    package: Path,
    settings: Mapping[str, Any],
    *,
    static: bool,
    name: str,
    rounds: bool = False,
) -> None:
    """Compile a program, and check that the result gives the same answers.

    Args:
        program: the program, on the device that it is compiled for.
        example: ``(N, C, H, W)`` on that device. For a dynamic batch, kernels are chosen for N.
        package: the file to write, ``*.pt2``.
        settings: the engine's options.
        static: compile for the example's batch size only.
        name: the network's name, for messages.
        rounds: whether it has quantizers inside. Sums in another order may then round ties differently, and the
            difference grows.

    Raises:
        EngineError: the compiled network gives other outputs.
    """
    from torch._inductor import aoti_compile_and_package

    with torch.no_grad(), _private_work_folder():
        module = program.module()
        if static:
            program = torch.export.export(module, (example,))
        program.example_inputs = ((example,), {})  # an artifact's program has none
        configs = {"freezing": settings["freezing"], "max_autotune": settings["max_autotune"]}
        aoti_compile_and_package(program, package_path=str(package), inductor_configs=configs)
        counts = (len(example),) if static else (*_CHECKED_BATCHES, len(example))
        batches = [torch.randn((count, *example.shape[1:])).to(example.dtype) for count in counts]
        # A crash would end a server of several models. On the CPU only a user who names this engine gets it.
        if example.device.type == "cuda":
            answers = run_isolated(package, _index(example.device), batches, name)
        else:
            compiled = _loaded(package, example.device)
            answers = [as_outputs(compiled(batch)) for batch in batches]
        tolerance = _INTEGER_TOLERANCE if rounds else _TOLERANCE.get(example.dtype, 0.1)
        for batch, answer in zip(batches, answers, strict=True):
            wanted = tuple(output.cpu() for output in as_outputs(module(batch.to(example.device))))
            if not agree(answer, wanted, tolerance):
                raise EngineError(
                    f"{name}: the code that AOTInductor of torch {torch.__version__} compiled gives other outputs "
                    f"than the program itself at batch {len(batch)}"
                )


def _loaded(package: Path, device: torch.device) -> Any:
    from torch._inductor import aoti_load_package

    # One thread runs it. The runner for several threads waits for its own events, which no CUDA graph can capture
    # (pytorch 148601).
    return aoti_load_package(str(package), run_single_threaded=True, device_index=_index(device))


def _index(device: torch.device) -> int:
    """Return a device's index for AOTInductor: -1 for the CPU."""
    return -1 if device.type == "cpu" else device.index if device.index is not None else torch.cuda.current_device()


@contextlib.contextmanager
def _private_work_folder() -> Iterator[None]:
    """Give Inductor a private working folder.

    Its default is a predictable name in the machine's /tmp, and it loads what is there. Whether the user has set
    another folder is unknown, because Inductor writes its default into the environment itself (torch 2.11 to 2.14).
    """
    name = "TORCHINDUCTOR_CACHE_DIR"
    before = os.environ.get(name)
    os.environ[name] = str(cache_folder("inductor-work", {"torch": torch.__version__}))
    try:
        yield
    finally:
        del os.environ[name]
        if before is not None:
            os.environ[name] = before


def _open(folder: Path, card: Card, execution: Execution) -> Engine:
    return InductorEngine(folder, card, execution)


def _probe(device: torch.device) -> torch.Tensor:
    """Compile a small network, or open the one compiled here before, and run it."""
    with on_device(device):
        network = torch.nn.Sequential(torch.nn.Conv2d(3, 8, 3), torch.nn.ReLU(), torch.nn.Flatten()).eval().to(device)
        example = torch.randn(2, 3, 8, 8, device=device)

        def make(package: Path) -> None:
            program = torch.export.export(network, (example,), dynamic_shapes=({0: torch.export.Dim.DYNAMIC},))
            defaults = INDUCTOR.settings({})
            compile_program(program, example, package, defaults, static=False, name="a small network")

        folder = cache_folder("inductor", {"probe": 1, "torch": torch.__version__, "device": device_key(device)})
        with torch.no_grad():
            logits: torch.Tensor = _loaded(kept(folder, _FILE, make), device)(example)
        return logits


INDUCTOR = register(
    EngineType(
        "inductor",
        keeps_buckets=True,
        formats=("exported_program",),
        open=_open,
        probe=_probe,
        devices=("cuda", "cpu"),
        # It compiles for minutes when it is first opened, so it is no good default without measurements.
        rank=60,
        on_request=("cpu",),
        options={
            "freezing": EngineOption(True, "fold constants and prepare the layout of weights while compiling"),
            "max_autotune": EngineOption(
                False, "time several candidates for every kernel while compiling; takes many minutes"
            ),
            "hint": EngineOption(8, "batch size for which kernels are chosen if there are no buckets"),
            "cudagraph": EngineOption(False, "capture the compiled code as CUDA graphs, one for each bucket"),
        },
    )
)
