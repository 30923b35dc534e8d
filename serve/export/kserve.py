"""``kserve``: the own server as a runtime of KServe, and an inference service that uses it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from serve.export import image
from serve.export.base import Subject, Target, dns_name, register, write_yaml

#: What the runtime says that it opens: archives of this project.
FORMAT = "optimize-and-serve"


def write(subject: Subject, folder: Path) -> Sequence[str]:
    """Write the runtime, the inference service and the image's files; see `base.Target`."""
    image.write_image(subject, folder / "image")
    name = dns_name(subject.name)
    write_yaml(folder / "inferenceservice.yaml", manifests(subject, name))
    return [
        *image.build_lines(subject),
        "make the tokens (a line each) known and apply:",
        image.secret_line(subject.settings.namespace, name),
        "  kubectl apply -f FOLDER/inferenceservice.yaml",
    ]


def manifests(subject: Subject, name: str) -> list[dict[str, Any]]:
    """A ServingRuntime for this model alone, whose image holds its archive, and the InferenceService."""
    settings = subject.settings
    metadata = {"name": name, "namespace": settings.namespace}
    found = image.mounts(subject, name)
    runtime = {
        "apiVersion": "serving.kserve.io/v1alpha1",
        "kind": "ServingRuntime",
        "metadata": metadata,
        "spec": {
            # Not chosen by itself: the image holds one model, and another's would be answered by it.
            "supportedModelFormats": [{"name": FORMAT, "version": "1", "autoSelect": False}],
            "protocolVersions": ["v1", "v2"],
            "multiModel": False,
            # KServe asks for a model by the name of its InferenceService: no capitals, dots or underscores.
            "containers": [image.container(subject, found, name="kserve-container", model=name)],
            "volumes": image.volumes(found),
        },
    }
    service = {
        "apiVersion": "serving.kserve.io/v1beta1",
        "kind": "InferenceService",
        # Deployments, and not Knative: what waits is in the server's own bounded queue.
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
