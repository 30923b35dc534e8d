"""TorchServe's own classes with ours in their places, in a Java of their own: no server, no worker."""

from __future__ import annotations

import subprocess
from collections.abc import Sequence
from pathlib import Path

from serve.torchserve.java import java_executable
from serve.torchserve.launcher import GROOVY, launcher, torchserve_jar

SCRIPT = Path(__file__).parents[1] / "frontend" / "TakeBatches.groovy"


def batches(folder: Path, size: int, *queues: Sequence[str]) -> list[list[list[int]]]:
    """Of each queue, which of its requests each batch holds, where each of them is slow to be taken."""
    java = java_executable()
    words = [f"-Dmodel_server_home={torchserve_jar().parents[2]}"]
    words += ["-cp", f"{torchserve_jar()}:{launcher(java).classes}", GROOVY, str(SCRIPT)]
    words += [str(folder), str(size), *(",".join(commands) for commands in queues)]
    ended = subprocess.run([str(java), *words], cwd=folder, check=True, capture_output=True, text=True, timeout=120)
    lines = [line.removeprefix("taken: ") for line in ended.stdout.splitlines() if line.startswith("taken: ")]
    return [[list(map(int, batch.split())) for batch in line.split(", ")] for line in lines]


def test_a_thread_that_is_kept_from_its_core_takes_as_many_requests_as_another(tmp_path: Path) -> None:
    waiting = [16, 23, 15, 41]
    taken = batches(tmp_path, 16, *(["PREDICT"] * count for count in waiting))
    assert [list(map(len, each)) for each in taken] == [[16], [16, 7], [8, 7], [16, 16, 8, 1]]
    for count, each in zip(waiting, taken, strict=True):
        assert [request for batch in each for request in batch] == list(range(count)), "once each, and in order"


def test_a_question_for_the_model_itself_is_a_batch_of_its_own(tmp_path: Path) -> None:
    commands = ["PREDICT", "PREDICT", "DESCRIBE", "PREDICT", "DESCRIBE", "PREDICT", "PREDICT"]
    assert batches(tmp_path, 16, commands) == [[[0, 1], [2], [3], [4], [5, 6]]]
