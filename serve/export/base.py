"""What a target of an export is, what it is given, and the registry of them."""

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

# A label of 63, less what is put behind it: "-tokens", and by KServe "-predictor".
_LONGEST_NAME = 52


class ExportSettings(Config):
    """How the exported artifact is to be run."""

    image: str = Field(
        default="optimize-and-serve:latest",
        min_length=1,
        description="The own server's image, as the cluster pulls it; name it by digest for a deployment.",
    )
    namespace: str = Field(
        default="default", pattern=r"^[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?$", description="Kubernetes namespace."
    )
    cpus: int = Field(default=2, ge=1, le=256, description="Cores of a replica, which its engine is given threads for.")
    memory_mb: int = Field(default=4096, ge=256, description="Most memory of a replica, in MiB.")
    gpus: int = Field(default=0, ge=0, le=1, description="GPUs of a replica; a worker uses one.")
    replicas: int = Field(default=1, ge=1, le=1000, description="Fewest replicas.")
    max_replicas: int = Field(
        default_factory=lambda given: max(8, given.get("replicas", 1)),
        ge=1,
        le=1000,
        description="Most replicas; by default 8, or as many as the fewest.",
    )
    queue_ms: int = Field(
        default=20, ge=1, description="Mean time that requests wait for the engine, above which replicas are added."
    )

    @model_validator(mode="after")
    def _bounds_are_in_order(self) -> Self:
        if self.max_replicas < self.replicas:
            raise ValueError(f"max_replicas must be at least replicas, {self.replicas}, and is {self.max_replicas}")
        return self


@dataclass(frozen=True)
class Subject:
    """What is exported.

    Attributes:
        name: what it is served as, ``<run>-<artifact>``.
        folder: the artifact's.
        card: its card.
        settings: how it is to be run.
        key: signs the archive that is packed; None: it is not signed.
        public_key: what it is verified with there; None where ``key`` is.
        password: the key's, if it has one.
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
    """Something that serves elsewhere.

    Attributes:
        name: the word for it on the command line.
        write: writes its files for a subject into an empty folder, and returns what whoever has them does next,
            a line each.
        format: the only format of model files that it opens; None: any, as the own server does.
        ignores: of `ExportSettings`, what it has no use for.
        signs: whether it is given an archive, which can be signed.
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
        ValueError: its name is taken.
    """
    return _REGISTRY.register(target)


def find_target(name: str) -> Target:
    """The target of a name.

    Raises:
        UserError: there is none; the message names those that there are.
    """
    return _REGISTRY.find(name)


def targets() -> dict[str, Target]:
    """Every target by name."""
    return _REGISTRY.all()


def dns_name(name: str) -> str:
    """A name as Kubernetes takes it for all that is made (RFC 1035): ``resnet18-onnx_int8`` is ``resnet18-onnx-int8``.

    It begins with a letter, as a Service's must. One that is too long is cut, and ends with a hash of the whole: the
    names of a run's artifacts begin alike.
    """
    legal = "".join(letter if letter.isascii() and letter.isalnum() else "-" for letter in name.lower()).strip("-")
    if not legal[:1].isalpha():
        legal = f"m-{legal}".rstrip("-")
    if len(legal) > _LONGEST_NAME:
        digest = hashlib.sha256(name.encode("utf-8", "surrogatepass")).hexdigest()[:8]
        legal = f"{legal[: _LONGEST_NAME - 9].rstrip('-')}-{digest}"
    return legal


def write_yaml(path: Path, documents: Sequence[Mapping[str, Any]]) -> None:
    """Write documents as one YAML file, keys in the order that they are given."""
    path.write_text(yaml.safe_dump_all(documents, sort_keys=False, width=120), encoding="utf-8")
