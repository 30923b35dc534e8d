"""A pass, an engine and a task from outside, each in one file: the very ones that CONTRIBUTING.md shows."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import zipfile
from importlib import metadata
from pathlib import Path

import pytest
import torch
import yaml
from PIL import Image
from safetensors.torch import load_file

from tests.optimize.runs_fixtures import LEAN, ONE_THREAD, UNCOMPILED
from tests.programs import Programs
from tests.serve import artifacts

ROOT = Path(__file__).parents[1]


def code_of(title: str, page: str = "CONTRIBUTING.md") -> str:
    """The first Python block below a heading of a page."""
    text = (ROOT / page).read_text(encoding="utf-8")
    match = re.search(rf"^## {title}$.*?^```python\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    assert match is not None
    return match[1]


def install(folder: Path, module: str, group: str, code: str) -> dict[str, str]:
    """A distribution of one module, as pip would leave it; returns the environment in which it is installed."""
    (folder / f"{module}.py").write_text(code, encoding="utf-8")
    info = folder / f"{module}-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {module}\nVersion: 1.0\n", encoding="utf-8")
    (info / "entry_points.txt").write_text(f"[{group}]\n{module} = {module}\n", encoding="utf-8")
    return {**os.environ, **UNCOMPILED, **ONE_THREAD, "PYTHONPATH": os.pathsep.join([str(folder), str(ROOT)])}


def said(ended: subprocess.CompletedProcess[str], code: int = 0) -> str:
    assert ended.returncode == code, ended.stderr
    return ended.stdout + ended.stderr


def run(environment: dict[str, str], *words: object, cwd: Path = ROOT) -> str:
    """What a process says that begins cold."""
    command = [sys.executable, *map(str, words)]
    return said(subprocess.run(command, env=environment, cwd=cwd, capture_output=True, text=True, check=False))


@pytest.mark.slow
def test_a_foreign_pass_is_listed_run_and_followed_by_others(tmp_path: Path, programs: Programs) -> None:
    there = install(tmp_path, "snap_pass", "optimize.passes", code_of("How to add a pass"))
    assert "snap: round weights to multiples of a step" in run(there, "-m", "optimize", "passes")
    stages = [{"pass": "fuse"}, {"pass": "snap", "config": {"step": 0.125}}, {"pass": "ptq", "config": {"images": 32}}]
    measure = {"rounds": 1, "batch_sizes": [1], "seconds": 0.005}
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(yaml.safe_dump({"baseline": {"epochs": 1}, "stages": stages, "measure": measure}))
    model, store = f"{ROOT / 'examples' / 'tiny_cnn.py'}:tiny", tmp_path / "store"
    words = ("-c", LEAN, "run", model, "--recipe", recipe, "--store", store, "--device", "cpu", "--name", "snapped")
    said(programs.run(*words, environment=there))
    weights = load_file(store / "snapped" / "artifacts" / "snap" / "weights.safetensors")
    assert weights
    for name, tensor in weights.items():
        assert torch.equal(tensor, (tensor * 8).round() / 8), name
    assert "from the cache" in said(programs.run(*words, environment=there))
    # Another source of the pass is another pass, and so are its children.
    module = tmp_path / "snap_pass.py"
    module.write_text(module.read_text().replace(".round()", ".floor()"))
    lines = said(programs.run(*words, environment=there)).splitlines()
    assert [line.split()[1] for line in lines if re.match(r"  \+ (fuse|snap|ptq) .* from the cache", line)] == ["fuse"]


def test_a_foreign_pass_that_does_not_import_is_named_in_one_line(tmp_path: Path, programs: Programs) -> None:
    there = install(tmp_path, "broken_pass", "optimize.passes", "import nothing_of_this_name\n")
    complaint = said(programs.run("-m", "optimize", "passes", environment=there), 2).splitlines()[-1]
    assert complaint.startswith("error: the pass 'broken_pass' of broken_pass cannot be imported: ModuleNotFoundError")


def test_a_pass_that_yields_modules_and_cannot_rebuild_them_is_refused_when_it_registers(
    tmp_path: Path, programs: Programs
) -> None:
    code = code_of("How to add a pass").replace("        rebuild=lambda module, example: module,\n", "")
    there = install(tmp_path, "half_pass", "optimize.passes", code)
    complaint = said(programs.run("-m", "optimize", "passes", environment=there), 2)
    assert "'snap' yields modules: it must define how to rebuild one" in complaint


ECHO_ARTIFACT = """
import json, sys
from pathlib import Path
from optimize.measure.machine import versions
from serve.runtime.card.card import Card, Preprocessing, sha256_file, write_card
from serve.torchserve.archive_builder import build_archive

folder = Path(sys.argv[1])
folder.mkdir()
(folder / "model.txt").write_text("0.5 2.5 1.5")
files = {"model.txt": sha256_file(folder / "model.txt")}
card = Card(name="echo", model="echo", task="classification", format="echo", file="model.txt", precision="float32",
            input_dtype="float32", device="any", preprocessing=Preprocessing(8, (8, 8)), classes=("a", "b", "c"),
            files=files)
write_card(folder, card)
build_archive(folder, folder.parent / "echo.mar", model_name="echo")
print(json.dumps(versions()))
"""

OPEN_UNPACKED = """
import io, sys
sys.path[:0] = [sys.argv[1]]
from pathlib import Path
from PIL import Image
from serve.runtime.service.predictor import Predictor
import serve
assert serve.__file__.startswith(sys.argv[1]), serve.__file__
stream = io.BytesIO()
Image.new("RGB", (8, 8)).save(stream, "PNG")
predictor = Predictor(Path(sys.argv[1]))
print(predictor.engine.provider, *(label.label for label in predictor.predict([stream.getvalue()], 3)[0]))
"""


def test_a_foreign_engine_travels_in_the_archives_of_what_it_opens(tmp_path: Path, programs: Programs) -> None:
    code = code_of("How to add an engine").replace('formats=("echo",)', 'formats=("echo",), libraries=("safetensors",)')
    there = install(tmp_path, "echo_engine", "serve.engines", code)
    told = said(programs.run("-c", ECHO_ARTIFACT, tmp_path / "artifact", environment=there))
    versions = json.loads(told.splitlines()[-1])
    assert versions["safetensors"] == metadata.version("safetensors")
    with zipfile.ZipFile(tmp_path / "echo.mar") as archive:
        archive.extractall(tmp_path / "unpacked")
    elsewhere = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    # Neither the engine's distribution nor this project: only what was packed.
    assert run(elsewhere, "-c", OPEN_UNPACKED, tmp_path / "unpacked", cwd=tmp_path / "unpacked").split() == [
        "echo/cpu",
        "b",
        "c",
        "a",
    ]
    # And where the distribution is installed as well, what was packed is what runs.
    assert "echo/cpu b c a" in run(there, "-c", OPEN_UNPACKED, tmp_path / "unpacked", cwd=tmp_path / "unpacked")


def test_a_format_that_no_engine_opens_is_named_with_those_that_are_opened(tmp_path: Path, programs: Programs) -> None:
    complaint = said(programs.run("-c", ECHO_ARTIFACT, tmp_path / "artifact"), 1).splitlines()[-1]
    assert (
        "no installed engine opens 'echo' files; there are engines for exported_program, onnx, openvino, torchscript"
        in complaint
    )


LEVEL_ARCHIVE = """
import sys
from pathlib import Path
import torch
from serve.runtime.card.card import Card, Preprocessing, sha256_file, write_card
from serve.runtime.card.known_answer import KnownAnswer
from serve.runtime.service.predictor import Predictor
from serve.torchserve.archive_builder import build_archive

class Mean(torch.nn.Module):
    def forward(self, x):
        return x.mean((1, 2, 3))[:, None]

folder = Path(sys.argv[1])
folder.mkdir()
torch.jit.trace(Mean(), torch.zeros(1, 3, 8, 8)).save(str(folder / "model.pt"))
files = {"model.pt": sha256_file(folder / "model.pt")}
plain = Preprocessing(8, (8, 8), (0.0,) * 3, (1.0,) * 3)
write_card(folder, Card(name="mean", model="mean", task="level", format="torchscript", file="model.pt",
                        precision="float32", input_dtype="float32", device="any", preprocessing=plain, classes=(),
                        files=files))
predictor = Predictor(folder)
image = Path(sys.argv[2]).read_bytes()
(level,) = predictor.predict([image])
known = KnownAnswer(image, "level", predictor.execution_name, {"level": level})
(folder / "known.json").write_text(known.text)
build_archive(folder, folder.parent / "mean.mar", model_name="mean")
"""

SERVE_UNPACKED = """
import sys
sys.path[:0] = [sys.argv[1]]
from pathlib import Path
from serve.runtime.card.known_answer import read_known
from serve.runtime.service.protocol import answer, parse
from serve.runtime.service.self_check import check_known
from serve.runtime.service.service import open_service
import serve
assert serve.__file__.startswith(sys.argv[1]), serve.__file__
folder = Path(sys.argv[1])
with open_service(folder, None) as service:
    print(check_known(service, read_known(folder), folder))
    task = service.predictor.task
    request = parse({"body": Path(sys.argv[2]).read_bytes()}, task, service.serving, says_json=False, request_type="")
    status, body, _ = answer(task, request, service.submit(request).result(60).outcomes)
    print(status, body.decode())
"""


def test_a_foreign_task_travels_in_the_archives_of_its_networks(tmp_path: Path, programs: Programs) -> None:
    there = install(tmp_path, "level_task", "serve.tasks", code_of("How to add a task", "docs/guides/extend.md"))
    Image.new("RGB", (9, 12), (51, 102, 153)).save(tmp_path / "image.png")
    said(programs.run("-c", LEVEL_ARCHIVE, tmp_path / "artifact", tmp_path / "image.png", environment=there))
    with zipfile.ZipFile(tmp_path / "mean.mar") as archive:
        packed = [name for name in archive.namelist() if name.startswith("serve/runtime/tasks/")]
        archive.extractall(tmp_path / "unpacked")
    assert sorted(packed) == [f"serve/runtime/tasks/{name}.py" for name in ("__init__", "base", "level_task")]
    elsewhere = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    words = ("-c", SERVE_UNPACKED, tmp_path / "unpacked", tmp_path / "image.png")
    checked, answered = run(elsewhere, *words, cwd=tmp_path / "unpacked").splitlines()[:2]
    assert checked == "the answer to the known image matches the one of torchscript: its level is within 0.05"
    status, body = answered.split(maxsplit=1)
    assert (status, json.loads(body)) == ("200", {"level": pytest.approx(0.4, abs=1e-6)})


def test_a_task_that_is_not_there_is_named_with_those_that_are(tmp_path: Path, programs: Programs) -> None:
    Image.new("RGB", (9, 12)).save(tmp_path / "image.png")
    complaint = said(programs.run("-c", LEVEL_ARCHIVE, tmp_path / "artifact", tmp_path / "image.png"), 1)
    assert "unknown task 'level'; known: " in complaint.splitlines()[-1]
    assert "classification" in complaint.splitlines()[-1]


def test_a_foreign_export_target_is_found(tmp_path: Path, programs: Programs) -> None:
    there = install(
        tmp_path, "notes_target", "serve.exports", code_of("How to add an export target", "docs/guides/extend.md")
    )
    artifacts.torchscript(tmp_path / "store" / "small" / "artifacts" / "script")
    words = ("-m", "serve", "export", "small", "--store", tmp_path / "store", "--to", "notes")
    assert "read it: " in said(programs.run(*words, environment=there))
    written = tmp_path / "store" / "small" / "export" / "notes" / "notes.txt"
    assert written.read_text(encoding="utf-8") == "small-script: float32\n"
