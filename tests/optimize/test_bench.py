"""Measurements and the store: what is taken from it, and what must not be."""

from __future__ import annotations

import dataclasses
import io
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

import numpy as np
import pytest
import torch
from PIL import Image

from optimize.context import Context
from optimize.data.records import ImageData
from optimize.measure.bench import Bench
from optimize.measure.timing import Timing
from optimize.models.checkpoint import Checkpoint
from optimize.models.resolve import resolve_model
from optimize.passes.fuse import Fuse
from optimize.run.session import Session
from optimize.store.artifact import Artifact
from optimize.store.objects import Store
from serve.runtime.card import Preprocessing

from .workbench import CPU, TINY_NET

QUICK = Timing(rounds=1, batch_sizes=(1, 2), seconds=0.001, minimum=1, warm_up=0)


@pytest.fixture
def weights(trained: Artifact) -> Checkpoint:
    return Checkpoint(trained.module().state_dict(), "c" * 64)


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store(tmp_path / "store")


def users_model(folder: Path, mean: float, std: float) -> str:
    """The tiny network in a file of the user's own, with the preprocessing that the user declares."""
    path = folder / "net.py"
    declared = f'PREPROCESSING = {{"resize": 16, "crop": [16, 16], "mean": [{mean}], "std": [{std}]}}\n'
    path.write_text(TINY_NET.read_text() + declared)
    return f"{path}:tiny"


def true_top1(artifact: Artifact, data: ImageData, mean: float, std: float) -> float:
    """Top-1 of the eager module on images that numpy normalised."""
    pixels = np.stack([np.asarray(Image.open(io.BytesIO(source)).resize((16, 16), 2)) for source in data.val.sources])
    inputs = (pixels.astype(np.float32)[:, None] / 255 - np.float32(mean)) / np.float32(std)
    with torch.no_grad():
        predicted = artifact.module()(torch.from_numpy(inputs)).argmax(dim=1)
    return float((predicted == data.val.labels).float().mean())


def test_a_changed_preprocessing_of_the_same_weights_has_its_own_accuracy(
    tmp_path: Path, digits: ImageData, weights: Checkpoint, store: Store
) -> None:
    found = {}
    for mean, std in ((0.5, 0.25), (0.9, 2.0)):
        source = resolve_model(users_model(tmp_path, mean, std))
        assert source.preprocessing is not None
        context = Context(digits, source.preprocessing, CPU)
        artifact = Session(store, source, context).baseline(checkpoint=weights).artifact
        found[mean] = (
            Bench(store, context).answers(artifact).value.top1,
            true_top1(artifact, digits, mean, std),
            artifact.card.content,
        )
    (good, truly_good, content), (bad, truly_bad, same_content) = found.values()
    assert content == same_content  # it is the preprocessing alone that tells the two apart
    assert truly_good > truly_bad + 0.1
    assert good == pytest.approx(truly_good, abs=0.01)
    assert bad == pytest.approx(truly_bad, abs=0.01)


def with_preprocessing(context: Context, artifact: Artifact) -> tuple[Context, Artifact]:
    other = dataclasses.replace(context.preprocessing, mean=(0.4,))
    return (
        dataclasses.replace(context, preprocessing=other),
        dataclasses.replace(artifact, card=dataclasses.replace(artifact.card, preprocessing=other)),
    )


def with_input_size(context: Context, artifact: Artifact) -> tuple[Context, Artifact]:
    other = Preprocessing(20, (20, 20), context.preprocessing.mean, context.preprocessing.std)
    return (
        dataclasses.replace(context, preprocessing=other),
        dataclasses.replace(artifact, card=dataclasses.replace(artifact.card, preprocessing=other)),
    )


def with_card(**changes: object) -> Callable[[Context, Artifact], tuple[Context, Artifact]]:
    return lambda context, artifact: (
        context,
        dataclasses.replace(artifact, card=dataclasses.replace(artifact.card, **changes)),  # type: ignore[arg-type]
    )


def with_threads(context: Context, artifact: Artifact) -> tuple[Context, Artifact]:
    torch.set_num_threads(torch.get_num_threads() + 1)
    return context, artifact


MATTERS = {
    "preprocessing": with_preprocessing,
    "input size": with_input_size,
    "classes": with_card(classes=tuple("abcdefghij")),
    "precision (it selects the kernels)": with_card(precision="int8"),
    "threads": with_threads,
}


def keys(store: Store, context: Context, artifact: Artifact) -> dict[str, str]:
    """The key that each kind of measurement is kept by; nothing is measured."""
    asked: list[str] = []

    class AskedError(Exception):
        pass

    class Asking(Bench):
        def _obtain(self, key: str, build: object, read: object) -> NoReturn:
            asked.append(key)
            raise AskedError

    bench = Asking(store, context)
    for ask in (
        lambda: bench.answers(artifact),
        lambda: bench.footprint(artifact, 4, bench.footprint_meter()),
        lambda: bench.speed([artifact], QUICK),
    ):
        with pytest.raises(AskedError):
            ask()
    return dict(zip(("answers", "footprint", "speed"), asked, strict=True))


@pytest.mark.parametrize("change", MATTERS)
def test_what_a_measurement_depends_on_is_in_its_key(
    change: str, store: Store, trained: Artifact, digits_context: Context
) -> None:
    before = keys(store, digits_context, trained)
    threads = torch.get_num_threads()
    try:
        after = keys(store, *MATTERS[change](digits_context, trained))
    finally:
        torch.set_num_threads(threads)
    assert before.keys() == after.keys() == {"answers", "footprint", "speed"}
    assert not set(before.values()) & set(after.values())


def test_a_measurement_is_taken_from_the_store_where_nothing_changed(
    store: Store, trained: Artifact, session: Session, digits_context: Context
) -> None:
    assert keys(store, digits_context, trained) == keys(store, digits_context, trained)
    fused = session.apply(trained, Fuse()).artifact
    assert keys(store, digits_context, trained)["answers"] != keys(store, digits_context, fused)["answers"]
    first, second = (Bench(store, digits_context).speed([trained], QUICK) for _ in range(2))
    assert (first.cached, second.cached) == (False, True)
    assert first.value.speeds == second.value.speeds
    assert (first.key, first.seconds) == (second.key, second.seconds)
