"""Packs an artifact folder into a TorchServe archive (``.mar``) that needs nothing of this project installed."""

from __future__ import annotations

import dataclasses
import hashlib
import inspect
import json
import os
import re
import shutil
import tempfile
import zipfile
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import yaml

import serve
from serve.hints import command
from serve.options import ServingOptions
from serve.runtime.card import CARD_FILE, Card, load_card, parse_card, write_card
from serve.runtime.engines.base import chain_for, engines_for, execution_id, find_engine
from serve.runtime.errors import CardError, UserError
from serve.runtime.known import KNOWN_FILE, read_known
from serve.runtime.serving import SERVING_FILE, Serving, parse_serving, read_serving

CONFIG_FILE = "model-config.yaml"


HANDLER_FILE = "handler.py"


MANIFEST_FILE = "MAR-INF/MANIFEST.json"


CLASSES_FILE = "index_to_name.json"


MODEL_VERSION = "1.0"


# torch-model-archiver's rule for model names.
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.\-]*")


# The stock archiver writes the present time here, and entries with the times and the order of a
# folder's listing: two archives of one artifact never compare equal, so nobody can tell by its hash
# whether an archive is what it should be. Ours depend on their contents alone.
_CREATED_ON = "01/01/1980 00:00:00"


_ZIP_TIME = (1980, 1, 1, 0, 0, 0)


# What Python imports by its name, also if a card calls it the model file: the worker's path begins with the archive.
_CODE = (".py", ".pyc", ".so")


_CONFIG_HEAD = """\
# What TorchServe reads of serving.json, which the handler obeys. Times are in seconds where not said otherwise; a
# lone request waits the whole of maxBatchDelay, in ms.
"""


def check_model_name(name: str) -> str:
    """Return ``name`` if TorchServe accepts it as a model's name.

    Raises:
        UserError: it does not.
    """
    if not _NAME.fullmatch(name):
        raise UserError(
            f"{name!r} cannot name a served model: letters, digits, '_', '-' and '.' are allowed, "
            f"and the first must be a letter or a digit"
        )
    return name


def build_archive(
    artifact_folder: Path, destination: Path, *, model_name: str, options: ServingOptions | None = None
) -> Path:
    """Pack an artifact into ``destination``, atomically; the same artifact gives the same bytes.

    The archive holds the model file, its card (restricted to the files that travel), the class names,
    the handler and the runtime, ``serving.json``, and of that what TorchServe itself reads; and ``known.json``, where
    the folder has one.

    Args:
        artifact_folder: holds ``card.json`` and the files that it names, and perhaps how the artifact is served.
        destination: the ``.mar`` to write; its folder is made.
        model_name: the name that TorchServe serves it by.
        options: how it is served otherwise than the folder says, or than is usual.

    Returns:
        ``destination``.

    Raises:
        CardError: the folder is not a whole artifact.
        UserError: ``model_name`` is not a legal name, the artifact cannot be served so, or ``destination`` cannot be
            written.
    """
    check_model_name(model_name)
    card = load_card(artifact_folder)
    serving = serving_of(artifact_folder, card, options)
    travelling = {name: card.files[name] for name in _files_to_serve(card)}
    packed: dict[str, bytes] = {
        CLASSES_FILE: _json({str(index): label for index, label in enumerate(card.classes)}),
        SERVING_FILE: serving.text.encode(),
        CONFIG_FILE: model_config(serving).encode(),
        MANIFEST_FILE: _manifest(model_name, card),
        **_runtime(card),
    }
    if (known := read_known(artifact_folder)) is not None:
        if len(known.logits) != len(card.classes):
            raise CardError(
                f"{artifact_folder / KNOWN_FILE}: has {len(known.logits)} logits for {len(card.classes)} classes"
            )
        packed[KNOWN_FILE] = known.text.encode()
    # The card in the archive answers for everything else in it, too.
    hashes = {name: hashlib.sha256(content).hexdigest() for name, content in packed.items()}
    card_bytes = _card_bytes(dataclasses.replace(card, files=travelling, packed=hashes))
    entries: dict[str, bytes | Path] = {
        **{name: artifact_folder / name for name in travelling},
        **packed,
        CARD_FILE: card_bytes,
    }
    try:
        destination.parent.mkdir(parents=True, exist_ok=True)
        _write_zip(destination, entries)
    except OSError as error:
        raise UserError(f"{destination}: cannot be written ({error.strerror or error})") from None
    return destination


def with_version(archive: Path, version: str, destination: Path) -> Path:
    """Pack an archive again as another version of the model, which TorchServe tells versions apart by.

    Args:
        archive: an archive of this project, which may be ``destination``.
        version: stands in the manifest of the new one.
        destination: the ``.mar`` to write, atomically.

    Raises:
        UserError: there is no such archive.
        CardError: it is not whole.
    """
    card = check_archive(archive)
    with (
        tempfile.TemporaryDirectory(dir=destination.parent, prefix=".version-") as unpacked,
        _opened(archive) as opened,
    ):
        manifest = json.loads(opened.read(MANIFEST_FILE))
        manifest["model"]["modelVersion"] = version
        content = _json(manifest)
        packed = {**card.packed, MANIFEST_FILE: hashlib.sha256(content).hexdigest()}
        entries: dict[str, bytes | Path] = {
            name: Path(opened.extract(name, unpacked)) for name in {**card.files, **card.packed}
        }
        entries |= {MANIFEST_FILE: content, CARD_FILE: _card_bytes(dataclasses.replace(card, packed=packed))}
        _write_zip(destination, entries)
    return destination


def check_archive(archive: Path) -> Card:
    """Check every file in an archive, handler and runtime included, against the card in it.

    Returns:
        The card.

    Raises:
        UserError: there is no such file.
        CardError: a file was changed, added or removed, which the message names.
    """
    with _opened(archive) as opened:
        # Before anything is read: a small file may unpack to any size, deflated or in entries that overlap.
        if sum(entry.file_size for entry in opened.infolist()) > archive.stat().st_size:
            raise CardError(f"{archive}: unpacks to more than it has, and what this project packs does not")
        card = _card_of(archive, opened)
        expected = {**card.files, **card.packed}
        names = [entry.orig_filename for entry in opened.infolist()]
        for name in names:
            if names.count(name) > 1:
                raise CardError(f"{archive}: holds {name} twice")
            if name not in expected and name != CARD_FILE:
                raise CardError(f"{archive}: holds {name[:80]!r}, which its card does not name; pack it again")
        for name, digest in expected.items():
            if name not in names:
                raise CardError(f"{archive}: the file {name} that its card names is missing")
            with opened.open(name) as stream:
                actual = hashlib.file_digest(stream, "sha256").hexdigest()  # type: ignore[arg-type]
            if actual != digest:
                raise CardError(f"{archive}: {name} was changed after it was packed")
        if not card.packed:
            raise CardError(f"{archive}: its card does not name the handler; pack it again")
        return card


def archived_name(archive: Path) -> str:
    """The name that an archive was packed to be served by.

    Raises:
        UserError: there is no such file.
        CardError: it is no archive.
    """
    with _opened(archive) as opened:
        manifest = json.loads(opened.read(MANIFEST_FILE))
        return str(manifest["model"]["modelName"])


def foreign_parts(archive: Path, card: Card) -> list[str]:
    """What in an archive TorchServe would run or obey and this installation would not pack there, by path.

    Args:
        archive: has passed `check_archive`: its files have the hashes that the card names.
        card: its card.

    Raises:
        CardError: its ``serving.json`` is no such file.
    """
    serving = serving_in(archive)
    own = {
        **_runtime(card),
        CONFIG_FILE: model_config(serving).encode(),
        MANIFEST_FILE: _manifest(archived_name(archive), card),
    }
    hashes = {name: hashlib.sha256(content).hexdigest() for name, content in own.items()}
    data = {
        name for name in (CLASSES_FILE, SERVING_FILE, KNOWN_FILE, *_files_to_serve(card)) if not name.endswith(_CODE)
    }
    packed = {**card.files, **card.packed}
    return sorted(name for name, digest in packed.items() if name not in data and hashes.get(name) != digest)


def serving_in(archive: Path) -> Serving:
    """How an archive is served.

    Raises:
        UserError: there is no such file.
        CardError: it is not an archive of this project.
    """
    with _opened(archive) as opened:
        return parse_serving(opened.read(SERVING_FILE).decode(), archive / SERVING_FILE)


#: A broken zip is told by BadZipFile, by zlib, by a wrong length, by a compression that is unknown; a document that is
#: no mapping by TypeError.
_NOT_OURS = (
    *(OSError, KeyError, ValueError, TypeError, EOFError),
    *(NotImplementedError, zlib.error, zipfile.BadZipFile),
)


@contextmanager
def _opened(archive: Path) -> Iterator[zipfile.ZipFile]:
    try:
        with zipfile.ZipFile(archive) as opened:
            yield opened
    except FileNotFoundError:
        raise UserError(f"{archive}: there is no such archive; make it with `{command('serve package RUN')}`") from None
    except _NOT_OURS as error:
        raise CardError(f"{archive}: not an archive of this project ({error})") from None


def _card_of(archive: Path, opened: zipfile.ZipFile) -> Card:
    return parse_card(opened.read(CARD_FILE).decode(), archive / CARD_FILE)


def _runtime(card: Card) -> dict[str, bytes]:
    """The handler and the package that it runs on, by their paths in the archive.

    An engine of another distribution travels as one of the runtime's own, so that nothing of it need be installed.

    Raises:
        UserError: that engine's file has the name of one of the runtime's.
    """
    package = Path(serve.__file__).parent
    sources = {HANDLER_FILE: package / "torchserve" / "handler.py", "serve/__init__.py": package / "__init__.py"}
    sources |= {source.relative_to(package.parent).as_posix(): source for source in (package / "runtime").rglob("*.py")}
    for entry in engines_for(card):
        engine = Path(inspect.getfile(entry.open))
        if engine not in sources.values():
            place = f"serve/runtime/engines/{engine.name}"
            if place in sources:
                raise UserError(f"{engine}: the runtime has an engine of its own in a file of that name; rename it")
            sources[place] = engine
    return {name: source.read_bytes() for name, source in sources.items()}


def serving_of(artifact_folder: Path, card: Card, options: ServingOptions | None = None) -> Serving:
    """How an artifact is served: as its folder says, or as is usual; and what ``options`` set of it.

    Raises:
        CardError: the folder's ``serving.json`` is no such file.
        UserError: one of the executions cannot be of this artifact.
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
    """The text of ``model-config.yaml``: what TorchServe itself reads of how an artifact is served."""
    config: dict[str, object] = {
        "minWorkers": serving.workers,
        "maxWorkers": serving.workers,
        "batchSize": serving.batch_size,
        "maxBatchDelay": serving.max_batch_delay_ms,
        "responseTimeout": serving.response_timeout_s,
        "startupTimeout": serving.startup_timeout_s,
    }
    devices = {execution.device for execution in serving.executions[: 1 if serving.strict else None]}
    if len(devices) == 1:  # left out, TorchServe assigns a GPU where there is one
        config["deviceType"] = "cpu" if devices == {"cpu"} else "gpu"
    return _CONFIG_HEAD + yaml.safe_dump(config, sort_keys=False)


def _files_to_serve(card: Card) -> list[str]:
    """The model file and what its engines keep beside it, such as an ONNX graph's ``model.onnx.data``."""
    own = {card.file, *(f"{card.file}{ending}" for entry in engines_for(card) for ending in entry.companions)}
    return sorted(own & card.files.keys())


def _card_bytes(card: Card) -> bytes:
    with tempfile.TemporaryDirectory() as folder:
        write_card(Path(folder), card)
        return (Path(folder) / CARD_FILE).read_bytes()


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
    return _json({**manifest.manifest_dict, "createdOn": _CREATED_ON})


def _json(body: object) -> bytes:
    return (json.dumps(body, indent=2, ensure_ascii=False) + "\n").encode()


def _write_zip(destination: Path, entries: dict[str, bytes | Path]) -> None:
    """Write a zip whose bytes depend on ``entries`` alone, by way of a temporary file.

    Stored, not deflated: weights do not compress, and zlib's output differs between its versions.
    """
    handle, temporary = tempfile.mkstemp(dir=destination.parent, prefix=f".{destination.name}.")
    try:
        with os.fdopen(handle, "wb") as stream, zipfile.ZipFile(stream, "w", zipfile.ZIP_STORED) as archive:
            for name in sorted(entries):
                content = entries[name]
                info = zipfile.ZipInfo(name, _ZIP_TIME)
                info.create_system = 3  # Unix, wherever it is written
                info.external_attr = 0o100644 << 16
                if isinstance(content, bytes):
                    archive.writestr(info, content)
                    continue
                info.file_size = content.stat().st_size
                with content.open("rb") as source, archive.open(info, "w") as target:
                    shutil.copyfileobj(source, target, 1 << 20)
        Path(temporary).chmod(0o644)
        Path(temporary).replace(destination)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise
