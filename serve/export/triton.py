"""``triton``: a model repository of an ONNX artifact for NVIDIA's Triton Inference Server.

Triton runs only the network. The client decodes, resizes and crops the image as the repository's `README.md` says. It
also normalises, unless the artifact's graph does (its input is ``uint8``).
"""

from __future__ import annotations

import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from serve.export.base import Subject, Target, register
from serve.export.pbtxt import Word, text
from serve.runtime.card.card import LETTERBOX, LETTERBOX_GREY, Preprocessing
from serve.runtime.card.serving import Serving, read_serving
from serve.runtime.engines.base import chain_for, engines_for
from serve.runtime.errors import UserError
from serve.runtime.tasks.base import open_task

_TYPES = {"uint8": "TYPE_UINT8", "float32": "TYPE_FP32", "float16": "TYPE_FP16", "bfloat16": "TYPE_BF16"}
#: ONNX's own numbers for them (TensorProto.DataType).
_ONNX_TYPES = {1: "TYPE_FP32", 2: "TYPE_UINT8", 10: "TYPE_FP16", 16: "TYPE_BF16"}
#: Names of one channel, two …
_COLOURS = ("grey", "grey and alpha", "RGB", "RGB and alpha")
_QUEUE_US = 100_000


def write(subject: Subject, folder: Path) -> Sequence[str]:
    """Write the model's configuration, labels and graph, and a README; see `base.Target`.

    The files are ``<name>/config.pbtxt``, ``<name>/labels.txt``, ``<name>/1/model.onnx`` and ``README.md``.

    Raises:
        UserError: the artifact is not an ONNX file.
    """
    card = subject.card
    model = folder / subject.name
    (model / "1").mkdir(parents=True)
    companions = [f"{card.file}{ending}" for entry in engines_for(card) for ending in entry.companions]
    for name in dict.fromkeys([card.file, *(name for name in companions if name in card.files)]):
        # The graph names its weight files, so they keep their names.
        shutil.copy(subject.folder / name, model / "1" / ("model.onnx" if name == card.file else name))
    (model / "labels.txt").write_text("".join(f"{label}\n" for label in card.classes), encoding="utf-8")
    serving = read_serving(subject.folder) or Serving(chain_for(card))
    (model / "config.pbtxt").write_text(text(config(subject, model / "1" / "model.onnx", serving)), encoding="ascii")
    (folder / "README.md").write_text(readme(subject), encoding="utf-8")
    return [f"serve it: tritonserver --model-repository=FOLDER (the model {subject.name}); see README.md for requests"]


def config(subject: Subject, graph: Path, serving: Serving) -> Mapping[str, Any]:
    """Return the model's configuration, with the fields of Triton's ``model_config.proto``.

    Args:
        subject: the artifact.
        graph: its ONNX file, for inputs and outputs.
        serving: the serving settings, for batch size and batch delay.
    """
    import onnx

    model = onnx.load(graph, load_external_data=False).graph
    weights = {entry.name for entry in model.initializer}
    inputs = [entry for entry in model.input if entry.name not in weights]
    if len(inputs) != 1:
        raise UserError(f"{graph}: has {len(inputs)} inputs; it must have one")
    if not inputs[0].type.tensor_type.shape.dim[0].dim_param:
        raise UserError(f"{graph}: takes batches of one size only, but Triton needs any size")
    # Triton refuses a preferred size above the largest batch.
    buckets = [size for size in serving.executions[0].buckets if size <= serving.batch_size]
    gpus = subject.settings.gpus
    return {
        "name": subject.name,
        "backend": "onnxruntime",
        "max_batch_size": serving.batch_size,
        "input": {
            "name": inputs[0].name,
            "data_type": Word(_TYPES[subject.card.input_dtype]),
            "dims": list(subject.card.preprocessing.shape),
        },
        "output": [
            {
                "name": output.name,
                "data_type": Word(_ONNX_TYPES[output.type.tensor_type.elem_type]),
                **_dims([side.dim_value or -1 for side in output.type.tensor_type.shape.dim[1:]]),
                # Triton names the largest numbers of an output by it. Maps have no such numbers.
                **({} if number or subject.card.ending else {"label_filename": "labels.txt"}),
            }
            for number, output in enumerate(model.output)
        ],
        "instance_group": {"count": 1, "kind": Word("KIND_GPU" if gpus else "KIND_CPU")},
        "dynamic_batching": {
            **({"preferred_batch_size": buckets} if buckets else {}),
            "max_queue_delay_microseconds": serving.max_batch_delay_ms * 1000,
            "default_queue_policy": {
                "timeout_action": Word("REJECT"),
                "default_timeout_microseconds": _QUEUE_US,
                "max_queue_size": 16 * serving.batch_size,
            },
        },
        "parameters": {"key": "intra_op_thread_count", "value": {"string_value": str(subject.settings.cpus)}},
        "version_policy": {"latest": {"num_versions": 1}},
    }


def _dims(sides: Sequence[int]) -> dict[str, Any]:
    """Return the shape of one image's output. Triton wants a dimension where there is only a number."""
    return {"dims": list(sides)} if sides else {"dims": [1], "reshape": {"shape": []}}


def readme(subject: Subject) -> str:
    """Return the instructions for a client of the repository, with the card's own numbers."""
    own = subject.card.preprocessing
    normalises = subject.card.input_dtype == "uint8"
    steps = [
        "decode it, turn it as its EXIF orientation says, and convert it to "
        + _COLOURS[own.channels - 1]
        + (f"; of greys of more than 8 bits, {own.pixel_max:g} is white" if own.pixel_max is not None else ""),
        *_to_network_size(own),
        f"order it as (channels, height, width) = {tuple(own.shape)}",
        "send the pixels as they are (uint8): the graph normalises them"
        if normalises
        else f"divide by 255, subtract the mean {list(own.mean)} and divide by {list(own.std)}, each channel its own, "
        f"and send it as {subject.card.input_dtype}",
    ]
    lines = [
        f"# {subject.name}",
        "",
        f"{subject.card.model}, {subject.card.precision}. Triton runs the network only. Prepare each image first:",
        "",
        *(f"{number}. {step}" for number, step in enumerate(steps, 1)),
        "",
        f"The answer has {open_task(subject.card).reading}. Unlike",
        "the project's own servers, Triton does not limit pixels, decoding time or file sizes: limit them before.",
        "",
    ]
    return "\n".join(lines)


def _to_network_size(own: Preprocessing) -> tuple[str, str]:
    """Return the two steps from a decoded image to the network's size."""
    size, how = f"{own.crop[0]} x {own.crop[1]} pixels (height x width)", f"{own.interpolation}, antialiased"
    if own.resize == LETTERBOX:
        return (
            f"resize it in its proportions, so that it just fits into {size}, each side rounded ({how})",
            f"put it in the middle of {size} of grey ({LETTERBOX_GREY} in all colours), with the odd row or column of "
            "grey below it or on its right",
        )
    if isinstance(own.resize, tuple):
        resized = f"to {own.resize[0]} x {own.resize[1]} pixels (height x width)"
    else:
        resized = f"so that the shorter side has {own.resize} pixels"
    return f"resize it {resized} ({how})", f"cut {size} from its centre"


TRITON = register(
    Target(
        "triton",
        write,
        format="onnx",
        # It runs in Triton's own image. Whoever starts that sets number and place.
        ignores=frozenset({"image", "namespace", "memory_mb", "replicas", "max_replicas", "queue_ms"}),
        signs=False,
    )
)
