"""The own server's image, and a container of it: what Kubernetes and KServe run."""

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
#: Whose archives the image holds, see the Dockerfiles.
_MODELS = "/models"
_USER = 10001
TOKENS = "tokens"
SCRAPE_KEY = "token"
#: Libraries are imported and sessions opened on a cold disk; the probe's limit, in seconds.
_START_S = 300
_DRAIN_S = 30


@dataclass(frozen=True)
class Mount:
    """A volume and where the container sees it; ``volume`` is Kubernetes' own record of it."""

    path: str
    volume: Mapping[str, Any]
    read_only: bool = False


def write_image(subject: Subject, folder: Path) -> None:
    """Write what the image is built of: the archive, packed for its cores, and a Dockerfile.

    Raises:
        UserError: the artifact cannot be served so.
    """
    if (subject.key is None) != (subject.public_key is None):
        raise UserError("a signed export needs both keys: --sign KEY to sign with, --public-key to verify with there")
    models = folder / "models"
    models.mkdir(parents=True)
    # One core per thread there, whatever the node has: a container's share of the node's cores is not seen in it. For
    # the same reason one process, however many were tuned for this machine: a cluster has replicas.
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
    """What a container of the server sees of the cluster, by the volume's name.

    Args:
        subject: what is served.
        name: what the objects are called.
    """
    found = {
        TOKENS: Mount(
            "/run/secrets/tokens", {"secret": {"secretName": f"{name}-tokens", "defaultMode": 0o440}}, read_only=True
        ),
        # The verified copy of the archive, unpacked; the only places that it can write to.
        "work": Mount("/tmp", {"emptyDir": {"sizeLimit": "4Gi"}}),
        "cache": Mount("/cache", {"emptyDir": {"sizeLimit": "4Gi"}}),
    }
    if subject.public_key is not None:
        found["keys"] = Mount("/run/keys", {"configMap": {"name": f"{name}-keys"}}, read_only=True)
    return found


def volumes(found: Mapping[str, Mount]) -> list[dict[str, Any]]:
    """The volumes of a pod."""
    return [{"name": name, **mount.volume} for name, mount in found.items()]


def container(subject: Subject, found: Mapping[str, Mount], *, name: str, model: str | None = None) -> dict[str, Any]:
    """A container of the server: not root, nothing to write but its mounts, asked whether it lives and is ready.

    Args:
        subject: what is served.
        found: its mounts.
        name: the container's.
        model: what requests call the model; None: as its archive is called.
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
        # No limit of cores: a container that is held back in the middle of a batch answers late, and idle cores wait.
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
    """The security context of a pod: this user, and its group, to whom secrets are readable."""
    return {
        "fsGroup": _USER,
        "runAsGroup": _USER,
        "runAsNonRoot": True,
        "runAsUser": _USER,
        "seccompProfile": {"type": "RuntimeDefault"},
    }


def grace_s() -> int:
    """Seconds between SIGTERM and SIGKILL: what was accepted is answered first."""
    return _DRAIN_S + 15


def keys_map(subject: Subject, metadata: Mapping[str, Any], name: str) -> dict[str, Any] | None:
    """The public key as Kubernetes holds it; None where nothing is signed.

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
    """How the image is built, from the project's root."""
    return [
        "build the image in the project's folder:",
        f"  docker build -f FOLDER/image/Dockerfile --build-context models=FOLDER/image/models "
        f"-t {subject.settings.image} .",
    ]


def secret_line(namespace: str, name: str) -> str:
    """How the tokens get there: no file of an export holds one."""
    return f"  kubectl -n {namespace} create secret generic {name}-tokens --from-file=tokens=TOKENS"


def scrape_secret_line(namespace: str, name: str) -> str:
    """How the token that Prometheus scrapes with gets there: one of the tokens, without the end of its line."""
    return (
        f"  head -n 1 TOKENS | tr -d '\\n' | kubectl -n {namespace} create secret generic {name}-scrape "
        f"--from-file={SCRAPE_KEY}=/dev/stdin"
    )
