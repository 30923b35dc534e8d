"""The server's life: what start refuses, what it says of a worker that dies, what stop leaves behind."""

from __future__ import annotations

import dataclasses
import json
import os
import re
import shlex
import signal
import socket
import subprocess
import sys
import time
import zipfile
from pathlib import Path

import psutil
import pytest
import yaml
from typer.testing import CliRunner

from serve.cli import app
from serve.common import layout
from serve.common.options import ServingOptions
from serve.runs.sealed_files import seal
from serve.runtime.errors import UserError
from serve.torchserve import server
from serve.torchserve.archive_builder import build_archive
from serve.torchserve.configuration import HOST, Ports, check_host, properties
from serve.torchserve.limits import Limits
from serve.torchserve.process_identity import Identity
from serve.torchserve.startup_watch import StartError
from serve.torchserve.state import RunningServer, ServedModel, state_folder
from tests.serve import artifacts
from tests.serve.conftest import Served, free_ports, name_of


def command(*words: str | Path, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-W", "error::DeprecationWarning:serve", "-m", "serve", *map(str, words)],
        capture_output=True,
        text=True,
        timeout=240,
        cwd=cwd,
        check=False,
    )


def invoked(*words: str | Path) -> subprocess.CompletedProcess[str]:
    """As `command`, in this process: without the seconds that a new one takes to import torch."""
    result = CliRunner().invoke(app, list(map(str, words)), catch_exceptions=False)
    return subprocess.CompletedProcess(words, result.exit_code, result.stdout, result.stderr)


def archived(folder: Path, run: str = "small") -> tuple[Path, dict[str, Path]]:
    """A store with one archive, of the artifact in ``folder``."""
    store = folder.parents[2]
    path = layout.archive_path(store, run, folder.name)
    build_archive(folder, path, model_name=path.stem, options=ServingOptions(batch_size=2))
    return store, {path.stem: path}


def broken_script(folder: Path) -> Path:
    folder.mkdir(parents=True)
    (folder / "model.pt").write_bytes(b"this is no TorchScript file")
    return artifacts.write_artifact(folder, "broken", "torchscript", "model.pt")


def onnx_for_cuda(folder: Path) -> Path:
    return artifacts.onnx(folder, device="cuda")


@pytest.mark.slow
def test_a_worker_that_dies_at_load_ends_the_start_with_its_own_last_lines(tmp_path: Path) -> None:
    store, archives = archived(broken_script(tmp_path / "small" / "artifacts" / "dying"))
    before = time.monotonic()
    with pytest.raises(StartError, match="worker of small-dying died while it was loading") as caught:
        server.start(store, archives, ports=free_ports(), gpus=0)
    assert "is not a complete zip file" in str(caught.value)
    assert time.monotonic() - before < 90
    assert server.running(store) is None
    assert not [p for p in psutil.process_iter(["cmdline"]) if str(store) in " ".join(p.info["cmdline"] or [])]


def test_a_port_in_use_is_named_with_the_option_that_changes_it(folders: dict[str, Path], tmp_path: Path) -> None:
    store, archives = archived(artifacts.torchscript(tmp_path / "small" / "artifacts" / "script"))
    with socket.socket() as taken:
        taken.bind((HOST, 0))
        taken.listen()
        ports = dataclasses.replace(free_ports(), metrics=taken.getsockname()[1])
        with pytest.raises(UserError, match=rf"port {ports.metrics} .*--metrics-port"):
            server.start(store, archives, ports=ports)
    assert server.running(store) is None


@pytest.mark.parametrize("ports", [Ports(inference=0), Ports(metrics=70_000), Ports(metrics=8080)])
def test_illegal_ports_are_refused(ports: Ports) -> None:
    with pytest.raises(UserError, match=r"between 1 and 65535|different ports"):
        ports.check_free()


def test_others_than_this_machine_are_let_in_only_where_that_is_said(tmp_path: Path) -> None:
    assert [check_host(host, expose=False) for host in ("127.0.0.1", "localhost", "127.0.0.2")] == [
        "127.0.0.1",
        "127.0.0.1",
        "127.0.0.2",
    ]
    assert check_host("0.0.0.0", expose=True) == "0.0.0.0"
    with pytest.raises(UserError, match=r"--host 0\.0\.0\.0 accepts connections from other machines: add --expose"):
        check_host("0.0.0.0", expose=False)
    with pytest.raises(UserError, match="--host must be an IPv4 address"):
        check_host("my.host", expose=True)
    text = properties(Ports(), Limits(), archives=tmp_path, metrics_file=tmp_path, gpus=0, host="0.0.0.0")
    opened = [line for line in text.splitlines() if "0.0.0.0" in line]
    assert opened == ["inference_address=http://0.0.0.0:8080"], "the predictions, and nothing else"


@pytest.mark.parametrize(
    ("words", "opened"),
    [
        (("--host", "0.0.0.0", "--expose"), "0.0.0.0"),
        (("--host", "192.0.2.7", "--expose"), "192.0.2.7"),
        (("--host", "127.0.0.2", "--expose"), None),
        (("--expose",), None),
        ((), None),
    ],
)
def test_who_lets_others_in_is_told_what_they_reach_and_what_they_do_not(
    words: tuple[str, ...], opened: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, archives = archived(artifacts.torchscript(tmp_path / "small" / "artifacts" / "script"))
    (model,) = archives
    asked: list[str] = []

    # What the server itself opens is shown by its configuration, above: no test opens a port to others.
    def started(_store: Path, archives: dict[str, Path], *, ports: Ports, host: str, **_rest: object) -> RunningServer:
        asked.append(host)
        served = tuple(ServedModel.of(name, path) for name, path in archives.items())
        identity = Identity.of(os.getpid(), "no such word")
        return RunningServer(identity, served, model, str(tmp_path), ports=ports, host=host)

    monkeypatch.setattr(server, "start", started)
    ended = invoked("start", "small", "--store", store, "--artifact", "script", "--port", "8099", *words)
    assert ended.returncode == 0, ended.stderr
    told = [line for line in ended.stdout.splitlines() if line.startswith("everyone who can reach")]
    if opened is None:
        assert not told
        assert asked[0].startswith("127.")
        return
    assert asked == [opened]
    assert told == [
        f"everyone who can reach http://{opened}:8099 can send requests; they need the token, but are not encrypted: "
        "put a proxy with TLS in front. All other ports are on loopback"
    ]
    assert "metrics: http://127.0.0.1:8082/metrics" in ended.stdout.splitlines()
    here = "127.0.0.1" if opened == "0.0.0.0" else opened
    assert ended.stdout.splitlines()[-1].endswith(f"http://{here}:8099/predictions/{model}")
    refused = invoked("start", "small", "--store", store, "--artifact", "script", "--host", opened)
    assert refused.returncode == 2
    assert (
        refused.stderr
        == f"error: --host {opened} accepts connections from other machines: add --expose if you want that\n"
    )
    assert asked == [opened], "nothing was started"


def test_a_missing_archive_is_named_with_what_makes_it(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"small-x\.mar: there is no such archive; .*serve package small"):
        server.start(tmp_path, {"small-x": layout.archive_path(tmp_path, "small", "x")})


def test_state_of_a_process_that_is_gone_or_another_does_not_count(tmp_path: Path) -> None:
    folder = state_folder(tmp_path)
    folder.mkdir()
    left = tmp_path / "torchserve-left"
    left.mkdir()
    present = Identity.of(os.getpid(), "no such word")
    for identity in (dataclasses.replace(present, pid=2**22 - 1), present):
        state = RunningServer(identity, (ServedModel("small-x", "small", "x"),), "small-x", str(left))
        (folder / "state.json").write_text(json.dumps(dataclasses.asdict(state)))
        assert server.running(tmp_path) is None
    assert server.stop(tmp_path) is None
    assert not left.exists()
    assert not (folder / "state.json").exists()


@pytest.mark.parametrize("text", ["", "{}", "null", "[1]", '{"ports": 1}'])
def test_a_broken_state_file_does_not_count(text: str, tmp_path: Path) -> None:
    state_folder(tmp_path).mkdir()
    (state_folder(tmp_path) / "state.json").write_text(text)
    assert server.running(tmp_path) is None


def test_paths_that_java_would_misread_are_escaped(tmp_path: Path) -> None:
    text = properties(Ports(), Limits(), archives=tmp_path / "naïve", metrics_file=Path("/a b/ü\\n€.yaml"), gpus=0)
    assert text.isascii()
    assert "metrics_config=/a b/\\u00fc\\\\n\\u20ac.yaml\n" in text
    assert "number_of_gpu=0\n" in text


@pytest.mark.slow
def test_a_second_start_on_the_same_store_says_that_it_is_running(served: Served) -> None:
    archives = {name_of("script"): layout.archive_path(served.store, "small", "script")}
    with pytest.raises(UserError, match=f"already running .*port {served.running.ports.inference}"):
        server.start(served.store, archives, ports=free_ports())
    assert served.client.ping() == "Healthy"


@pytest.mark.slow
def test_keys_and_their_folder_are_private(served: Served) -> None:
    folder = state_folder(served.store)
    assert folder.stat().st_mode & 0o777 == 0o700
    for name in ("key_file.json", "authorization"):
        assert (folder / name).stat().st_mode & 0o777 == 0o600


@pytest.mark.slow
def test_status_and_predict_speak_to_the_running_server(served: Served, tmp_path: Path) -> None:
    image = tmp_path / "image.jpg"
    image.write_bytes(artifacts.jpeg(1))
    told = command("status", "--store", served.store)
    assert told.returncode == 0, told.stderr
    threads = len(os.sched_getaffinity(0))
    assert f"small-onnx: 1 of 1 worker(s) ready, float32 by openvino (openvino/CPU, threads: {threads})" in told.stdout
    assert "small-fallback: 1 of 1 worker(s) ready, float32 by onnxruntime (onnxruntime/CPU" in told.stdout
    (passed,) = [line for line in told.stdout.splitlines() if "passed over" in line]
    assert passed.startswith(
        "    passed over openvino[precision=f33]: onnx: OpenVINO cannot compile it: Wrong value f33"
    )
    answer = command("predict", image, "--store", served.store, "--model", name_of("onnx"), "--k", "2", "--json")
    assert answer.returncode == 0, answer.stderr
    expected = served.client.predict(name_of("onnx"), artifacts.jpeg(1), headers={"X-Top-K": "2"})
    assert [e["label"] for e in json.loads(answer.stdout)] == [e["label"] for e in expected]
    image.write_bytes(b"no image")
    refused = invoked("predict", image, "--store", served.store)
    assert (refused.returncode, refused.stdout) == (1, "")
    assert "not an image" in refused.stderr


@pytest.mark.slow
def test_from_package_to_stop_with_the_printed_curl_line(tmp_path: Path) -> None:
    store = tmp_path / "ein schöner Ort €"
    for name, device in (("script", "any"), ("half", "cuda")):
        artifacts.torchscript(store / "small" / "artifacts" / name, name, device)  # type: ignore[arg-type]
    rows = [{"name": "script", "archive": {}}, {"name": "half", "archive": {}}]
    (store / "small" / "report.json").write_text(json.dumps({"rows": rows, "recommended": "script"}))
    (store / "small" / "sample.jpg").write_bytes(artifacts.jpeg(1))
    seal(store / "small")
    packed = command("package", "small", "--store", store)
    assert packed.returncode == 0, packed.stderr
    archive = store / "small" / "archives" / "small-script.mar"
    published = archive.read_bytes()
    ports = free_ports()
    options = [f"--{name.replace('_', '-').removeprefix('inference-')}-port" for name in dataclasses.asdict(ports)]
    options[0] = "--port"
    pairs = [str(word) for pair in zip(options, dataclasses.astuple(ports), strict=True) for word in pair]
    words = ["--artifact", "all", "--device", "cpu", "--workers", "2", "--k", "4", *pairs]
    started = command("start", "small", "--store", store, *words)
    try:
        assert started.returncode == 0, started.stderr
        assert "left out: small-half (it runs on CUDA only)" in started.stdout
        running = server.running(store)
        assert running is not None
        with running.client(store) as client:
            assert [worker["status"] for worker in client.workers("small-script")] == ["READY", "READY"]
        line = started.stdout.strip().splitlines()[-1].strip()
        answer = subprocess.run(shlex.split(line), capture_output=True, text=True, check=True, cwd="/")
        assert len(json.loads(answer.stdout)) == 4
        assert archive.read_bytes() == published, "what is given to start is for this server alone"
        processes = [psutil.Process(running.pid), *psutil.Process(running.pid).children(recursive=True)]
        assert len(processes) == 3
    finally:
        stopped = command("stop", "--store", store)
    assert stopped.returncode == 0, stopped.stderr
    assert not [process for process in processes if process.is_running()]
    assert not Path(running.temporary).exists()
    assert (state_folder(store) / "key_file.json").stat().st_mode & 0o777 == 0o600, "clients keep their keys"
    assert not (state_folder(store) / "archives").exists()
    status = invoked("status", "--store", store)
    assert status.returncode == 1
    assert "no server" in status.stderr


def test_what_is_given_to_package_is_in_every_archive_that_it_concerns(tmp_path: Path) -> None:
    store = tmp_path / "store"
    artifacts.onnx(store / "small" / "artifacts" / "onnx")
    artifacts.torchscript(store / "small" / "artifacts" / "script")
    words = ["--workers", "2", "--threads", "1", "--batch-size", "4", "--max-batch-delay-ms", "9", "--buckets", "1,4"]
    words += ["--engine", "onnxruntime", "--option", "openvino.precision=bf16", "--strict", "--k", "2"]
    words += ["--budget", "image_pixels=1000", "--budget", "batch_seconds=2.5", "--decoder", "reduced"]
    ended = invoked("package", "small", "--store", store, *words)
    assert ended.returncode == 0, ended.stderr
    found = {}
    for name in ("onnx", "script"):
        with zipfile.ZipFile(layout.archive_path(store, "small", name)) as archive:
            found[name] = json.loads(archive.read("serving.json"))
            config = yaml.safe_load(archive.read("model-config.yaml"))
            assert (config["minWorkers"], config["batchSize"], config["maxBatchDelay"]) == (2, 8, 9), (
                "two of the network's batches"
            )
    for served in found.values():
        assert (served["workers"], served["k"], served["strict"], served["decoder"]) == (2, 2, True, "reduced")
        assert (served["budget"]["image_pixels"], served["budget"]["batch_seconds"]) == (1000, 2.5)
    first, second = (entry for entry in found["onnx"]["executions"] if entry["device"] == "cpu")
    assert found["onnx"]["executions"][0] == first
    assert first == {"engine": "onnxruntime", "device": "cpu", "threads": 1, "buckets": [1, 4], "options": {}}
    assert second == {**first, "engine": "openvino", "options": {"precision": "bf16"}}
    assert [entry["device"] for entry in found["script"]["executions"]] == ["cuda", "cpu"], "onnxruntime is not for it"


@pytest.mark.parametrize("name", ["package", "start", "add", "replace"])
def test_help_says_of_each_setting_what_it_means_and_what_it_usually_is_on_two_screens(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    shown = invoked(name, "--help").stdout
    assert len(shown.splitlines()) <= 100
    assert max(map(len, shown.splitlines())) <= 80
    words = " ".join(shown.split())
    for field, flag in {
        "batch_size": "--batch-size N",
        "engines": "--engine ENGINE",
        "response_timeout_s": "--response-timeout-s N",
    }.items():
        description = ServingOptions.model_fields[field].description
        assert description is not None
        assert f" {flag} {description[:60]}" in words
    assert "Largest number of images in one batch. [default: 16; 1<=x<=1024]" in words
    assert set(ServingOptions.model_fields) - {"engines", "options"} <= {
        word.replace("-", "_") for word in re.findall(r"--([a-z-]+)", shown)
    }


@pytest.mark.slow
def test_ctrl_c_during_start_stops_the_server_and_says_so(tmp_path: Path) -> None:
    store, _ = archived(artifacts.torchscript(tmp_path / "small" / "artifacts" / "script"))
    ports = free_ports()
    pairs = [
        *("--port", ports.inference, "--management-port", ports.management, "--metrics-port", ports.metrics),
        *("--grpc-inference-port", ports.grpc_inference, "--grpc-management-port", ports.grpc_management),
    ]
    words = [sys.executable, "-m", "serve", "start", "small", "--store", str(store), *map(str, pairs)]
    starting = subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    deadline = time.monotonic() + 60
    while (running := server.running(store)) is None and time.monotonic() < deadline:
        time.sleep(0.05)
    assert running is not None
    starting.send_signal(signal.SIGINT)
    _, complaint = starting.communicate(timeout=60)
    assert complaint == "error: interrupted: the server was stopped\n"
    # CPython 3.11 ends by the signal itself, which a shell shows as 130 too, when the interrupt fell into an
    # exec() of text (dataclasses do that as they are imported), whoever caught it.
    assert starting.returncode in (130, -signal.SIGINT)
    assert not psutil.pid_exists(running.pid)
    assert server.running(store) is None


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("start", "smal"), "did you mean small?"),
        (("start", "small", "--artifact", "none"), "the archives of small are "),
        (("start", "small", "--device", "tpu"), "auto, cpu or cuda"),
        (("package", "nothing"), "there is no run 'nothing'"),
        (("package", "small", "--engine", "openvin"), "unknown engine 'openvin' (did you mean openvino"),
        (("package", "small", "--engine", "onnxruntime[cuda]"), "onnxruntime runs on cpu, not on cuda"),
        (
            ("start", "small", "--artifact", "script", "--engine", "openvino"),
            "openvino cannot open any artifact of small",
        ),
        (("package", "small", "--option", "openvino=f32"), "--option must be ENGINE.NAME=VALUE"),
        (("package", "small", "--option", "openvino.precision=32"), "must be of type str, found 32"),
        (("package", "small", "--buckets", "1;2"), "--buckets must be whole numbers"),
        (("package", "small", "--buckets", "2,1"), "buckets must ascend"),
        (("package", "small", "--budget", "pixels=3"), "unknown limit pixels"),
        (
            ("package", "small", "--workers", "0"),
            "Invalid value for '--workers': Input should be greater than or equal to 1",
        ),
        (("package", "../etc"), "cannot name a served model"),
        (("predict", "missing.jpg"), "missing.jpg: cannot be read"),
    ],
)
def test_a_users_mistake_is_one_line_with_exit_code_2(
    words: tuple[str, ...], message: str, folders: dict[str, Path]
) -> None:
    store = folders["script"].parents[2]
    build_archive(folders["script"], layout.archive_path(store, "small", "script"), model_name="small-script")
    ended = invoked(*words, "--store", store)
    assert ended.returncode == 2
    assert message in ended.stderr
    assert len(ended.stderr.strip().splitlines()) == 1
