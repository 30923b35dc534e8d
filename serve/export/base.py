"""The interface of an export target, its input, and the registry of targets."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import yaml
from pydantic import Field, model_validator

from serve.common.config import Config
from serve.runtime.card.card import Card
from serve.runtime.registry import Registry

# A label has 63 characters. Suffixes need some: "-tokens", and KServe's "-predictor".
_LONGEST_NAME = 52


class ExportSettings(Config):
    """How the exported artifact is to be run."""

    image: str = Field(
        default="optimize-and-serve:latest",
        min_length=1,
        description="Image of our own server, as the cluster pulls it; use a digest for a deployment.",
    )
    namespace: str = Field(
        default="default", pattern=r"^[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?$", description="Kubernetes namespace."
    )
    cpus: int = Field(default=2, ge=1, le=256, description="Cores of a replica, and threads of its engine.")
    memory_mb: int = Field(default=4096, ge=256, description="Memory limit of a replica, in MiB.")
    gpus: int = Field(default=0, ge=0, le=1, description="GPUs of a replica, 0 or 1.")
    replicas: int = Field(default=1, ge=1, le=1000, description="Minimum number of replicas.")
    max_replicas: int = Field(
        default_factory=lambda given: max(8, given.get("replicas", 1)),
        ge=1,
        le=1000,
        description="Maximum number of replicas; by default 8, or the minimum if that is larger.",
    )
    queue_ms: int = Field(
        default=20, ge=1, description="Mean wait for the engine above which replicas are added, in ms."
    )

    @model_validator(mode="after")
    def _check_order(self) -> Self:
        if self.max_replicas < self.replicas:
            raise ValueError(f"max_replicas must be at least replicas ({self.replicas}), got {self.max_replicas}")
        return self


@dataclass(frozen=True)
class Subject:
    """The artifact to export, with its settings.

    Attributes:
        name: its served name, ``<run>-<artifact>``.
        folder: the artifact's folder.
        card: its card.
        settings: how it will run.
        key: key to sign the packed archive. None: no signature.
        public_key: key to verify it at the target. None if ``key`` is None.
        password: password of the key, if it has one.
    """

    name: str
    folder: Path
    card: Card
    settings: ExportSettings
    key: Path | None = None
    public_key: Path | None = None
    password: str | None = None


@dataclass(frozen=True)
class Target:
    """A system that serves elsewhere.

    Attributes:
        name: its name on the command line.
        write: writes the files for a subject into an empty folder, and returns the next steps for the user, a line
            each.
        format: the only format of model files that it opens. None: any, like the own server.
        ignores: fields of `ExportSettings` that have no effect here.
        signs: whether it gets an archive, which can be signed.
    """

    name: str
    write: Callable[[Subject, Path], Sequence[str]]
    format: str | None = None
    ignores: frozenset[str] = frozenset()
    signs: bool = True


_REGISTRY: Registry[Target] = Registry("export target", package=__package__, group="serve.exports")


def register(target: Target) -> Target:
    """Add a target to the registry.

    Raises:
        ValueError: the name is taken.
    """
    return _REGISTRY.register(target)


def find_target(name: str) -> Target:
    """Return the target of a name.

    Raises:
        UserError: there is none. The message lists all.
    """
    return _REGISTRY.find(name)


def targets() -> dict[str, Target]:
    """Return every target by name."""
    return _REGISTRY.all()


def dns_name(name: str) -> str:
    """Convert a name for Kubernetes objects (RFC 1035): ``resnet18-onnx_int8`` becomes ``resnet18-onnx-int8``.

    The result begins with a letter, as a Service needs it. A long name is cut and ends with a hash of the whole,
    because the names of a run's artifacts begin alike.
    """
    legal = "".join(letter if letter.isascii() and letter.isalnum() else "-" for letter in name.lower()).strip("-")
    if not legal[:1].isalpha():
        legal = f"m-{legal}".rstrip("-")
    if len(legal) > _LONGEST_NAME:
        digest = hashlib.sha256(name.encode("utf-8", "surrogatepass")).hexdigest()[:8]
        legal = f"{legal[: _LONGEST_NAME - 9].rstrip('-')}-{digest}"
    return legal


def write_yaml(path: Path, documents: Sequence[Mapping[str, Any]]) -> None:
    """Write documents as one YAML file, with keys in the given order."""
    path.write_text(yaml.safe_dump_all(documents, sort_keys=False, width=120), encoding="utf-8")
