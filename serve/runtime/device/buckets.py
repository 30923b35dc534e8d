"""Batches of any size through an engine that is prepared for a few: split at the largest, padded up to the next.

What is compiled or captured for fixed shapes reads one input buffer that never moves. Nothing here knows a device.
"""

from __future__ import annotations

import bisect
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch

#: Where an execution names none.
DEFAULT_BUCKETS = (1, 2, 4, 8, 16, 32, 64)


@dataclass(frozen=True)
class Piece:
    """Rows ``start`` to ``stop`` of a batch, which run as a batch of ``bucket`` rows."""

    start: int
    stop: int
    bucket: int

    @property
    def rows(self) -> int:
        """How many rows of the batch it holds; the bucket's others are padding."""
        return self.stop - self.start


def pieces(count: int, buckets: Sequence[int]) -> Iterator[Piece]:
    """What a batch of ``count`` rows runs as, in order: full largest buckets, then the next that holds the rest.

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
    """The batch sizes to run before the first request: of an engine with buckets one of each, else 1, 2, 4 … ``most``.

    Args:
        buckets: ascending batch sizes that an engine is prepared for; none: any.
        most: images of the largest batch.
    """
    sizes = buckets or [1 << power for power in range(most.bit_length())]
    return [*(size for size in sizes if size < most), most]


class StaticBatches:
    """The input buffer of an engine with fixed batch sizes. Called by one thread at a time, on one stream.

    All buckets share one buffer: a bucket's input is its first rows, which lie together in either memory format.

    Args:
        buckets: ascending batch sizes.
        shape: ``(C, H, W)`` of one input.
        dtype: of the input.
        device: where the engine runs.
        memory_format: of the input, such as ``torch.channels_last``.
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
        # Not made in inference mode, whoever opens the engine: such a tensor can never be written outside of it.
        with torch.inference_mode(False):
            self._buffer = torch.zeros((self.buckets[-1], *shape), dtype=dtype, device=device)
            self._buffer = self._buffer.contiguous(memory_format=memory_format)

    def input(self, bucket: int) -> torch.Tensor:
        """The input of a bucket, ``(bucket, C, H, W)``; it stays where it is."""
        return self._buffer[:bucket]

    def run(self, batch: torch.Tensor, compute: Callable[[int], torch.Tensor]) -> torch.Tensor:
        """Logits ``(N, classes)`` of a batch ``(N, C, H, W)``, N >= 1.

        Args:
            batch: of the buffer's dtype and shape, on any device.
            compute: from a bucket to its logits ``(bucket, classes)``, reading the bucket's input; the next call may
                overwrite what it returned. Rows must not depend on each other, as those of a network in eval mode
                do not: the padding is whatever lay in the buffer.
        """
        if batch.shape[1:] != self._buffer.shape[1:] or batch.dtype != self._buffer.dtype:
            # copy_ would broadcast and convert without a word.
            raise ValueError(
                f"inputs must be {tuple(self._buffer.shape[1:])} of {self._buffer.dtype}, "
                f"got {tuple(batch.shape[1:])} of {batch.dtype}"
            )
        answers = []
        with torch.no_grad():
            for piece in pieces(len(batch), self.buckets):
                self._buffer[: piece.rows].copy_(batch[piece.start : piece.stop])
                answers.append(compute(piece.bucket)[: piece.rows].clone())
            return answers[0] if len(answers) == 1 else torch.cat(answers)
