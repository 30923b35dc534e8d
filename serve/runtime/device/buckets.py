"""Batches of any size for an engine that is prepared for a few sizes: split at the largest, pad to the next.

Code for fixed shapes reads one input buffer that never moves. Nothing here depends on a device.
"""

from __future__ import annotations

import bisect
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch

from ..outputs import Outputs, joined

#: Buckets of an execution that names none.
DEFAULT_BUCKETS = (1, 2, 4, 8, 16, 32, 64)


@dataclass(frozen=True)
class Piece:
    """Rows ``start`` to ``stop`` of a batch, which run as a batch of ``bucket`` rows."""

    start: int
    stop: int
    bucket: int

    @property
    def rows(self) -> int:
        """Number of rows from the batch. The other rows of the bucket are padding."""
        return self.stop - self.start


def pieces(count: int, buckets: Sequence[int]) -> Iterator[Piece]:
    """Split a batch of ``count`` rows: full largest buckets, then the next bucket that holds the rest.

    Args:
        count: rows of the batch, at least 1.
        buckets: ascending batch sizes.
    """
    if count < 1 or not buckets:
        raise ValueError(f"a batch needs at least one row and one bucket, got {count} rows and buckets {list(buckets)}")
    for start in range(0, count, buckets[-1]):
        stop = min(count, start + buckets[-1])
        yield Piece(start, stop, buckets[bisect.bisect_left(buckets, stop - start)])


def warm_sizes(buckets: Sequence[int], most: int) -> list[int]:
    """Return the batch sizes to run before the first request: one of each bucket, or else 1, 2, 4 … ``most``.

    Args:
        buckets: ascending batch sizes that an engine is prepared for. Empty: any size.
        most: images of the largest batch.
    """
    sizes = buckets or [1 << power for power in range(most.bit_length())]
    return [*(size for size in sizes if size < most), most]


class StaticBatches:
    """The input buffer of an engine with fixed batch sizes. One thread at a time may call it, on one stream.

    All buckets share one buffer. A bucket's input is its first rows, which are contiguous in either memory format.

    Args:
        buckets: ascending batch sizes.
        shape: ``(C, H, W)`` of one input.
        dtype: dtype of the input.
        device: where the engine runs.
        memory_format: memory format of the input, for example ``torch.channels_last``.
    """

    def __init__(
        self,
        buckets: Sequence[int],
        shape: Sequence[int],
        dtype: torch.dtype,
        device: torch.device,
        memory_format: torch.memory_format = torch.contiguous_format,
    ) -> None:
        self.buckets = tuple(buckets)
        # Never created in inference mode, even if the caller is in it: such a tensor can never be written outside of
        # it.
        with torch.inference_mode(False):
            self._buffer = torch.zeros((self.buckets[-1], *shape), dtype=dtype, device=device)
            self._buffer = self._buffer.contiguous(memory_format=memory_format)

    def input(self, bucket: int) -> torch.Tensor:
        """Return the input of a bucket, ``(bucket, C, H, W)``. It never moves."""
        return self._buffer[:bucket]

    def run(self, batch: torch.Tensor, compute: Callable[[int], Outputs]) -> Outputs:
        """Return the outputs for a batch ``(N, C, H, W)``, N >= 1.

        Args:
            batch: of the buffer's dtype and shape, on any device.
            compute: reads a bucket's input and returns the outputs for it. The next call may overwrite them. Rows must
                not depend on each other, because the padding is old content of the buffer. Rows of a network in eval
                mode do not.
        """
        if batch.shape[1:] != self._buffer.shape[1:] or batch.dtype != self._buffer.dtype:
            # copy_ would broadcast and convert silently.
            raise ValueError(
                f"inputs must be {tuple(self._buffer.shape[1:])} of {self._buffer.dtype}, "
                f"got {tuple(batch.shape[1:])} of {batch.dtype}"
            )
        answers = []
        with torch.no_grad():
            for piece in pieces(len(batch), self.buckets):
                self._buffer[: piece.rows].copy_(batch[piece.start : piece.stop])
                answers.append(tuple(output[: piece.rows].clone() for output in compute(piece.bucket)))
            return joined(answers)
