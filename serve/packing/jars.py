"""The Java libraries inside TorchServe's jar: a fixed list, because TorchServe 0.12.0 was its last release.

TorchServe's build unpacks its libraries into one jar and drops the manifests, so scanners find nothing in it. The
versions here are from its build files: ``frontend/gradle.properties``, the ``build.gradle`` of ``server`` and
``archive``, ``tools/gradle/proto.gradle``. The jar itself names the versions of JUnit and jQuery. Gradle chose the
others.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from pathlib import Path

from serve.runtime.card.card import sha256_file
from serve.runtime.errors import UserError

#: The jar in the wheel of TorchServe 0.12.0.
_SHA256 = "ce340411ce54beaacd3dcfa31644a9aa369a83a36ed687172ba1088a13123dfe"
#: Group, names and version of its libraries. No version if none is stated.
_LIBRARIES = """
com.beust jcommander
com.github.javaparser javaparser-core
com.google.api.grpc proto-google-common-protos
com.google.code.gson gson 2.9.0
com.google.guava guava
com.google.protobuf protobuf-java
com.lmax disruptor 3.4.4
com.thoughtworks.qdox qdox
commons-cli commons-cli 1.3.1
commons-io commons-io 2.16.1
info.picocli picocli
io.grpc grpc-api,grpc-context,grpc-core,grpc-netty-shaded,grpc-protobuf,grpc-protobuf-lite,grpc-stub 1.50.0
io.netty netty-buffer,netty-codec,netty-codec-dns,netty-codec-haproxy,netty-codec-http,netty-codec-http2 4.1.53.Final
io.netty netty-codec-memcache,netty-codec-mqtt,netty-codec-redis,netty-codec-smtp,netty-codec-socks 4.1.53.Final
io.netty netty-codec-stomp,netty-codec-xml,netty-common,netty-handler,netty-handler-proxy,netty-resolver 4.1.53.Final
io.netty netty-resolver-dns,netty-resolver-dns-native-macos,netty-transport 4.1.53.Final
io.netty netty-transport-native-epoll,netty-transport-native-kqueue 4.1.53.Final
io.netty netty-transport-native-unix-common,netty-transport-rxtx,netty-transport-sctp,netty-transport-udt 4.1.53.Final
io.prometheus simpleclient,simpleclient_common,simpleclient_servlet 0.9.0
jline jline
junit junit 4.13.2
org.apache.ant ant
org.apache.commons commons-compress 1.25.0
org.apache.logging.log4j log4j-api,log4j-core,log4j-slf4j-impl 2.17.1
org.codehaus.groovy groovy,groovy-all 3.0.9
org.hamcrest hamcrest
org.slf4j slf4j-api 1.7.32
org.testng testng
org.webjars jquery 3.5.1
org.yaml snakeyaml 2.1
"""


@dataclass(frozen=True, order=True)
class JavaLibrary:
    """A Maven artifact. ``version`` is None if TorchServe's build does not state it."""

    group: str
    name: str
    version: str | None


@dataclass(frozen=True)
class Jar:
    """A jar of the installed TorchServe. ``bundled`` is None if the jar is not that of 0.12.0."""

    name: str
    sha256: str
    bundled: tuple[JavaLibrary, ...] | None


def torchserve_jars() -> tuple[Jar, ...]:
    """Return the jars of the installed TorchServe.

    Raises:
        UserError: TorchServe is not installed.
    """
    try:
        from ts import __file__ as torchserve
    except ImportError:
        raise UserError("TorchServe is not installed") from None
    return tuple(_jar(path) for path in sorted((Path(torchserve).parent / "frontend").glob("*.jar")))


@functools.lru_cache(maxsize=8)
def _jar(path: Path) -> Jar:
    sha256 = sha256_file(path)
    return Jar(path.name, sha256, libraries() if sha256 == _SHA256 else None)


def libraries() -> tuple[JavaLibrary, ...]:
    """Return the libraries in the jar of TorchServe 0.12.0, by group and name."""
    found = []
    for line in _LIBRARIES.strip().splitlines():
        group, names, *version = line.split()
        found += [JavaLibrary(group, name, version[0] if version else None) for name in names.split(",")]
    return tuple(found)
