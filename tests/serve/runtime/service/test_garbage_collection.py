"""What the garbage collector still looks at in a process that serves."""

from __future__ import annotations

import asyncio
import gc
import weakref
from collections.abc import Iterator
from pathlib import Path

import pytest

from serve.archive.verification import Policy
from serve.asgi.http.served_models import Models
from serve.asgi.process.model_updates import ModelUpdates
from serve.asgi.process.serving_plan import Wanted
from serve.runtime.service.garbage_collection import freeze_heap
from serve.runtime.service.predictor import Predictor
from serve.torchserve.archive_builder import build_archive
from serve.torchserve.handler import ImageClassifierHandler
from tests.serve import artifacts
from tests.serve.torchserve.test_handler import context_of


@pytest.fixture(autouse=True)
def thawed() -> Iterator[None]:
    gc.unfreeze()
    yield
    gc.unfreeze()


class Node:
    """An object that holds itself."""

    def __init__(self) -> None:
        self.itself = self


def test_what_lives_is_passed_over_and_is_freed_all_the_same_once_it_was_closed() -> None:
    node = Node()
    freeze_heap()
    assert gc.get_freeze_count() > 10_000
    assert not any(entry is node for entry in gc.get_objects())
    gone = weakref.ref(node)
    del node
    gc.collect()
    assert gone() is not None, "it is looked at by the next call only"
    freeze_heap()
    assert gone() is None


def test_both_servers_pass_over_what_lives_when_a_model_is_ready_and_a_replaced_one_is_freed(tmp_path: Path) -> None:
    first, second = (
        build_archive(artifacts.torchscript(tmp_path / name / "script"), tmp_path / f"{name}.mar", model_name=name)
        for name in ("first", "second")
    )
    models = Models()

    async def change() -> tuple[int, weakref.ref[Predictor]]:
        changing = ModelUpdates(
            models,
            gpu=None,
            queue=None,
            policy=Policy(),
            drain_s=5,
            on_loaded=lambda served, seconds: None,
            on_left_out=lambda wanted, error: None,
        )
        await changing.change([Wanted("tiny", "1.0", first)])
        frozen, replaced = gc.get_freeze_count(), weakref.ref(next(iter(models)).predictor)
        await changing.change([Wanted("tiny", "2.0", second)])
        await changing.end()
        return frozen, replaced

    frozen, replaced = asyncio.run(change())
    assert frozen > 10_000
    assert replaced() is None

    gc.unfreeze()
    handler = ImageClassifierHandler()
    handler.initialize(context_of(tmp_path / "first" / "script", tmp_path, None))
    assert gc.get_freeze_count() > 10_000
