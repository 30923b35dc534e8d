"""Batches of any size through fixed buckets: what comes out is what the network gives, row for row."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from serve.runtime.device.buckets import DEFAULT_BUCKETS, StaticBatches, pieces
from serve.runtime.device.cuda_graphs import agree
from serve.runtime.outputs import Outputs
from tests.serve import artifacts

SHAPE = (3, 4, 5)

some_buckets = st.lists(st.integers(1, 40), min_size=1, max_size=6, unique=True).map(sorted)


@given(count=st.integers(1, 200), buckets=some_buckets)
def test_pieces_cover_a_batch_once_in_order_and_with_the_least_padding(count: int, buckets: list[int]) -> None:
    found = list(pieces(count, buckets))
    assert [row for piece in found for row in range(piece.start, piece.stop)] == list(range(count))
    assert all(piece.bucket == min(size for size in buckets if size >= piece.rows) for piece in found)
    assert all(piece.rows == max(buckets) for piece in found[:-1])


@pytest.mark.parametrize(("count", "buckets"), [(0, [1]), (1, [])])
def test_no_rows_or_no_buckets_are_a_mistake(count: int, buckets: list[int]) -> None:
    with pytest.raises(ValueError, match="at least one row and one bucket"):
        list(pieces(count, buckets))


class Replayed:
    """Stands where a CUDA graph does: reads the static input, and overwrites one static output on every replay."""

    def __init__(self, batches: StaticBatches, weights: torch.Tensor) -> None:
        self.batches, self.weights, self.sizes = batches, weights, list[int]()
        self.output = torch.full((batches.buckets[-1], weights.shape[1]), torch.nan)
        self.places = {size: batches.input(size).data_ptr() for size in batches.buckets}

    def __call__(self, bucket: int) -> Outputs:
        inputs = self.batches.input(bucket)
        assert inputs.shape == (bucket, *SHAPE)
        assert inputs.data_ptr() == self.places[bucket]
        self.sizes.append(bucket)
        self.output.fill_(torch.nan)
        self.output[:bucket] = inputs.flatten(1) @ self.weights
        return (self.output[:bucket],)


@given(
    counts=st.lists(st.integers(1, 100), min_size=1, max_size=4),
    buckets=some_buckets,
    last=st.booleans(),
    inference=st.booleans(),
)
def test_padded_and_split_batches_give_the_unpadded_answers(
    counts: list[int], buckets: list[int], last: bool, inference: bool
) -> None:
    generator = torch.Generator().manual_seed(sum(counts))
    weights = torch.randint(-3, 4, (60, 7), generator=generator).float()  # whole numbers: sums are exact
    memory_format = torch.channels_last if last else torch.contiguous_format
    with torch.inference_mode(inference):
        batches = StaticBatches(buckets, SHAPE, torch.float32, torch.device("cpu"), memory_format)
    replayed = Replayed(batches, weights)
    images = [torch.randint(-9, 10, (count, *SHAPE), generator=generator).float() for count in counts]
    with torch.inference_mode():
        found = [batches.run(batch, replayed) for batch in images]
    (again,) = batches.run(images[0], replayed)  # outside of inference mode, on the same buffer
    for batch, (logits,) in zip(images, found, strict=True):
        assert torch.equal(logits, batch.flatten(1) @ weights)
    assert torch.equal(again, found[0][0])
    assert set(replayed.sizes) <= set(buckets)


@pytest.mark.parametrize("memory_format", [torch.contiguous_format, torch.channels_last])
def test_every_bucket_lies_as_the_memory_format_says(memory_format: torch.memory_format) -> None:
    batches = StaticBatches((1, 3, 8), SHAPE, torch.float16, torch.device("cpu"), memory_format)
    for size in (1, 3, 8):
        assert batches.input(size).is_contiguous(memory_format=memory_format)


@pytest.mark.parametrize("wrong", [torch.zeros(2, 1, 1, 1), torch.zeros(2, *SHAPE, dtype=torch.float64)])
def test_inputs_of_another_shape_or_type_are_not_converted_without_a_word(wrong: torch.Tensor) -> None:
    batches = StaticBatches((4,), SHAPE, torch.float32, torch.device("cpu"))
    with pytest.raises(ValueError, match=r"inputs must be \(3, 4, 5\) of torch.float32"):
        batches.run(wrong, lambda bucket: (torch.zeros(bucket, 1),))


@pytest.mark.parametrize("count", [*range(1, 10), 64, 65, 130])
def test_a_network_answers_the_same_through_buckets(count: int) -> None:
    network = artifacts.small_network()
    batches = StaticBatches(DEFAULT_BUCKETS, (3, 32, 32), torch.float32, torch.device("cpu"))
    images = torch.randn(count, 3, 32, 32)
    with torch.no_grad():
        (found,) = batches.run(images, lambda bucket: (network(batches.input(bucket)),))
        torch.testing.assert_close(found, network(images), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("count", [1, 3, 4, 5, 9])
def test_two_outputs_of_different_shapes_are_padded_and_split_alike_and_stay_in_order(count: int) -> None:
    batches = StaticBatches((2, 4), SHAPE, torch.float32, torch.device("cpu"))
    static = (torch.empty(4, 5), torch.empty(4, 3, 4))

    def replay(bucket: int) -> Outputs:
        inputs, found = batches.input(bucket), tuple(output.fill_(torch.nan)[:bucket] for output in static)
        found[0].copy_(inputs[:, 0, 0])
        found[1].copy_(inputs[..., 1])
        return found

    images = torch.randn(count, *SHAPE)
    logits, features = batches.run(images, replay)
    assert torch.equal(logits, images[:, 0, 0])
    assert torch.equal(features, images[..., 1])


def test_logits_agree_only_where_both_are_finite_and_near() -> None:
    wanted = torch.tensor([[1.0, -4.0, 2.0]])
    assert agree((wanted + 0.07,), (wanted,))
    assert not agree((wanted + 0.09,), (wanted,))
    assert agree((wanted + 0.09,), (wanted,), 0.05)
    assert not agree((torch.tensor([[1.0, -4.0, torch.nan]]),), (wanted,))
    assert not agree((wanted,), (torch.tensor([[1.0, -4.0, torch.inf]]),))
    assert agree((torch.tensor([[1.0, -torch.inf]]),), (torch.tensor([[1.0, -torch.inf]]),))
    assert not agree((wanted[:, :2],), (wanted,))
    assert not agree((torch.zeros(1, 3),), (wanted,))


def test_each_of_several_outputs_must_agree_by_its_own_largest_number() -> None:
    wanted = (torch.tensor([[100.0, -400.0]]), torch.tensor([[[1.0], [-4.0]]]))
    assert agree((wanted[0] + 7, wanted[1] + 0.07), wanted)
    assert not agree((wanted[0], wanted[1] + 0.09), wanted)
    assert not agree((wanted[0] + 9, wanted[1]), wanted)
    assert not agree(wanted[:1], wanted)
    assert not agree(wanted, wanted[:1])
    assert not agree(wanted[::-1], wanted)
