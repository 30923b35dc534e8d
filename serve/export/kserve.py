"""``kserve``: the own server as a KServe runtime, with an inference service."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from serve.export import image
from serve.export.base import Subject, Target, dns_name, register, write_yaml

#: The format in the runtime's manifest: archives of this project.
FORMAT = "optimize-and-serve"


def write(subject: Subject, folder: Path) -> Sequence[str]:
    """Write the runtime, the inference service and the image's files. See `base.Target`."""
    image.write_image(subject, folder / "image")
    name = dns_name(subject.name)
    write_yaml(folder / "inferenceservice.yaml", manifests(subject, name))
    return [
        *image.build_lines(subject),
        "create the secret of tokens (one per line), then apply:",
        image.secret_line(subject.settings.namespace, name),
        "  kubectl apply -f FOLDER/inferenceservice.yaml",
    ]


def manifests(subject: Subject, name: str) -> list[dict[str, Any]]:
    """Return a ServingRuntime for this one model, whose image has its archive, and the InferenceService."""
    settings = subject.settings
    metadata = {"name": name, "namespace": settings.namespace}
    found = image.mounts(subject, name)
    runtime = {
        "apiVersion": "serving.kserve.io/v1alpha1",
        "kind": "ServingRuntime",
        "metadata": metadata,
        "spec": {
            # Never selected automatically: the image has one model, and would answer for others.
            "supportedModelFormats": [{"name": FORMAT, "version": "1", "autoSelect": False}],
            "protocolVersions": ["v1", "v2"],
            "multiModel": False,
            # KServe uses the InferenceService's name for the model: no capitals, dots or underscores.
            "containers": [image.container(subject, found, name="kserve-container", model=name)],
            "volumes": image.volumes(found),
        },
    }
    service = {
        "apiVersion": "serving.kserve.io/v1beta1",
        "kind": "InferenceService",
        # Deployments, not Knative: the server has its own bounded queue.
        "metadata": {**metadata, "annotations": {"serving.kserve.io/deploymentMode": "RawDeployment"}},
        "spec": {
            "predictor": {
                "minReplicas": settings.replicas,
                "maxReplicas": settings.max_replicas,
                "automountServiceAccountToken": False,
                "securityContext": image.pod_security(),
                "terminationGracePeriodSeconds": image.grace_s(),
                "model": {"modelFormat": {"name": FORMAT, "version": "1"}, "runtime": name, "protocolVersion": "v2"},
            }
        },
    }
    keys = image.keys_map(subject, metadata, name)
    return [*([keys] if keys is not None else []), runtime, service]


KSERVE = register(Target("kserve", write, ignores=frozenset({"queue_ms"})))
