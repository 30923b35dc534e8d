"""The own server's image and a container of it, for Kubernetes and KServe."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from serve.archive.signature import sign
from serve.common.options import ServingOptions
from serve.export.base import Subject
from serve.packing.sbom import write_sbom
from serve.runtime.card.serving import decoders_for
from serve.runtime.errors import UserError
from serve.torchserve.archive_builder import build_archive

PORT = 8080
#: Folder of the archives in the image, see the Dockerfiles.
_MODELS = "/models"
_USER = 10001
TOKENS = "tokens"
SCRAPE_KEY = "token"
#: Limit of the startup probe in seconds: libraries and sessions load from a cold disk.
_START_S = 300
_DRAIN_S = 30


@dataclass(frozen=True)
class Mount:
    """A volume and its path in the container. ``volume`` is Kubernetes' own record of it."""

    path: str
    volume: Mapping[str, Any]
    read_only: bool = False


def write_image(subject: Subject, folder: Path) -> None:
    """Write the image's build files: the archive, packed for its cores, and a Dockerfile.

    Raises:
        UserError: the artifact cannot be served so.
    """
    if (subject.key is None) != (subject.public_key is None):
        raise UserError(
            "a signed export needs two keys: --sign for signing and --public-key for verification in the cluster"
        )
    models = folder / "models"
    models.mkdir(parents=True)
    # One core for each thread, whatever the node has: a container cannot see its share of the node's cores. For the
    # same reason there is one process, however many were tuned for this machine. A cluster uses replicas instead.
    cpus = subject.settings.cpus
    options = ServingOptions(workers=1, threads=cpus, decode_threads=decoders_for(cpus))
    if subject.settings.gpus:
        options = options.on_gpu()
    archive = build_archive(subject.folder, models / f"{subject.name}.mar", model_name=subject.name, options=options)
    write_sbom(archive)
    if subject.key is not None:
        sign(archive, subject.key, password=subject.password)
    kind = "cuda" if subject.settings.gpus else "cpu"
    shutil.copy(Path(__file__).parent / "docker" / f"Dockerfile.{kind}", folder / "Dockerfile")


def mounts(subject: Subject, name: str) -> dict[str, Mount]:
    """Return the mounts of the server's container, by the volume's name.

    Args:
        subject: the artifact.
        name: name of the Kubernetes objects.
    """
    found = {
        TOKENS: Mount(
            "/run/secrets/tokens", {"secret": {"secretName": f"{name}-tokens", "defaultMode": 0o440}}, read_only=True
        ),
        # The verified copy of the archive, unpacked. These are the only writable places.
        "work": Mount("/tmp", {"emptyDir": {"sizeLimit": "4Gi"}}),
        "cache": Mount("/cache", {"emptyDir": {"sizeLimit": "4Gi"}}),
    }
    if subject.public_key is not None:
        found["keys"] = Mount("/run/keys", {"configMap": {"name": f"{name}-keys"}}, read_only=True)
    return found


def volumes(found: Mapping[str, Mount]) -> list[dict[str, Any]]:
    """Return the volumes of a pod."""
    return [{"name": name, **mount.volume} for name, mount in found.items()]


def container(subject: Subject, found: Mapping[str, Mount], *, name: str, model: str | None = None) -> dict[str, Any]:
    """Return a container of the server. It is not root, can write only to its mounts, and has health probes.

    Args:
        subject: the artifact.
        found: its mounts.
        name: name of the container.
        model: the model's name in requests. None: the archive's.
    """
    settings = subject.settings
    limits = {"memory": f"{settings.memory_mb}Mi", **({"nvidia.com/gpu": str(settings.gpus)} if settings.gpus else {})}
    arguments = [
        f"{'' if model is None else f'{model}='}{_MODELS}/{subject.name}.mar",
        *("--host", "0.0.0.0", "--expose", "--port", str(PORT)),
        *("--token-file", f"{found[TOKENS].path}/tokens"),
        *("--device", "cuda" if settings.gpus else "cpu"),
        *("--drain-delay", "5", "--drain-timeout", str(_DRAIN_S)),
    ]
    if "keys" in found:
        arguments += ["--require-signed", f"{found['keys'].path}/release.pub"]
    return {
        "name": name,
        "image": settings.image,
        "args": arguments,
        "env": [{"name": "HOME", "value": "/tmp"}, {"name": "XDG_CACHE_HOME", "value": "/cache"}],
        "ports": [{"name": "http", "containerPort": PORT, "protocol": "TCP"}],
        "startupProbe": _probe("/health/ready", period_s=5, failures=_START_S // 5),
        "livenessProbe": _probe("/health/live", period_s=10, failures=3),
        "readinessProbe": _probe("/health/ready", period_s=5, failures=2),
        # No limit of cores: a throttled container would answer a batch late while cores are idle.
        "resources": {"requests": {"cpu": str(settings.cpus), "memory": f"{settings.memory_mb}Mi"}, "limits": limits},
        "securityContext": {
            "allowPrivilegeEscalation": False,
            "capabilities": {"drop": ["ALL"]},
            "privileged": False,
            "readOnlyRootFilesystem": True,
            "runAsNonRoot": True,
            "runAsUser": _USER,
        },
        "volumeMounts": [
            {"name": volume, "mountPath": mount.path, **({"readOnly": True} if mount.read_only else {})}
            for volume, mount in found.items()
        ],
    }


def pod_security() -> dict[str, Any]:
    """Return the security context of a pod: the server's user, and its group, which may read secrets."""
    return {
        "fsGroup": _USER,
        "runAsGroup": _USER,
        "runAsNonRoot": True,
        "runAsUser": _USER,
        "seccompProfile": {"type": "RuntimeDefault"},
    }


def grace_s() -> int:
    """Return the seconds between SIGTERM and SIGKILL. They allow for accepted requests."""
    return _DRAIN_S + 15


def keys_map(subject: Subject, metadata: Mapping[str, Any], name: str) -> dict[str, Any] | None:
    """Return the public key as a ConfigMap. None without a signature.

    Raises:
        UserError: the key cannot be read.
    """
    if subject.public_key is None:
        return None
    try:
        text = subject.public_key.read_text(encoding="ascii")
    except (OSError, ValueError) as error:
        raise UserError(f"{subject.public_key}: cannot be read ({error})") from None
    return {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": {**metadata, "name": f"{name}-keys"},
        "data": {"release.pub": text},
    }


def _probe(path: str, *, period_s: int, failures: int) -> dict[str, Any]:
    return {
        "httpGet": {"path": path, "port": "http"},
        "periodSeconds": period_s,
        "timeoutSeconds": 3,
        "failureThreshold": failures,
    }


def build_lines(subject: Subject) -> list[str]:
    """Return the steps to build the image, from the project's root."""
    return [
        "build the image in the folder of the project:",
        f"  docker build -f FOLDER/image/Dockerfile --build-context models=FOLDER/image/models "
        f"-t {subject.settings.image} .",
    ]


def secret_line(namespace: str, name: str) -> str:
    """Return the command that creates the tokens' Secret. No exported file has a token."""
    return f"  kubectl -n {namespace} create secret generic {name}-tokens --from-file=tokens=TOKENS"


def scrape_secret_line(namespace: str, name: str) -> str:
    """Return the command that creates the Secret for Prometheus: one of the tokens, without a line end."""
    return (
        f"  head -n 1 TOKENS | tr -d '\\n' | kubectl -n {namespace} create secret generic {name}-scrape "
        f"--from-file={SCRAPE_KEY}=/dev/stdin"
    )
