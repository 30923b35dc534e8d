"""AOTInductor on the CPU, with this machine's compiler: what it compiles answers as the program does."""

from __future__ import annotations

import os
import shutil
import subprocess
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from serve.runtime.card.card import load_card
from serve.runtime.card.execution import Execution
from serve.runtime.engines.base import Engine, executions_for, open_engine, unavailable
from serve.runtime.engines.inductor import INDUCTOR, compile_program
from serve.runtime.errors import EngineError
from serve.runtime.model_files.isolated_run import run_isolated
from serve.runtime.model_files.program_file import load_program
from tests.serve import artifacts

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(shutil.which("g++") is None, reason="AOTInductor needs a C++ compiler"),
]


@pytest.fixture(scope="module", autouse=True)
def cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A cache of the module's own: the user's may hold what another version of the test compiled.

    What calls the kernels is compiled without optimising, and nothing with the numbers of its lines, which takes the
    compiler less time; the kernels are compiled as ever.
    Headers are looked for changes once: torch 2.14 preprocesses them twice for each package.
    """
    from torch._inductor import codecache, config

    precompile, precompiled = codecache._precompile_header, dict[str, str]()

    def once(*header: str, **options: object) -> str:
        asked = repr((header, sorted(options.items())))
        if asked not in precompiled:
            precompiled[asked] = precompile(*header, **options)
        return precompiled[asked]

    hurried = config.patch(
        {"aot_inductor.compile_wrapper_opt_level": "O0", "aot_inductor.enable_line_tables": False},
    )
    with pytest.MonkeyPatch.context() as patch, hurried:
        folder = tmp_path_factory.mktemp("cache")
        patch.setenv("XDG_CACHE_HOME", str(folder))
        patch.setattr(codecache, "_precompile_header", once)
        yield folder


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return artifacts.exported(tmp_path_factory.mktemp("artifact") / "exported")


def opened(folder: Path, *buckets: int) -> Engine:
    return open_engine(folder, load_card(folder), Execution("inductor", "cpu", buckets=buckets))


def check(engine: Engine, folder: Path, counts: tuple[int, ...]) -> None:
    program = load_program(folder / "model.pt2").module()
    for count in counts:
        batch = torch.randn(count, 3, 32, 32)
        with torch.inference_mode():
            torch.testing.assert_close(engine.run(batch), (program(batch),), rtol=1e-4, atol=1e-4)


def test_one_package_serves_every_batch_and_is_compiled_once(folder: Path, cache: Path) -> None:
    before = os.environ.get("TORCHINDUCTOR_CACHE_DIR")
    engine = opened(folder)
    check(engine, folder, (1, 2, 3, 8, 17))
    assert engine.provider == "aotinductor/cpu"
    packages = list((cache / "optimize-and-serve-compiled" / "inductor").glob("*/model.pt2"))
    assert len(packages) == 1
    written = packages[0].stat().st_mtime_ns
    check(opened(folder), folder, (2,))
    assert packages[0].stat().st_mtime_ns == written
    assert {path.name for path in folder.iterdir()} == {"model.pt2", "card.json"}
    assert any(
        (cache / "optimize-and-serve-compiled" / "inductor-work").glob("*/*/*.cpp")
    )  # and not in the machine's /tmp
    assert os.environ.get("TORCHINDUCTOR_CACHE_DIR") == before


def test_channels_last_inputs_are_not_taken_for_contiguous_ones(folder: Path) -> None:
    engine, batch = opened(folder), torch.randn(2, 3, 32, 32)
    with torch.inference_mode():
        (found,), (wanted,) = engine.run(batch.contiguous(memory_format=torch.channels_last)), engine.run(batch)
        assert torch.equal(found, wanted)


def test_inputs_of_another_shape_or_type_are_refused(folder: Path) -> None:
    engine = opened(folder)
    for wrong in (torch.zeros(1, 3, 16, 16), torch.zeros(1, 3, 32, 32, dtype=torch.float64)):
        with pytest.raises(ValueError, match="inputs must be"):
            engine.run(wrong)


def test_with_buckets_batches_are_padded_and_split(folder: Path) -> None:
    check(opened(folder, 1, 4), folder, (1, 2, 3, 4, 5, 9))


def test_a_changed_package_is_compiled_again(folder: Path, cache: Path) -> None:
    opened(folder)
    (package,) = (
        path
        for path in (cache / "optimize-and-serve-compiled").glob("inductor/*/model.pt2")
        if bucket_of(path) == '"bucket":0'
    )
    package.write_bytes(b"what somebody else put there")
    check(opened(folder), folder, (2,))


def bucket_of(package: Path) -> str:
    return next(part for part in package.with_name("key.json").read_text().split(",") if "bucket" in part).strip("{}\n")


class Noisy(torch.nn.Module):
    """Answers something else on every call, so that nothing that is compiled can agree with it."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.flatten(1)[:, :5] + torch.randn_like(x.flatten(1)[:, :5])


def test_a_network_whose_compiled_code_answers_otherwise_is_not_kept(tmp_path: Path) -> None:
    example = torch.randn(2, 3, 8, 8)
    program = torch.export.export(Noisy().eval(), (example,))
    with pytest.raises(EngineError, match="gives other outputs than the program itself at batch 2"):
        compile_program(program, example, tmp_path / "noisy.pt2", INDUCTOR.settings({}), static=True, name="noisy")


@pytest.fixture(scope="module")
def package(folder: Path, cache: Path) -> Path:
    """Compiled for every batch."""
    opened(folder)
    found = (cache / "optimize-and-serve-compiled").glob("inductor/*/model.pt2")
    return next(path for path in found if bucket_of(path) == '"bucket":0')


def with_library(package: Path, source: str, folder: Path) -> Path:
    """A copy of a package whose native code is another."""
    library, changed = folder / "library.so", folder / "changed.pt2"
    compiler = ["g++", "-shared", "-fPIC", "-x", "c++", "-", "-o", str(library)]
    subprocess.run(compiler, input=source, text=True, check=True)
    with zipfile.ZipFile(package) as records, zipfile.ZipFile(changed, "w") as copy:
        for record in records.infolist():
            data = library.read_bytes() if record.filename.endswith(".so") else records.read(record)
            copy.writestr(record.filename, data)
    return changed


def test_tried_in_a_process_of_its_own_it_answers_as_the_program_does(folder: Path, package: Path) -> None:
    batches = [torch.randn(count, 3, 32, 32) for count in (1, 4)]
    program = load_program(folder / "model.pt2").module()
    for batch, (logits,) in zip(batches, run_isolated(package, -1, batches, "net"), strict=True):
        torch.testing.assert_close(logits, program(batch).detach(), rtol=1e-4, atol=1e-4)


def test_native_code_that_crashes_is_told_and_ends_nobody_else(
    package: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CXX", "/opt/other/g++")
    crash = "#include <csignal>\n__attribute__((constructor)) static void end() { raise(SIGSEGV); }"
    says = r"net: .* crashes when it is loaded or run \(Segmentation fault\); CXX=/opt/other/g\+\+ "
    with pytest.raises(EngineError, match=says):
        run_isolated(with_library(package, crash, tmp_path), -1, [torch.randn(1, 3, 32, 32)], "net")


def test_native_code_that_is_none_of_inductors_is_told(package: Path, tmp_path: Path) -> None:
    with pytest.raises(EngineError, match=r"net: the code that AOTInductor of torch .* compiled cannot be run: "):
        run_isolated(with_library(package, "int nothing;", tmp_path), -1, [torch.randn(1, 3, 32, 32)], "net")


def test_the_cpu_is_used_on_request_only(folder: Path) -> None:
    card = load_card(folder)
    assert "inductor" not in [execution.engine for execution in executions_for(card, "cpu")]
    assert "inductor" in [execution.engine for execution in executions_for(card, "cuda")]


def test_the_probe_compiles_a_network_of_its_own() -> None:
    assert unavailable("inductor", "cpu") is None


def test_graphs_of_compiled_code_need_cuda_and_buckets(folder: Path) -> None:
    with pytest.raises(EngineError, match="cudagraph needs a CUDA device and buckets"):
        open_engine(folder, load_card(folder), Execution("inductor", "cpu", buckets=(1,), options={"cudagraph": True}))
