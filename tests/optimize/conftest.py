"""A tiny network trained on the digits once, and its descendants, for all tests of passes and sessions."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from optimize.context import Context
from optimize.data.formats.base import open_data
from optimize.data.records import ImageData
from optimize.measure import process_pool
from optimize.models.model_names import resolve_model
from optimize.passes.base import find_pass
from optimize.run.session import Session
from optimize.store.artifact import Artifact
from optimize.store.objects import Store
from optimize.training.config import TrainingConfig
from tests.optimize.runs_fixtures import references, shared_folder
from tests.optimize.workbench import CPU, GREY16, TINY_NET

SHORT = TrainingConfig(epochs=3, batch_size=32, learning_rate=0.1, augment=False)


@pytest.fixture(scope="session", autouse=True)
def lock_of_these_tests(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """No test reads its times: it need not wait for whoever measures on this machine, nor make them wait."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(process_pool, "LOCK_FILE", tmp_path_factory.getbasetemp() / "measuring.lock")
        yield


@pytest.fixture(scope="module")
def uncompiled() -> Iterator[None]:
    """Leave out the reference that takes its time to compile."""
    with references():
        yield


@pytest.fixture(scope="session")
def digits() -> ImageData:
    return open_data("digits")


@pytest.fixture(scope="session")
def digits_context(digits) -> Context:
    return Context(digits, GREY16, CPU)


@pytest.fixture(scope="session")
def session(tmp_path_factory, digits_context) -> Session:
    """On a store that all processes of this session of pytest share: what one has made, none makes again."""
    store = Store(shared_folder(tmp_path_factory) / "session-store")
    return Session(store, resolve_model(f"{TINY_NET}:tiny"), digits_context)


@pytest.fixture(scope="session")
def trained(session) -> Artifact:
    """The tiny network, trained on the digits."""
    return session.baseline(SHORT).artifact


@pytest.fixture(scope="session")
def made(session, trained):
    """``made("ptq")``, ``made("fuse", "ptq")``: the artifact of passes in a row on `trained`, made once."""

    def make(*names: str, **config: object) -> Artifact:
        artifact = trained
        for name in names:
            settings = config if name == names[-1] else {}
            if name == "qat":
                settings = {"epochs": 2, "freeze_observers_at": 1, "images": 64, "augment": False, **settings}
            artifact = session.apply(artifact, find_pass(name).config(**settings)).artifact
        return artifact

    return make
