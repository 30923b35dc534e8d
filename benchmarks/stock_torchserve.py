"""A TorchServe as its documentation starts it, with its own ``image_classifier`` and a handler that only echoes."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
import warnings
import zipfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import torch
import torchvision
from PIL import Image

from serve.common.server_processes import end, process_tree, wait_until_ready
from serve.load.plan import Target
from serve.load.workload import Item, Known
from serve.runtime.errors import PipelineError
from serve.torchserve.configuration import HOST
from serve.torchserve.java import java_executable
from serve.tune.servers import Live, free_ports

STOCK, ECHO = "stock", "echo"

_READY_S = 180.0
# As ours are: batches form while the worker is busy, and a lone request waits 1 ms.
_CONFIG = "minWorkers: 1\nmaxWorkers: 1\nbatchSize: 8\nmaxBatchDelay: 1\nresponseTimeout: 120\n"


def stock_archive(run: Path, classes: int, destination: Path) -> torch.jit.ScriptModule:
    """The run's float ResNet-18 as TorchScript behind the handler ``image_classifier``; returns the network.

    Args:
        run: the run's folder, whose ``baseline`` gives the weights.
        classes: of the network.
        destination: the ``.mar``.

    Raises:
        PipelineError: the run's baseline is no ResNet-18 of torchvision.
    """
    from safetensors.torch import load_file

    network = torchvision.models.resnet18(num_classes=classes).eval()
    try:
        network.load_state_dict(load_file(run / "artifacts" / "baseline" / "weights.safetensors"))
    except (OSError, RuntimeError) as error:
        raise PipelineError(f"the run has no baseline with the weights of a ResNet-18 ({str(error)[:80]})") from None
    with torch.inference_mode(), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # TorchScript is deprecated, and what the stock handler takes
        traced: torch.jit.ScriptModule = torch.jit.trace(network, torch.zeros(1, 3, 224, 224))  # type: ignore[no-untyped-call]
        buffer = io.BytesIO()
        torch.jit.save(traced, buffer)
    _write(destination, STOCK, "image_classifier", {"model.pt": buffer.getvalue()}, serialized="model.pt")
    return traced


def echo_archive(destination: Path) -> None:
    """An archive whose handler only echoes."""
    handler = Path(__file__).with_name("echo_handler.py").read_bytes()
    _write(destination, ECHO, "echo_handler.py", {"echo_handler.py": handler})


def stock_items(network: torch.jit.ScriptModule, images: Sequence[tuple[str, bytes]]) -> tuple[Item, ...]:
    """What the stock handler answers to each image that it can take (it fails on those that are not RGB)."""
    from torchvision import transforms

    preprocess = transforms.Compose(
        [
            transforms.Resize(256),
            transforms.CenterCrop(224),
            transforms.ToTensor(),
            transforms.Normalize(mean=[0.485, 0.456, 0.406], std=[0.229, 0.224, 0.225]),
        ]
    )
    found = []
    for name, data in images:
        image = Image.open(io.BytesIO(data))
        if image.mode == "RGB":
            with torch.inference_mode():
                (row,) = network(preprocess(image)[None]).softmax(1).tolist()
            answer = [{"index": index, "probability": value} for index, value in enumerate(row)]
            found.append(Item(name, data, "image/jpeg", (Known(answer),)))
    return tuple(found)


@contextmanager
def stock_torchserve(models: Sequence[str], archives: Path, scratch: Path) -> Iterator[Live]:
    """Serve archives of that folder by TorchServe's own command, without tokens, until the block ends.

    Args:
        models: each the name in an archive's manifest and, with ``.mar``, of its file.
        archives: the folder that they lie in.
        scratch: is made; holds the configuration, the logs and what TorchServe unpacks.

    Raises:
        PipelineError: it does not come up.
    """
    ports = free_ports(5)
    scratch.mkdir(parents=True, exist_ok=True)
    keys = ("inference_address", "management_address", "metrics_address")
    lines = [f"{key}=http://{HOST}:{port}" for key, port in zip(keys, ports, strict=False)]
    lines += [f"grpc_inference_port={ports[3]}", f"grpc_management_port={ports[4]}", "max_request_size=67108864"]
    (scratch / "config.properties").write_text("\n".join([*lines, "disable_system_metrics=true", ""]))
    (temporary := scratch / "tmp").mkdir(mode=0o700, exist_ok=True)
    java = java_executable()
    log = scratch / "console.log"
    words = ["--start", "--foreground", "--ncs", "--disable-token-auth", "--model-store", str(archives), "--models"]
    words += [f"{model}.mar" for model in models]
    with log.open("wb") as stream:
        process = subprocess.Popen(
            [sys.executable, "-m", "ts.model_server", *words, "--ts-config", str(scratch / "config.properties")],
            cwd=scratch,
            env={
                **os.environ,
                "TMPDIR": str(temporary),
                "TEMP": str(temporary),
                "JAVA_HOME": str(java.parent.parent),
                "PATH": f"{java.parent}:{os.environ.get('PATH', '')}",
                "LOG_LOCATION": str(scratch / "logs"),
                "METRICS_LOCATION": str(scratch / "logs"),
            },
            stdin=subprocess.DEVNULL,
            stdout=stream,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    try:
        with httpx.Client(timeout=5, trust_env=False) as client:
            wait_until_ready(process, lambda: _are_ready(client, ports[1], models), log, within_s=_READY_S, every_s=0.5)
        targets = {model: Target(f"{HOST}:{ports[0]}", f"/predictions/{model}") for model in models}
        yield Live(targets, process.pid, log)
    finally:
        end(process_tree(process.pid), patience_s=15)
        process.wait()


def _are_ready(client: httpx.Client, port: int, models: Sequence[str]) -> bool:
    for model in models:
        workers = client.get(f"http://{HOST}:{port}/models/{model}").json()[0]["workers"]
        if not workers or any(worker["status"] != "READY" for worker in workers):
            return False
    return True


def _write(destination: Path, model: str, handler: str, files: dict[str, bytes], serialized: str | None = None) -> None:
    described: dict[str, Any] = {"modelName": model, "handler": handler, "modelVersion": "1.0"}
    described |= {"configFile": "model-config.yaml"} | ({} if serialized is None else {"serializedFile": serialized})
    manifest = {
        "createdOn": "01/01/1980 00:00:00",
        "runtime": "python",
        "model": described,
        "archiverVersion": "0.12.0",
    }
    destination.parent.mkdir(parents=True, exist_ok=True)
    with zipfile.ZipFile(destination, "w") as archive:
        archive.writestr("MAR-INF/MANIFEST.json", json.dumps(manifest))
        archive.writestr("model-config.yaml", _CONFIG)
        for name, content in files.items():
            archive.writestr(name, content)
