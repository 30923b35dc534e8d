"""An archive that was packed before the runtime had rooms: it opens, it answers alike, and by its own packed code."""

from __future__ import annotations

import json
import re
import zipfile
from pathlib import Path

import pytest

from serve.archive.archive_file import check_archive
from serve.archive.signature import SignatureError
from serve.archive.verification import Policy, verified_copy
from serve.asgi.process.model_loader import load
from serve.asgi.process.serving_plan import Wanted
from serve.runtime.service.predictor import Predictor
from serve.torchserve.archive_builder import build_archive, foreign_parts
from tests.programs import Programs
from tests.serve import artifacts
from tests.serve.archive.test_signature import forged

#: The runtime's rooms whose files lay beside each other then.
ROOMS = "card|device|images|model_files|service"
IMAGE = artifacts.jpeg(1)

#: As TorchServe starts a worker where this project is installed: another runtime is found first, and is loaded already.
SERVE_UNPACKED = """
import json, sys
from types import SimpleNamespace
import serve.runtime.service.predictor
folder = sys.argv[1]
sys.path.append(folder)
import handler
served = handler.ImageClassifierHandler()
served.initialize(SimpleNamespace(system_properties={"model_dir": folder, "gpu_id": None}, metrics=None))
labels = served._opened().predictor.predict([open(sys.argv[2], "rb").read()], 5)[0]
homes = {name: module.__file__ for name, module in sys.modules.items() if name.partition(".")[0] == "serve"}
print(json.dumps({"homes": homes, "answer": {label.label: label.probability for label in labels}}))
"""


def without_rooms(files: dict[str, bytes]) -> dict[str, bytes]:
    """An archive's files with the runtime's modules beside each other, and found there by those that import them."""
    flat = {}
    for name, content in files.items():
        if re.fullmatch(rf"serve/runtime/({ROOMS})/__init__\.py", name):
            continue
        moved = re.sub(rf"^serve/runtime/({ROOMS})/", "serve/runtime/", name)
        flat[moved] = content
        if name.endswith(".py"):
            text = content.decode()
            text = re.sub(rf"\bserve\.runtime\.({ROOMS})\.", "serve.runtime.", text)
            text = re.sub(rf"^(\s*from \.\.)({ROOMS})\.", r"\1", text, flags=re.MULTILINE)
            if moved != name:
                text = re.sub(r"^(\s*from \.)\.", r"\1", text, flags=re.MULTILINE)
            flat[moved] = text.encode()
    return flat


@pytest.fixture(scope="module")
def older(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """An artifact's folder, and its archive as it was packed then."""
    root = tmp_path_factory.mktemp("older")
    folder = artifacts.torchscript(root / "artifact")
    archive = build_archive(folder, root / "tiny.mar", model_name="tiny")
    forged(archive, without_rooms)
    return folder, archive


def test_its_card_vouches_for_its_own_runtime(older: tuple[Path, Path]) -> None:
    packed = check_archive(older[1]).packed
    assert {"serve/runtime/predictor.py", "serve/runtime/service.py", "serve/runtime/engines/base.py"} <= packed.keys()
    assert not [name for name in packed if re.match(rf"serve/runtime/({ROOMS})/", name)]


def test_our_own_server_opens_it_and_answers_as_the_artifact_does(older: tuple[Path, Path]) -> None:
    folder, archive = older
    served = load(Wanted("tiny", "1.0", archive), gpu=None, queue=None, policy=Policy())
    try:
        assert served.predictor.predict([IMAGE], 5) == Predictor(folder).predict([IMAGE], 5)
    finally:
        served.service.close()


def test_its_handler_runs_the_runtime_that_lies_beside_it_though_another_is_loaded(
    older: tuple[Path, Path], programs: Programs, tmp_path: Path
) -> None:
    folder, archive = older
    with zipfile.ZipFile(archive) as packed:
        packed.extractall(tmp_path / "x")
    (tmp_path / "image.jpg").write_bytes(IMAGE)
    ended = programs.run("-c", SERVE_UNPACKED, tmp_path / "x", tmp_path / "image.jpg")
    assert ended.returncode == 0, ended.stderr
    told = json.loads(ended.stdout.splitlines()[-1])
    assert "serve.runtime.predictor" in told["homes"]
    assert all(home.startswith(str(tmp_path / "x")) for home in told["homes"].values())
    (expected,) = Predictor(folder).predict([IMAGE], 5)
    assert isinstance(expected, list)
    assert told["answer"] == pytest.approx({label.label: label.probability for label in expected}, abs=1e-5)


def test_torchserve_is_given_it_only_where_its_code_is_allowed(older: tuple[Path, Path], tmp_path: Path) -> None:
    _, archive = older
    private = tmp_path / "private"
    private.mkdir(mode=0o700)
    with pytest.raises(SignatureError, match="pack it again"):
        verified_copy(archive, Policy(), private, foreign=foreign_parts)
    copy = verified_copy(archive, Policy(foreign_code=True), private, foreign=foreign_parts)
    assert copy.read_bytes() == archive.read_bytes()
