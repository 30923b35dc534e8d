"""Images on their way to a device by a few slots of host memory: in order, and none overwritten before it is read."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from serve.runtime.device.transfer import Plain, Ring, open_transfer

CPU = torch.device("cpu")
SHAPE = (3, 4, 5)
on_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


def images(count: int, shape: Sequence[int] = SHAPE, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 256, (count, *shape), dtype=torch.uint8, generator=generator)


class Reader:
    """Slots whose reader is as slow as it may be: it has read one when, and not before, that is waited for."""

    def __init__(self) -> None:
        self.slots: list[torch.Tensor] = []
        self.marks: list[Mark] = []

    def allocate(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        tensor = torch.zeros(tuple(shape), dtype=dtype)
        if dtype == torch.uint8:
            self.slots.append(tensor)
        return tensor

    def mark(self) -> Mark:
        mark = Mark(self, len(self.marks))
        self.marks.append(mark)
        return mark


class Mark:
    def __init__(self, reader: Reader, number: int) -> None:
        self.reader, self.number = reader, number
        self.reading: torch.Tensor | None = None
        self.records = 0

    def record(self) -> None:
        self.records += 1
        if self.number < len(self.reader.slots):  # else that of the logits
            assert self.reading is None, "its last reading was not waited for"
            self.reading = self.reader.slots[self.number].clone()

    def synchronize(self) -> None:
        if self.reading is not None:
            assert torch.equal(self.reader.slots[self.number], self.reading), "overwritten before it was read"
            self.reading = None


@given(
    counts=st.lists(st.integers(1, 11), min_size=1, max_size=6),
    slots=st.integers(1, 3),
    rows=st.integers(1, 4),
    as_list=st.booleans(),
)
def test_no_slot_is_written_before_the_device_has_read_it(
    counts: list[int], slots: int, rows: int, as_list: bool
) -> None:
    reader = Reader()
    ring = Ring(CPU, SHAPE, allocate=reader.allocate, event=reader.mark, slots=slots, rows=rows)
    for number, count in enumerate(counts):
        sent = images(count, seed=number)
        found = ring.send([*sent] if as_list else sent)
        assert torch.equal(found, sent)
        assert found.data_ptr() not in {slot.data_ptr() for slot in reader.slots}
    assert [slot.shape for slot in reader.slots] == [(rows, *SHAPE)] * slots  # nothing else was pinned
    used = sum(-(-count // rows) for count in counts)
    records = [mark.records for mark in reader.marks[:slots]]
    assert sum(records) == used
    assert max(records) - min(records) <= 1, "they take turns"


def test_what_was_sent_may_be_changed_at_once() -> None:
    reader = Reader()
    ring = Ring(CPU, SHAPE, allocate=reader.allocate, event=reader.mark, slots=2, rows=2)
    sent = images(7)
    found = ring.send(sent)
    sent.zero_()
    assert torch.equal(found, images(7))


def test_logits_are_the_callers_own() -> None:
    reader = Reader()
    ring = Ring(CPU, SHAPE, allocate=reader.allocate, event=reader.mark, slots=1, rows=2)
    (first,) = ring.receive((torch.tensor([[1.0, 2.0]], dtype=torch.float16),))
    (second,) = ring.receive((torch.tensor([[3.0, 4.0]], dtype=torch.float16),))
    assert first.tolist() == [[1.0, 2.0]]
    assert second.tolist() == [[3.0, 4.0]]
    assert first.dtype == torch.float32
    assert reader.marks[-1].records == 2


def test_two_outputs_of_different_shapes_are_received_in_order() -> None:
    reader = Reader()
    ring = Ring(CPU, SHAPE, allocate=reader.allocate, event=reader.mark, slots=1, rows=2)
    logits, features = torch.randn(2, 5, dtype=torch.float16), torch.randint(0, 9**9, (2, 3, 4))
    for transfer in (ring, Plain(CPU)):
        found = transfer.receive((logits, features))
        assert [output.dtype for output in found] == [torch.float32, torch.int64]
        assert torch.equal(found[0], logits.float())
        assert torch.equal(found[1], features)
    assert reader.marks[-1].records == 1, "all are waited for at once"


@pytest.mark.parametrize("wrong", [images(2, (3, 4, 1)), images(2).float(), images(2, (1, 4, 5))])
def test_images_of_another_kind_are_not_converted_without_a_word(wrong: torch.Tensor) -> None:
    reader = Reader()
    ring = Ring(CPU, SHAPE, allocate=reader.allocate, event=reader.mark)
    with pytest.raises(ValueError, match=r"images must be \(3, 4, 5\) of torch.uint8"):
        ring.send(wrong)
    assert torch.equal(ring.send(images(2)), images(2))  # and the slot is free


@pytest.mark.parametrize("as_list", [True, False])
def test_on_the_cpu_nothing_is_pinned_and_nothing_copied(as_list: bool) -> None:
    transfer = open_transfer(CPU, SHAPE)
    assert isinstance(transfer, Plain)
    sent = images(3)
    assert torch.equal(transfer.send([*sent] if as_list else sent), sent)
    assert transfer.send(sent) is sent
    logits = torch.ones(2, 3)
    assert transfer.receive((logits,))[0] is logits


@pytest.mark.gpu
@on_gpu
def test_on_a_gpu_a_batch_is_whole_though_its_copies_wait() -> None:
    device = torch.device("cuda", 0)
    ring = open_transfer(device, (3, 224, 224))
    assert isinstance(ring, Ring)
    sent = [images(50, (3, 224, 224), seed) for seed in range(3)]
    sleep: Any = torch.cuda._sleep
    sleep(200_000_000)  # the stream is busy, so that copies wait while slots are wanted again
    found = [ring.send([*batch]) for batch in sent]
    for batch, there in zip(sent, found, strict=True):
        assert there.device == device
        assert torch.equal(there.cpu(), batch)
    mixed = ring.send([sent[0][0], found[1][1], sent[2][2]])
    assert torch.equal(mixed.cpu(), torch.stack([sent[0][0], sent[1][1], sent[2][2]]))


@pytest.mark.gpu
@on_gpu
def test_on_a_gpu_both_ways_lead_by_pinned_memory() -> None:
    device = torch.device("cuda", 0)
    ring: Any = open_transfer(device, SHAPE)
    assert all(slot.is_pinned() for slot, _ in ring._slots)
    logits = torch.randn(4, 10, device=device, dtype=torch.float16)
    (found,) = ring.receive((logits,))
    assert found.is_pinned()
    assert torch.equal(found, logits.float().cpu())
