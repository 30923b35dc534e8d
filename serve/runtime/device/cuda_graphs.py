"""CUDA graphs of a network, one for each batch bucket, to launch all its kernels at once.

It follows torch's notes on CUDA graphs ("CUDA semantics"): warm-up on a side stream, capture on the same stream, static
input and output, one memory pool. Graphs that share a pool may be replayed in any order, if they never run at the same
time and nobody needs an output after the next replay (pytorch 166975).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from ..errors import EngineError, first_line
from ..outputs import Outputs, as_outputs
from .buckets import StaticBatches
from .device_turns import turn_at

_WARM_UPS = 3  # the first one selects algorithms and allocates workspaces, which a capture may not do

#: Largest difference between a replay and the same kernels launched one by one, relative to the largest number of
#: an output. The order of sums may differ.
_REPLAY_TOLERANCE = 0.02


class CudaGraphs:
    """A network's captured graphs. Only the thread that opens it may replay them.

    Args:
        call: the network, from ``(N, C, H, W)`` to its outputs, on the device. It must not read data on the host or
            change its own state.
        batches: the static inputs. A graph is captured for each of their buckets.
        device: a CUDA device.
        name: the network's name, for messages.

    Raises:
        EngineError: the network does not run, cannot be captured, or its replay gives other outputs.
    """

    def __init__(
        self,
        call: Callable[[torch.Tensor], torch.Tensor | Outputs],
        batches: StaticBatches,
        device: torch.device,
        name: str,
    ) -> None:
        self._batches = batches
        self._device = device
        # A graph holds addresses, not tensors. This reference keeps the network's tensors alive.
        self._call = call
        self._graphs: dict[int, tuple[torch.cuda.CUDAGraph, Outputs]] = {}
        # One pool and one stream for all graphs. The largest is first, because smaller ones fit into the memory that it
        # frees.
        with torch.cuda.device(device), torch.inference_mode(False), torch.no_grad():
            pool = torch.cuda.graph_pool_handle()
            stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
            for bucket in sorted(batches.buckets, reverse=True):
                with turn_at(device):  # one turn for each graph, so that other models can answer in between
                    self._graphs[bucket] = _capture(call, batches.input(bucket), pool, stream, name)
            torch.cuda.synchronize(device)

    def run(self, batch: torch.Tensor) -> Outputs:
        """Return the outputs for a batch ``(N, C, H, W)``, on the current stream."""
        with torch.cuda.device(self._device):
            return self._batches.run(batch, self._replay)

    def _replay(self, bucket: int) -> Outputs:
        graph, outputs = self._graphs[bucket]
        graph.replay()
        return outputs


def _capture(
    call: Callable[[torch.Tensor], torch.Tensor | Outputs],
    inputs: torch.Tensor,
    pool: Any,
    stream: torch.cuda.Stream,
    name: str,
) -> tuple[torch.cuda.CUDAGraph, Outputs]:
    """Warm up, capture and check one bucket. Return the graph and the outputs that its replays write."""
    inputs.copy_(torch.randn(inputs.shape))  # zeros would hide missing results
    current = torch.cuda.current_stream(inputs.device)
    stream.wait_stream(current)
    try:
        with torch.cuda.stream(stream):
            for _ in range(_WARM_UPS):
                wanted = as_outputs(call(inputs))
        current.wait_stream(stream)
        torch.cuda.synchronize(inputs.device)
    except RuntimeError as error:
        raise EngineError(f"{name}: does not run on {inputs.device} at batch {len(inputs)}: {_said(error)}") from error
    graph = torch.cuda.CUDAGraph()
    drawn = torch.cuda.get_rng_state()
    try:
        # thread_local: another thread may allocate meanwhile, for example one that pins a data loader's batches.
        with torch.cuda.graph(graph, pool=pool, stream=stream, capture_error_mode="thread_local"):
            outputs = as_outputs(call(inputs))
        graph.replay()
        torch.cuda.synchronize(inputs.device)
    except RuntimeError as error:
        _reset_generator(drawn)
        raise EngineError(
            f"{name}: cannot be captured as a CUDA graph at batch {len(inputs)}: {_said(error)}"
        ) from error
    if not agree(outputs, wanted):
        raise EngineError(
            f"{name}: its CUDA graph gives other outputs than the network itself at batch {len(inputs)}; the "
            "network depends on something that a CUDA graph does not record"
        )
    return graph, outputs


def _reset_generator(drawn: torch.Tensor) -> None:
    """Give the current device's generator a new state after a failed capture.

    The old state still belongs to the capture. The next random number would raise "Offset increment outside graph
    capture" (torch 2.11).

    Args:
        drawn: the generator's state before the capture.
    """
    index = torch.cuda.current_device()
    generator = torch.Generator(torch.device("cuda", index))
    generator.set_state(drawn)
    torch.cuda.default_generators[index].graphsafe_set_state(generator.graphsafe_get_state())


def agree(found: Outputs, wanted: Outputs, tolerance: float = _REPLAY_TOLERANCE) -> bool:
    """Whether each output differs by at most ``tolerance`` of its largest wanted number, with the same finite ones."""
    return len(found) == len(wanted) and all(_agree(*pair, tolerance) for pair in zip(found, wanted, strict=True))


def _agree(found: torch.Tensor, wanted: torch.Tensor, tolerance: float) -> bool:
    if found.shape != wanted.shape:
        return False
    found, wanted = found.float(), wanted.float()
    finite = wanted.isfinite()
    if not torch.equal(found.isfinite(), finite):
        return False
    difference = torch.where(finite, found - wanted, 0).abs().amax()
    largest = torch.where(finite, wanted, 0).abs().amax()
    return bool(difference <= tolerance * largest)


def _said(error: BaseException) -> str:
    return f"{type(error).__name__}: {first_line(error)}"
