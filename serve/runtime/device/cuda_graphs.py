"""CUDA graphs of a network, one for each batch bucket: what was launched kernel by kernel is launched at once.

Follows torch's notes on CUDA graphs ("CUDA semantics"): warm-up on a side stream, capture on that same stream, static
input and output, one memory pool. Graphs that share a pool may be replayed in any order as long as they never run at
the same time and nobody needs an output after the next replay (pytorch 166975).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from ..errors import EngineError, first_line
from .buckets import StaticBatches
from .device_turns import turn_at

_WARM_UPS = 3  # the first chooses algorithms and allocates workspaces, which a capture may not

#: How far a replay may lie from the same kernels launched one by one, of the largest logit: sums in another order.
_REPLAY_TOLERANCE = 0.02


class CudaGraphs:
    """A network's captured graphs. The thread that opens it captures and replays: not safe to share.

    Args:
        call: the network, ``(N, C, H, W)`` to logits ``(N, classes)``, on the device; it may not look at the data
            on the host, nor change its own state.
        batches: the static inputs; their buckets are captured.
        device: a CUDA device.
        name: what is captured, for messages.

    Raises:
        EngineError: the network does not run, cannot be captured, or does not replay what it computes.
    """

    def __init__(
        self,
        call: Callable[[torch.Tensor], torch.Tensor],
        batches: StaticBatches,
        device: torch.device,
        name: str,
    ) -> None:
        self._batches = batches
        self._device = device
        # A graph holds addresses and no tensors: what the network computes with lives as long as its graphs.
        self._call = call
        self._graphs: dict[int, tuple[torch.cuda.CUDAGraph, torch.Tensor]] = {}
        # A pool and a stream for all. The largest first: what it frees, the smaller ones fit in.
        with torch.cuda.device(device), torch.inference_mode(False), torch.no_grad():
            pool = torch.cuda.graph_pool_handle()
            stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
            for bucket in sorted(batches.buckets, reverse=True):
                with turn_at(device):  # for each anew: other models of this process answer in between
                    self._graphs[bucket] = _capture(call, batches.input(bucket), pool, stream, name)
            torch.cuda.synchronize(device)

    def run(self, batch: torch.Tensor) -> torch.Tensor:
        """Logits ``(N, classes)`` of a batch ``(N, C, H, W)``, on the current stream."""
        with torch.cuda.device(self._device):
            return self._batches.run(batch, self._replay)

    def _replay(self, bucket: int) -> torch.Tensor:
        graph, logits = self._graphs[bucket]
        graph.replay()
        return logits


def _capture(
    call: Callable[[torch.Tensor], torch.Tensor],
    inputs: torch.Tensor,
    pool: Any,
    stream: torch.cuda.Stream,
    name: str,
) -> tuple[torch.cuda.CUDAGraph, torch.Tensor]:
    """Warm up, capture and check one bucket; returns the graph and the logits that its replays write."""
    inputs.copy_(torch.randn(inputs.shape))  # not zeros, which hide what was not computed
    current = torch.cuda.current_stream(inputs.device)
    stream.wait_stream(current)
    try:
        with torch.cuda.stream(stream):
            for _ in range(_WARM_UPS):
                wanted = call(inputs)
        current.wait_stream(stream)
        torch.cuda.synchronize(inputs.device)
    except RuntimeError as error:
        raise EngineError(f"{name}: does not run on {inputs.device} at batch {len(inputs)}: {_said(error)}") from error
    graph = torch.cuda.CUDAGraph()
    drawn = torch.cuda.get_rng_state()
    try:
        # thread_local: another thread that allocates meanwhile (one that pins a data loader's batches) does no harm.
        with torch.cuda.graph(graph, pool=pool, stream=stream, capture_error_mode="thread_local"):
            logits = call(inputs)
        graph.replay()
        torch.cuda.synchronize(inputs.device)
    except RuntimeError as error:
        _draw_anew(drawn)
        raise EngineError(
            f"{name}: cannot be captured as a CUDA graph at batch {len(inputs)}: {_said(error)}"
        ) from error
    if not agree(logits, wanted):
        raise EngineError(
            f"{name}: a replay of its CUDA graph at batch {len(inputs)} gives other logits than the network itself; "
            f"it depends on something that a graph does not record"
        )
    return graph, logits


def _draw_anew(drawn: torch.Tensor) -> None:
    """Give the current device's generator a new state, after a capture that failed.

    Its own goes on believing in the capture, and whoever draws a number next gets an error: "Offset increment outside
    graph capture" (seen with torch 2.11).

    Args:
        drawn: the state of its generator before that.
    """
    index = torch.cuda.current_device()
    generator = torch.Generator(torch.device("cuda", index))
    generator.set_state(drawn)
    torch.cuda.default_generators[index].graphsafe_set_state(generator.graphsafe_get_state())


def agree(found: torch.Tensor, wanted: torch.Tensor, tolerance: float = _REPLAY_TOLERANCE) -> bool:
    """Whether logits differ by no more than ``tolerance`` of the largest wanted one, and are finite where those are."""
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
