"""A run's own archives behind the real TorchServe: every kind answers as its artifact does in process."""

from __future__ import annotations

import pytest

from optimize.data.formats.base import open_data
from serve.runtime.predictor import Predictor
from serve.torchserve import server
from tests.serve.artifacts import jpeg
from tests.serve.conftest import free_ports

from .runs_fixtures import TinyRun, tiny_run

__all__ = ["tiny_run"]  # fixture
pytestmark = pytest.mark.slow

#: One of each kind of file that the default recipe makes; bfloat16 only where the CPU has it.
KINDS = ("fuse", "half-bf16", "dynamic", "ptq", "onnx", "onnx-half", "onnx-int8")


def test_served_answers_equal_those_of_the_artifacts_in_process(tiny_run: TinyRun) -> None:
    kinds = [name for name in KINDS if tiny_run.row(name).measured]
    assert set(kinds) >= set(KINDS) - {"half-bf16"}
    archives = {f"tiny-{name}": tiny_run.folder / "archives" / f"tiny-{name}.mar" for name in kinds}
    images = [source for source in open_data("digits").val.sources[:3] if isinstance(source, bytes)]
    images += [jpeg(1), (tiny_run.folder / "sample.png").read_bytes()]
    running = server.start(tiny_run.store, "tiny", archives, ports=free_ports(), deadline_s=300)
    try:
        with running.client(tiny_run.store) as client:
            for name in kinds:
                predictor = Predictor(tiny_run.folder / "artifacts" / name)
                for image in images:
                    # One at a time, as it is sent: dynamic quantization takes its scale from the batch.
                    (labels,) = predictor.predict([image], k=10)
                    assert isinstance(labels, list)
                    answer = client.predict(f"tiny-{name}", image, k=10)
                    assert answer[0]["index"] == labels[0].index
                    served = {entry["index"]: entry["probability"] for entry in answer}
                    assert served == pytest.approx({label.index: label.probability for label in labels}, abs=1e-4)
    finally:
        server.stop(tiny_run.store)
