"""Packs an artifact folder into a TorchServe archive (``.mar``) that works without an installation of this project."""

from __future__ import annotations

import dataclasses
import hashlib
import inspect
from pathlib import Path

import yaml

import serve
from serve.archive.archive_file import (
    CLASSES_FILE,
    CONFIG_FILE,
    CREATED_ON,
    HANDLER_FILE,
    MANIFEST_FILE,
    MODEL_VERSION,
    OpenArchive,
    card_bytes,
    check_model_name,
    json_bytes,
    write_zip,
)
from serve.common.options import ServingOptions
from serve.runtime.card.card import CARD_FILE, Card, load_card
from serve.runtime.card.known_answer import KNOWN_FILE, read_known
from serve.runtime.card.serving import SERVING_FILE, Serving, read_serving
from serve.runtime.engines.base import chain_for, engines_for, execution_id, find_engine
from serve.runtime.errors import CardError, UserError
from serve.runtime.tasks.base import Task, open_task, tasks

# Files that Python could import, even if a card names one as the model file: the archive is first in the worker's path.
_CODE = (".py", ".pyc", ".so")

# Modules beside the runtime that the handler imports.
_HANDLER_MODULES = ("__init__.py", "torchserve/__init__.py", "torchserve/metrics.py")

_CONFIG_HEAD = """\
# TorchServe reads these values, the handler reads serving.json. Times are in seconds, except maxBatchDelay (ms): a lone
# request waits for all of it. A batch here holds two batches of the network.
"""

# TorchServe gives a worker nothing until all its requests are answered. With two batches, the worker decodes one while
# it computes the other. `make bench-serve` shows the gain for another number here: the share of "in process,
# pipelined".
_BATCHES_AT_ONCE = 2


def build_archive(
    artifact_folder: Path, destination: Path, *, model_name: str, options: ServingOptions | None = None
) -> Path:
    """Pack an artifact into ``destination``, atomically. The same artifact gives the same bytes.

    The archive has the model file, its card (with only the packed files), the class names, the handler, the runtime and
    ``serving.json``. TorchServe's own configuration is derived from ``serving.json``. ``known.json`` is packed if the
    folder has one.

    Args:
        artifact_folder: has ``card.json``, the files that it names, and perhaps serving settings.
        destination: the ``.mar`` to write. Its folder is created.
        model_name: the model's name in TorchServe.
        options: changes to the folder's serving settings, or to the defaults.

    Returns:
        ``destination``.

    Raises:
        CardError: the artifact is incomplete.
        UserError: ``model_name`` is not a legal name, the artifact cannot be served so, or ``destination`` cannot be
            written.
    """
    check_model_name(model_name)
    card = load_card(artifact_folder)
    task = open_task(card)
    serving = serving_of(artifact_folder, card, options)
    travelling = {name: card.files[name] for name in _files_to_serve(card)}
    packed: dict[str, bytes] = {
        CLASSES_FILE: json_bytes({str(index): label for index, label in enumerate(card.classes)}),
        SERVING_FILE: serving.text.encode(),
        CONFIG_FILE: model_config(serving).encode(),
        MANIFEST_FILE: _manifest(model_name, card),
        **_runtime(card),
    }
    if (known := read_known(artifact_folder)) is not None:
        try:
            task.check_known(known)
        except CardError as error:
            raise CardError(f"{artifact_folder / KNOWN_FILE}: {error}") from None
        packed[KNOWN_FILE] = known.text.encode()
    # The card in the archive also has the hashes of everything else in it.
    hashes = {name: hashlib.sha256(content).hexdigest() for name, content in packed.items()}
    entries: dict[str, bytes | Path] = {
        **{name: artifact_folder / name for name in travelling},
        **packed,
        CARD_FILE: card_bytes(dataclasses.replace(card, files=travelling, packed=hashes)),
    }
    try:
        destination.parent.mkdir(parents=True, exist_ok=True)
        write_zip(destination, entries)
    except OSError as error:
        raise UserError(f"{destination}: cannot be written ({error.strerror or error})") from None
    return destination


def foreign_parts(archive: OpenArchive, card: Card) -> list[str]:
    """Return the paths of code or configuration in an archive that this installation would not pack.

    Args:
        archive: has passed its `check`, so its files match the card.
        card: its card.

    Raises:
        CardError: its ``serving.json`` is invalid.
    """
    serving = archive.serving()
    own = {
        **_runtime(card),
        CONFIG_FILE: model_config(serving).encode(),
        MANIFEST_FILE: _manifest(archive.name(), card),
    }
    hashes = {name: hashlib.sha256(content).hexdigest() for name, content in own.items()}
    data = {
        name for name in (CLASSES_FILE, SERVING_FILE, KNOWN_FILE, *_files_to_serve(card)) if not name.endswith(_CODE)
    }
    packed = {**card.files, **card.packed}
    return sorted(name for name, digest in packed.items() if name not in data and hashes.get(name) != digest)


def _runtime(card: Card) -> dict[str, bytes]:
    """Return the handler and its modules, by their paths in the archive.

    Of the tasks it is only the card's own. An engine or a task from another distribution is packed like the runtime's
    own, so it need not be installed.

    Raises:
        UserError: the file of that engine or task has the name of one of the runtime's.
    """
    package = Path(serve.__file__).parent
    sources = {HANDLER_FILE: package / "torchserve" / "handler.py"}
    sources |= {f"serve/{name}": package / name for name in _HANDLER_MODULES}
    sources |= {source.relative_to(package.parent).as_posix(): source for source in (package / "runtime").rglob("*.py")}
    task = tasks().get(card.task, Task)
    parts = [("task", Path(inspect.getfile(kind))) for kind in task.__mro__ if issubclass(kind, Task)]
    others = {Path(inspect.getfile(kind)) for kind in tasks().values()}.difference(file for _, file in parts)
    parts += [("engine", Path(inspect.getfile(entry.open))) for entry in engines_for(card)]
    for kind, file in parts:
        if file not in sources.values():
            place = f"serve/runtime/{kind}s/{file.name}"
            if place in sources:
                raise UserError(f"{file}: the project has a file of the same name for one of its {kind}s; rename yours")
            sources[place] = file
    return {name: source.read_bytes() for name, source in sources.items() if source not in others}


def serving_of(artifact_folder: Path, card: Card, options: ServingOptions | None = None) -> Serving:
    """Return the serving settings of an artifact: its folder's or the defaults, with the changes in ``options``.

    Raises:
        CardError: the folder's ``serving.json`` is invalid.
        UserError: an execution cannot run this artifact.
    """
    serving = read_serving(artifact_folder) or Serving(chain_for(card))
    if options is not None:
        serving = options.over(serving, card)
    for execution in serving.executions:
        entry = find_engine(execution.engine)
        entry.settings(execution.options)
        if (reason := entry.never_runs(card, execution.device)) is not None:
            raise UserError(f"{card.name} cannot be served by {execution_id(execution)}: {reason}")
    return serving


def model_config(serving: Serving) -> str:
    """Return the text of ``model-config.yaml``: the part of the serving settings that TorchServe itself reads.

    A batch size of one stays one.
    """
    config: dict[str, object] = {
        "minWorkers": serving.workers,
        "maxWorkers": serving.workers,
        "batchSize": 1 if serving.batch_size == 1 else _BATCHES_AT_ONCE * serving.batch_size,
        "maxBatchDelay": serving.max_batch_delay_ms,
        "responseTimeout": serving.response_timeout_s,
        "startupTimeout": serving.startup_timeout_s,
    }
    devices = {execution.device for execution in serving.executions[: 1 if serving.strict else None]}
    if len(devices) == 1:  # without it TorchServe assigns a GPU if there is one
        config["deviceType"] = "cpu" if devices == {"cpu"} else "gpu"
    return _CONFIG_HEAD + yaml.safe_dump(config, sort_keys=False)


def _files_to_serve(card: Card) -> list[str]:
    """Return the model file and its companions, for example an ONNX graph's ``model.onnx.data``."""
    own = {card.file, *(f"{card.file}{ending}" for entry in engines_for(card) for ending in entry.companions)}
    return sorted(own & card.files.keys())


def _manifest(model_name: str, card: Card) -> bytes:
    from model_archiver.manifest_components.manifest import Manifest, RuntimeType
    from model_archiver.manifest_components.model import Model

    model = Model(
        model_name=model_name,
        serialized_file=card.file,
        handler=HANDLER_FILE,
        model_version=MODEL_VERSION,
        config_file=CONFIG_FILE,
    )
    manifest = Manifest(runtime=RuntimeType.PYTHON.value, model=model)
    return json_bytes({**manifest.manifest_dict, "createdOn": CREATED_ON})
