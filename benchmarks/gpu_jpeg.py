"""From JPEG bytes to the best classes, with every decoder that is at hand; a part of `benchmarks.gpu`."""

from __future__ import annotations

import importlib
import io
import math
import os
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from torchvision.io import ImageReadMode, decode_jpeg

from benchmarks.gpu_subjects import Subject, jpegs
from benchmarks.gpu_ways import WAYS, Run, Unavailable, Way
from serve.runtime.errors import first_line
from serve.runtime.images import decode, fit, normalise

#: Bytes of a batch to ``uint8`` images ``(3, H, W)`` of any size.
Decoder = Callable[[Sequence[bytes]], list[torch.Tensor]]

_TOP = 5


@dataclass(frozen=True)
class Classifier:
    """A network that is open on a device, with what comes before and after it."""

    network: Run
    way: Way
    subject: Subject
    device: torch.device

    def top(self, images: Sequence[torch.Tensor]) -> torch.Tensor:
        """The best classes ``(N, 5)`` of decoded images, on the CPU.

        Images are fitted where they lie, and normalised on the device.
        """
        preprocessing = self.subject.preprocessing
        fitted = torch.stack([fit(image, preprocessing) for image in images])
        with torch.no_grad():
            logits = self.network(normalise(fitted, preprocessing, self.device, self.way.dtype(self.device)))
            return logits.float().softmax(1).topk(min(_TOP, logits.shape[1])).indices.cpu()


#: What every decoder feeds: the first of these that works here.
_NETWORKS = ("torch-cudagraph FP16", "exported FP16", "eager FP16")


def measure_jpeg(
    subject: Subject, device: torch.device, batches: Sequence[int], seconds: float, done: Callable[[str], bool]
) -> Iterator[tuple[str, dict[str, Any]]]:
    """Measure every decoder, alone and with the network behind it.

    Args:
        subject: the network.
        device: where it runs.
        batches: ascending batch sizes.
        seconds: for each figure.
        done: whether a key was measured before.

    Yields:
        A key ``decoder|batch``, and images a second of decoding, fitting and all of it, with the share of top-1
        classes that are those of the runtime's own decoder.
    """
    classifier = _classifier(subject, device, tuple(batches))
    files = jpegs(subject, max(batches))
    own = classifier.top([decode(data) for data in files])
    with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
        for name, make in decoders(device, pool).items():
            for batch in batches:
                key = f"{name}|{batch}"
                if done(key):
                    continue
                try:
                    yield key, _measure(make(), classifier, files, own, batch=batch, seconds=seconds)
                except Exception as error:  # noqa: BLE001 - whatever one decoder does, the others are measured
                    said = str(error) if isinstance(error, Unavailable) else f"{type(error).__name__}: "
                    yield key, {"failed": said + ("" if isinstance(error, Unavailable) else first_line(error))}


def _classifier(subject: Subject, device: torch.device, batches: tuple[int, ...]) -> Classifier:
    """The first of the usual ways that works here; each decoder feeds the same."""
    for name in _NETWORKS:
        way = next(way for way in WAYS if way.name == name)
        try:
            return Classifier(way.open(subject, device, batches), way, subject, device)
        except Unavailable:
            continue
    raise Unavailable("no way to run the network works here")


def decoders(device: torch.device, pool: ThreadPoolExecutor) -> dict[str, Callable[[], Decoder]]:
    """What makes each decoder; it raises `Unavailable` or `ImportError` where the decoder is not there.

    Args:
        device: where images go that a GPU decodes.
        pool: the threads that decode on the CPU, one for each core.
    """

    def pillow() -> Decoder:
        from PIL import Image

        def one(data: bytes) -> torch.Tensor:
            with Image.open(io.BytesIO(data)) as image:
                return torch.from_numpy(np.array(image.convert("RGB"))).permute(2, 0, 1)

        return lambda files: list(pool.map(one, files))

    def runtime() -> Decoder:
        return lambda files: list(pool.map(decode, files))

    def torchvision_cuda() -> Decoder:
        _needs_cuda(device)

        def run(files: Sequence[bytes]) -> list[torch.Tensor]:
            decoded: Any = decode_jpeg([_buffer(data) for data in files], mode=ImageReadMode.RGB, device=device)
            return list(decoded)

        return run

    def torchcodec(where: torch.device) -> Decoder:
        library: Any = importlib.import_module("torchcodec.decoders")
        if not hasattr(library, "decode_jpeg"):
            raise Unavailable("TorchCodec decodes images since 0.16")
        if where.type == "cuda":
            _needs_cuda(device)
            return lambda files: list(library.decode_jpeg([_buffer(data) for data in files], device=where))
        return lambda files: list(pool.map(library.decode_jpeg, files))

    def nvimgcodec() -> Decoder:
        _needs_cuda(device)
        library: Any = importlib.import_module("nvidia.nvimgcodec")
        decoder = library.Decoder(device_id=device.index or 0)

        def run(files: Sequence[bytes]) -> list[torch.Tensor]:
            # Images (H, W, 3) in device memory, which say so by __cuda_array_interface__; None for a bad one.
            return [torch.as_tensor(image, device=device).permute(2, 0, 1) for image in decoder.decode(list(files))]

        return run

    return {
        "Pillow, CPU": pillow,
        "torchvision, CPU (the runtime's)": runtime,
        "TorchCodec, CPU": partial(torchcodec, torch.device("cpu")),
        "torchvision, CUDA": torchvision_cuda,
        "TorchCodec, CUDA": partial(torchcodec, device if device.type == "cuda" else torch.device("cuda")),
        "nvImageCodec, CUDA": nvimgcodec,
    }


def _needs_cuda(device: torch.device) -> None:
    if device.type != "cuda":
        raise Unavailable("needs a CUDA device")


def _buffer(data: bytes) -> torch.Tensor:
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)


def _measure(
    decoder: Decoder, classifier: Classifier, files: Sequence[bytes], own: torch.Tensor, *, batch: int, seconds: float
) -> dict[str, Any]:
    device = classifier.device
    chunks = [files[start : start + batch] for start in range(0, len(files) - batch + 1, batch)]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # torchvision 0.29: of decode_jpeg, for each call
        top = torch.cat([classifier.top(decoder(chunk)) for chunk in chunks])
        decoding, _ = _rate(lambda number: decoder(chunks[number % len(chunks)]), batch, device, seconds)
        whole, latencies = _rate(
            lambda number: classifier.top(decoder(chunks[number % len(chunks)])), batch, device, seconds
        )
    return {
        "decoded_s": decoding,
        "images_s": whole,
        "p50_ms": float(np.percentile(latencies, 50)),
        "p99_ms": float(np.percentile(latencies, 99)),
        "top1": float((top[:, 0] == own[: len(top), 0]).double().mean()),
        "network": classifier.way.name,
    }


def _rate(work: Callable[[int], object], batch: int, device: torch.device, seconds: float) -> tuple[float, list[float]]:
    """Images a second, and the milliseconds of each call to its end."""
    latencies: list[float] = []
    for number in range(2):
        work(number)
    while len(latencies) < 3 or math.fsum(latencies) < seconds * 1e3:
        begun = time.perf_counter()
        work(len(latencies))
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        latencies.append((time.perf_counter() - begun) * 1e3)
    return batch * len(latencies) / math.fsum(latencies) * 1e3, latencies
