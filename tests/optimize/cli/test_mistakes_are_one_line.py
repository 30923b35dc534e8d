"""The command line as a user meets it: a mistake is one line on stderr, and the exit code says whose it is."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from optimize import cli, noise
from optimize.report.finished_runs import faults_of
from optimize.report.progress_display import Display
from serve.runs.sealed_files import seal
from serve.runtime.errors import PipelineError
from tests.optimize.runs_fixtures import (
    RECIPE,
    TINY,
    TinyRun,
    copied_store,
    references,
    run_afresh,
    tiny_run,
    with_stages,
    write_recipe,
)
from tests.optimize.synthetic import synthetic
from tests.processor import BF16

__all__ = ["copied_store", "tiny_run"]  # fixtures

#: Artifacts of the run, an archive of each: its baseline, and what its stages make but one, which needs AVX-512 BF16.
MADE = len(RECIPE["stages"]) + BF16


def invoke(*words: object):
    return CliRunner().invoke(cli.app, [str(word) for word in words], env={"COLUMNS": "200"})


def refused(*words: object) -> str:
    """The one line of a user's mistake."""
    result = invoke(*words)
    assert result.exit_code == 2, result.output
    assert result.stdout == ""
    lines = result.stderr.splitlines()
    assert len(lines) == 1, result.stderr
    assert lines[0].startswith("error: ")
    return lines[0]


@pytest.fixture
def folders(tmp_path) -> Path:
    """``two/`` is a usable image folder, ``one/`` has one class, ``broken/`` holds no images."""
    from PIL import Image

    for name in ("two/a", "two/b", "one/a", "broken/a", "broken/b"):
        (tmp_path / name).mkdir(parents=True)
        for number in range(4):
            path = tmp_path / name / f"{number}.png"
            if name.startswith("broken"):
                path.write_text("I am no image")
            else:
                Image.new("RGB", (32, 32), (number, 0, 0)).save(path)
    return tmp_path


def test_mistakes_in_words_are_named_with_what_is_nearest(tmp_path) -> None:
    store = ("--store", tmp_path / "store")
    assert "did you mean resnet18" in refused("run", "resnet8", *store)
    assert "absent.py" in refused("run", "absent.py:tiny", *store)
    assert "tiny" in refused("run", TINY + "y", *store)
    assert "did you mean cifar10" in refused("run", TINY, "--data", "cifra10", *store)
    assert "auto, cpu, cuda" in refused("run", TINY, "--device", "gpu", *store)
    assert "one of them only" in refused("run", "resnet18", "--checkpoint", "a.pt", "--weights", "DEFAULT", *store)
    assert "the name of a run must have letters" in refused("run", TINY, "--name", "../up", *store)
    assert "the name of a run must have letters" in refused("run", TINY, "--name", "größe", *store)
    assert not (tmp_path / "store").exists()


def test_files_that_are_missing_or_of_no_use_are_named(folders, tmp_path) -> None:
    store = ("--store", tmp_path / "store")
    assert "absent.pt" in refused("run", TINY, "--checkpoint", tmp_path / "absent.pt", *store)
    (tmp_path / "text.pt").write_text("I am no checkpoint")
    assert "text.pt" in refused("run", TINY, "--checkpoint", tmp_path / "text.pt", *store)
    assert "absent.yaml" in refused("run", TINY, "--recipe", tmp_path / "absent.yaml", *store)
    assert "absent: there is no such folder" in refused("run", TINY, "--data", f"imagefolder:{tmp_path}/absent", *store)
    assert "only one class" in refused("run", TINY, "--data", f"imagefolder:{folders}/one", *store)
    assert "broken/a/0.png" in refused("run", TINY, "--data", f"imagefolder:{folders}/broken", *store)
    recipe = write_recipe(tmp_path, with_stages({"pass": "fuse"}, {"pass": "fusion"}))
    assert f"{recipe}:" in refused("run", TINY, "--recipe", recipe, *store)
    assert not (tmp_path / "store").exists()


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything")
def test_an_unreadable_image_folder_is_named(folders, tmp_path) -> None:
    (folders / "two" / "a").chmod(0)
    try:
        message = refused("run", TINY, "--data", f"imagefolder:{folders}/two", "--store", tmp_path / "store")
        assert str(folders / "two" / "a") in message
    finally:
        (folders / "two" / "a").chmod(0o700)


def test_an_image_size_that_the_model_cannot_take_is_refused_with_a_legal_one(tmp_path) -> None:
    message = refused("run", "vit_b_16", "--image-size", 100, "--store", tmp_path / "store")
    assert "100x100" in message
    assert "112" in message


def test_a_checkpoint_that_does_not_fit_names_its_keys(tmp_path) -> None:
    import torch

    torch.save({"state_dict": {"module.other.weight": torch.zeros(3)}}, tmp_path / "other.pt")
    result = invoke("run", TINY, "--checkpoint", tmp_path / "other.pt", "--store", tmp_path / "store")
    assert result.exit_code == 2
    assert "other.weight" in result.stderr.splitlines()[-1]
    assert "Traceback" not in result.output


def test_cuda_without_a_gpu_is_the_users_mistake(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr("torch.cuda.device_count", lambda: 0)
    assert "0 CUDA devices" in refused("run", TINY, "--device", "cuda", "--store", tmp_path / "store")


def test_a_store_that_cannot_be_written_is_named(tmp_path) -> None:
    (tmp_path / "file").write_text("I am a file")
    assert f"{tmp_path / 'file'} is not a folder" in refused("run", TINY, "--store", tmp_path / "file")
    assert f"there is no store {tmp_path / 'absent'}" in refused("prune", "--store", tmp_path / "absent")
    assert not (tmp_path / "absent").exists()


def test_a_full_disk_and_ctrl_c_are_one_line(tmp_path, monkeypatch) -> None:
    import errno

    def full(*args: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device", "model_store/x")

    def interrupt(*args: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("optimize.run.pipeline.run", full)
    assert "model_store/x: No space left on device; free some space, or choose another --store" in refused("run", TINY)
    monkeypatch.setattr("optimize.run.pipeline.run", interrupt)
    result = invoke("run", TINY)
    assert (result.exit_code, result.stdout) == (130, "")
    assert result.stderr == "interrupted; finished steps are kept, and the same command continues\n"


def test_a_failure_that_is_not_the_users_has_exit_code_1(tmp_path, monkeypatch) -> None:
    def broken(*args: object) -> None:
        raise PipelineError("the machine is broken")

    monkeypatch.setattr("optimize.run.pipeline.run", broken)
    result = invoke("run", TINY)
    assert (result.exit_code, result.stderr) == (1, "error: the machine is broken\n")


@pytest.mark.parametrize("words", [("--help",), ("run", "--help"), ("list",)])
def test_words_that_need_no_torch_do_not_wait_for_it(words, tmp_path) -> None:
    code = (
        "import sys; from optimize import cli\n"
        "try: cli.main()\n"
        "except SystemExit: pass\n"
        "heavy = {'torch', 'torchvision', 'onnxruntime', 'sklearn', 'matplotlib', 'pandas'} & set(sys.modules)\n"
        "print('heavy:', sorted(heavy), file=sys.stderr)"
    )
    result = subprocess.run(
        [sys.executable, "-c", code, *words], capture_output=True, text=True, cwd=tmp_path, check=True, timeout=60
    )
    assert result.stderr.splitlines()[-1] == "heavy: []"
    assert result.stdout


def test_passes_lists_every_pass_with_its_settings() -> None:
    output = invoke("passes").stdout
    for name in ("fuse", "half", "dynamic", "ptq", "qat", "onnx", "onnx-half", "onnx-int8"):
        assert f"{name}: " in output
    assert "images = 256" in output


def test_silence_covers_the_known_warnings_and_no_other(recwarn) -> None:
    import logging
    import warnings

    from torch.ao.quantization import HistogramObserver

    loggers = [logging.getLogger(f"torch.utils.{name}") for name in ("cpp_extension", "_pytree")]
    levels = [logger.level for logger in loggers]
    try:
        with warnings.catch_warnings(record=True) as heard:
            warnings.simplefilter("always")
            noise.silence()
            warnings.warn("`torch.jit.load` is deprecated. Please switch to `torch.export`.", FutureWarning, 1)
            HistogramObserver(reduce_range=True)  # torch's own for a layer norm
            warnings.warn("your data is deprecated", FutureWarning, 1)
        assert [str(warning.message) for warning in heard] == ["your data is deprecated"]
        assert not any(logger.isEnabledFor(logging.WARNING) for logger in loggers)
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)


def test_a_reason_in_brackets_is_shown_as_it_is(capsys) -> None:
    from rich.console import Console

    with Display(Console(stderr=True)) as display:
        display.started("ptq")
        display.ended("ptq", 0.0, cached=False, skipped="KeyError: [/red] of [bold]")
        display.said("a " * 60 + "end")
    lines = capsys.readouterr().err.splitlines()
    assert lines[0].endswith("skipped: KeyError: [/red] of [bold]")
    assert lines[1] == "a " * 60 + "end"


# --- with a report


def test_show_lists_the_best_execution_of_each_artifact_or_all_of_them(tmp_path: Path) -> None:
    path = tmp_path / "toynet" / "report.json"
    path.parent.mkdir()
    path.write_text(json.dumps(synthetic().to_json()))
    seal(path.parent)
    best, every = (invoke("show", "toynet", "--store", tmp_path, *words).stdout for words in ((), ("--all",)))
    assert [line.split()[1] for line in best.splitlines() if line.split()[:1] == ["onnx"]] == ["openvino"]
    engines = [line.split()[1] for line in every.splitlines() if line.split()[:1] == ["onnx"]]
    assert engines == ["openvino", "onnxruntime", "onnxruntime-cuda"]
    assert "qat@torchscript" in invoke("list", "--store", tmp_path).stdout


@pytest.mark.parametrize("encoding", ["ascii", "latin-1"])
@pytest.mark.parametrize("words", [("list",), ("show", "toynet")])
def test_a_terminal_that_is_not_utf_8_gets_plain_characters(
    words: tuple[str, ...], encoding: str, tmp_path: Path
) -> None:
    path = tmp_path / "toynet" / "report.json"
    path.parent.mkdir()
    path.write_text(json.dumps(synthetic().to_json()))
    seal(path.parent)
    run = [sys.executable, "-m", "optimize", *words, "--store", str(tmp_path)]
    environment = {**os.environ, "PYTHONIOENCODING": encoding, "COLUMNS": "200"}
    found = subprocess.run(run, capture_output=True, check=False, timeout=60, env=environment)
    assert found.returncode == 0, found.stderr
    text = found.stdout.decode(encoding)
    assert "qat" in text
    assert ("\xd7" in text) == (encoding == "latin-1")  # the sign of a speed, which Latin-1 has
    assert re.search(r"\d(x|\xd7)", text)


@pytest.mark.parametrize("words", [("show", "toynet"), ("compare", "toynet/ptq", "toynet/qat")])
def test_a_report_of_an_older_version_is_one_line_that_says_what_to_do(words: tuple[str, ...], tmp_path: Path) -> None:
    path = tmp_path / "toynet" / "report.json"
    path.parent.mkdir()
    path.write_text(json.dumps(synthetic().to_json() | {"schema": 3}))
    said = refused(*words, "--store", tmp_path)
    assert said.endswith("toynet/report.json is of an older version (schema 3, not 5); run the model again")


_TOO_DEEP = 100_000 * "["


@pytest.mark.parametrize("fault", [None, "", '{"schema": 4, "rows": [', _TOO_DEEP])
def test_a_damaged_report_is_one_line_and_the_other_runs_are_listed(fault: str | None, tmp_path: Path) -> None:
    whole, damaged = (tmp_path / run / "report.json" for run in ("toynet", "damaged"))
    whole.parent.mkdir()
    whole.write_text(json.dumps(synthetic().to_json()))
    seal(whole.parent)
    damaged.parent.mkdir()
    if fault is None:
        damaged.mkdir()
    else:
        damaged.write_text(fault)
    said = "cannot be read (Is a directory)" if fault is None else "is damaged; run the model again"
    listed = invoke("list", "--store", tmp_path)
    assert listed.exit_code == 0
    assert "toynet" in listed.stdout
    assert f"left out: {damaged} {said}" in listed.stderr
    assert f"{damaged} {said}" in refused("show", "damaged", "--store", tmp_path)


@pytest.mark.parametrize("fault", [None, "", '{"schema": 4}', _TOO_DEEP, b"\xff"])
def test_a_damaged_card_is_shown_as_one_line(fault: str | bytes | None, tmp_path: Path) -> None:
    report = tmp_path / "toynet" / "report.json"
    card = report.parent / "artifacts" / "ptq" / "card.json"
    card.parent.mkdir(parents=True)
    report.write_text(json.dumps(synthetic().to_json()))
    if fault is not None:
        card.write_bytes(fault.encode() if isinstance(fault, str) else fault)
    seal(report.parent)
    result = invoke("show", "toynet/ptq", "--store", tmp_path)
    assert (result.exit_code, result.stdout) == (1, "")
    (line,) = result.stderr.splitlines()
    assert line.startswith(f"error: {card.parent if fault is None else card}: ")


# --- with a finished run


@pytest.mark.slow
def test_a_finished_run_is_listed_shown_and_verified(tiny_run: TinyRun) -> None:
    store = ("--store", tiny_run.store)
    listed = invoke("list", *store).stdout
    assert "tiny" in listed
    assert str(tiny_run.report.recommended) in listed
    shown = invoke("show", "tiny", *store).stdout
    for row in tiny_run.report.rows:
        assert row.name in shown
    assert "skipped, runs on CUDA only" in shown
    assert str(tiny_run.folder / "report.html") in shown
    assert json.loads(invoke("show", "tiny/ptq", *store).stdout)["name"] == "ptq"
    assert invoke("verify", "tiny/", *store).stdout == f"{2 * MADE} artifacts and archives are whole\n"
    assert invoke("verify", "tiny/ptq", *store).stdout == "2 artifacts and archives are whole\n"
    assert "did you mean tiny" in refused("show", "tinny", *store)
    assert "has no artifact 'pqt'" in refused("show", "tiny/pqt", *store)
    assert invoke("list", "--store", tiny_run.store / "nothing").stdout.startswith("no runs in")


@pytest.mark.slow
def test_where_a_profile_is_to_be_written_is_looked_at_before_anything_is_measured(
    tiny_run: TinyRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def measured(*_: object, **__: object) -> None:
        raise AssertionError("it is measured")

    monkeypatch.setattr("optimize.profiling.profiling.profile_artifact", measured)
    words = ("profile", f"{tiny_run.folder.name}/baseline", "--store", tiny_run.store, "--trace")
    (tmp_path / "file").touch()
    assert f"{tmp_path}/file is not a folder" in refused(*words, tmp_path / "file" / "trace.json")
    assert f"--trace {tmp_path} is a folder; name a file in it" in refused(*words, tmp_path)


@pytest.mark.slow
def test_a_store_that_is_a_file_and_executions_of_a_card_are_refused(tiny_run: TinyRun) -> None:
    assert "is not a folder" in refused("list", "--store", TINY.rpartition(":")[0])
    artifact = f"{tiny_run.folder.name}/baseline"
    assert "for an artifact, `show` prints its card" in refused("show", artifact, "--store", tiny_run.store, "--all")


@pytest.mark.slow
def test_verify_tells_which_share_of_the_artifacts_is_checked(tiny_run: TinyRun) -> None:
    told: list[tuple[float, str]] = []
    faults_of(tiny_run.store, "tiny", lambda share, name: told.append((share, name)))
    names = [row.name for row in tiny_run.report.rows]
    assert [name for _, name in told] == names
    assert [share for share, _ in told] == pytest.approx([done / len(names) for done in range(len(names))])


def test_verify_names_what_is_damaged_and_exits_with_1(copied_store: Path) -> None:
    path = copied_store / "tiny" / "artifacts" / "onnx" / "model.onnx"
    path.write_bytes(path.read_bytes()[:-1])
    (copied_store / "tiny" / "archives" / "tiny-fuse.mar").unlink()
    result = invoke("verify", "tiny", "--store", copied_store)
    assert result.exit_code == 1
    lines = result.stderr.splitlines()
    assert len(lines) == 3
    assert any("model.onnx: corrupted" in line for line in lines)
    assert any("tiny-fuse.mar: missing" in line for line in lines)
    assert lines[-1] == f"error: 2 of {2 * MADE} are damaged; run the model again to rebuild them"


@pytest.mark.slow
@pytest.mark.parametrize("content", ["{", "[]", "{}", '{"schema": 5, "rows": 3}'])
def test_a_damaged_report_is_one_line(copied_store: Path, content: str) -> None:
    (copied_store / "tiny" / "report.json").write_text(content)
    for words in (("show", "tiny"), ("verify", "tiny")):
        assert "is damaged; run the model again" in refused(*words, "--store", copied_store)
    listed = invoke("list", "--store", copied_store)
    assert (listed.exit_code, listed.stdout) == (0, f"no runs in {copied_store}\n")
    (line,) = listed.stderr.splitlines()
    assert line.startswith("left out: ")
    assert "is damaged; run the model again" in line


@pytest.mark.slow
def test_prune_frees_what_only_removed_runs_used(copied_store: Path) -> None:
    assert invoke("prune", "--store", copied_store).stdout == "nothing to remove: every object is used\n"
    shutil.rmtree(copied_store / "tiny")
    result = invoke("prune", "--store", copied_store, "--yes")
    (line,) = (line for line in result.stdout.splitlines() if line.startswith("  tiny on digits: "))
    # All but one, which runs on CUDA; four graphs by a second engine; what the integers of two mean, and two graphs as
    # they are written.
    answers = (MADE - 1) + 4 + 2 + 2
    expected = {"baseline (2)", "ptq (2)", f"answers ({answers})", "speed", "parity certificate (4)"}
    expected.add(f"archive ({MADE})")
    assert expected <= set(line[18:].split(", "))
    assert result.stdout.splitlines()[-1].startswith("removed ")
    assert list((copied_store / ".store" / "objects").iterdir()) == []


@pytest.mark.slow
def test_json_is_all_of_standard_output_and_nothing_of_torch_reaches_the_terminal(
    copied_store: Path, tmp_path: Path
) -> None:
    """A model that prints must not spoil it, and everything but the speed is in the cache."""
    kinds = ("fuse", "ptq", "onnx", "onnx-int8")  # each engine has one
    stages = [stage for stage in RECIPE["stages"] if stage.get("name", stage["pass"]) in kinds]
    measure = {"rounds": 1, "batch_sizes": [1], "seconds": 0.001}
    recipe = write_recipe(tmp_path, {**RECIPE, "stages": stages, "measure": measure})
    ended = run_afresh(copied_store, recipe, "--json")
    err = ended.stderr
    assert ended.returncode == 0, err
    report = json.loads(ended.stdout)
    assert report["measurement"]["timing"]["rounds"] == 1
    assert "Warning" not in err
    assert "CUDA runtime" not in err
    steps = [line.split()[1] for line in err.splitlines() if line.startswith("  ")]
    assert steps == ["baseline", *kinds, "memory", "accuracy", "speed", "certificates"]
    assert all("from the cache" in line for line in err.splitlines() if line.startswith("  + onnx"))
    eager, channels_last, compiled = report["references"]
    assert (eager["name"], channels_last["name"], compiled["name"]) == ("eager", "eager channels-last", "torch.compile")
    assert "switched off" in compiled["skip"]["reason"]
    assert eager["measured"]["latency_ms"]["p50"] > 0


@pytest.mark.slow
def test_a_model_that_prints_does_not_spoil_the_json_and_a_failed_stage_has_exit_code_1(tmp_path: Path) -> None:
    (tmp_path / "loud.py").write_text(
        Path(TINY.rpartition(":")[0])
        .read_text()
        .replace("    layers: list", '    print("building!")\n    layers: list')
    )
    recipe = write_recipe(tmp_path, with_stages({"pass": "fuse", "config": {"tolerance": 1e-30}}))
    with references(graphs=False):
        result = invoke(
            "run", f"{tmp_path / 'loud.py'}:tiny", "--recipe", recipe, "--store", tmp_path / "store", "--json"
        )
    assert result.exit_code == 1
    assert json.loads(result.stdout)["rows"][1]["skip"]["reason"].startswith("fuse: logits differ")
    assert result.stderr.splitlines()[-1] == "error: failed: fuse; see the report for the reasons"
    assert "building!" in result.stderr


@pytest.mark.parametrize(
    ("words", "fault"),
    [
        (("run",), "Missing argument 'model'"),
        (("run", "resnet18", "--devise", "cpu"), "No such option: --devise .*--device"),
        (("run", "resnet18", "--seed", "x"), "Invalid value for '--seed'"),
        (("rum",), "No such command 'rum'. Did you mean 'run'"),
    ],
)
def test_a_usage_error_is_one_line(words, fault) -> None:
    result = invoke(*words)
    assert result.exit_code == 2
    assert re.fullmatch(f"error: {fault}.*--help`\n", result.stderr)
    assert result.stdout == ""


@pytest.mark.parametrize("words", [("list", "--store", ""), ("list", "--store="), ("run", "resnet18", "--data", "")])
def test_an_option_that_is_given_nothing_is_refused_and_does_not_mean_this_folder(words: tuple[str, ...]) -> None:
    result = invoke(*words)
    option = words[1] if words[0] == "list" else words[2]
    assert result.exit_code == 2
    assert result.stderr == (f"error: {option.rstrip('=')} has no value: leave it out, or give it a value\n")
    assert result.stdout == ""
