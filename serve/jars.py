"""What the Java part of the installed TorchServe consists of, as far as the jar in its wheel says.

TorchServe's build unpacks all that it uses into one jar and drops their manifests and ``META-INF/maven`` (its
``server/build.gradle``), so that scanners find nothing in it. What still names itself there is read: Netty's and
Groovy's properties, gRPC's and JUnit's constants, log4j's list of what it was built with. Of the rest the names are
known by their packages, and the versions are not.
"""

from __future__ import annotations

import functools
import re
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from serve.runtime.card import sha256_file
from serve.runtime.errors import UserError

_NETTY = "META-INF/io.netty.versions.properties"
_GROOVY = "META-INF/groovy-release-info.properties"
_LOG4J = "META-INF/DEPENDENCIES"
#: A class that has its library's version as a constant.
_CONSTANTS = {
    "io/grpc/internal/GrpcUtil.class": ("io.grpc", ("grpc-core", "grpc-netty-shaded", "grpc-protobuf", "grpc-stub")),
    "junit/runner/Version.class": ("junit", ("junit",)),
}
_VERSION = re.compile(rb"\d+\.\d+\.\d+")
#: What is in TorchServe 0.12.0's jar by the folder of its classes, and does not say its version.
_UNVERSIONED = {
    "com/beust/jcommander/": ("com.beust", "jcommander"),
    "com/google/common/": ("com.google.guava", "guava"),
    "com/google/gson/": ("com.google.code.gson", "gson"),
    "com/google/protobuf/": ("com.google.protobuf", "protobuf-java"),
    "com/google/rpc/": ("com.google.api.grpc", "proto-google-common-protos"),
    "com/lmax/disruptor/": ("com.lmax", "disruptor"),
    "io/prometheus/client/": ("io.prometheus", "simpleclient"),
    "org/apache/commons/cli/": ("commons-cli", "commons-cli"),
    "org/apache/commons/compress/": ("org.apache.commons", "commons-compress"),
    "org/apache/commons/io/": ("commons-io", "commons-io"),
    "org/apache/tools/ant/": ("org.apache.ant", "ant"),
    "org/slf4j/": ("org.slf4j", "slf4j-api"),
    "org/testng/": ("org.testng", "testng"),
    "org/yaml/snakeyaml/": ("org.yaml", "snakeyaml"),
}


@dataclass(frozen=True, order=True)
class JavaLibrary:
    """A Maven artifact; ``version`` is None where nothing in the jar says it."""

    group: str
    name: str
    version: str | None


@dataclass(frozen=True)
class Jar:
    """A jar of the wheel, with what it bundles."""

    name: str
    sha256: str
    bundled: tuple[JavaLibrary, ...]


def torchserve_jars() -> tuple[Jar, ...]:
    """The jars of the installed TorchServe.

    Raises:
        UserError: it is not installed.
    """
    try:
        from ts import __file__ as torchserve
    except ImportError:
        raise UserError("TorchServe is not installed") from None
    return tuple(_read(path) for path in sorted((Path(torchserve).parent / "frontend").glob("*.jar")))


@functools.lru_cache(maxsize=8)
def _read(path: Path) -> Jar:
    return Jar(path.name, sha256_file(path), bundled(path))


def bundled(path: Path) -> tuple[JavaLibrary, ...]:
    """What a jar bundles, by group and name.

    Raises:
        UserError: it is no jar.
    """
    try:
        with zipfile.ZipFile(path) as jar:
            return tuple(sorted(set(_libraries(jar)), key=lambda entry: (entry.group, entry.name)))
    except (OSError, zipfile.BadZipFile) as error:
        raise UserError(f"{path}: cannot be read as a jar ({error})") from None


def _libraries(jar: zipfile.ZipFile) -> Iterator[JavaLibrary]:
    names = frozenset(jar.namelist())
    if _NETTY in names:
        for name, version in re.findall(r"^(netty-[a-z0-9-]+)\.version=(\S+)$", _text(jar, _NETTY), re.MULTILINE):
            yield JavaLibrary("io.netty", name, version)
    if _GROOVY in names and (found := re.search(r"^BundleVersion=(\S+)", _text(jar, _GROOVY), re.MULTILINE)):
        yield JavaLibrary("org.codehaus.groovy", "groovy", found[1])
    if _LOG4J in names:
        # Not the slf4j that is named there: it is what log4j was built with, and not what is bundled.
        for name, version in re.findall(r"org\.apache\.logging\.log4j:([a-z0-9-]+):jar:([\w.]+)", _text(jar, _LOG4J)):
            yield JavaLibrary("org.apache.logging.log4j", name, version)
    for constant, (group, artifacts) in _CONSTANTS.items():
        if constant in names and len(versions := set(_VERSION.findall(jar.read(constant)))) == 1:
            version = versions.pop().decode()
            yield from (JavaLibrary(group, artifact, version) for artifact in artifacts)
    for folder, (group, artifact) in _UNVERSIONED.items():
        if any(name.startswith(folder) for name in names):
            yield JavaLibrary(group, artifact, None)


def _text(jar: zipfile.ZipFile, name: str) -> str:
    return jar.read(name).decode("utf-8", "replace").replace("\r\n", "\n")
