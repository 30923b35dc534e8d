"""``kubernetes``: a deployment of the own server, with autoscaler, disruption budget and network policy."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from serve.export import image
from serve.export.base import Subject, Target, dns_name, register, write_yaml

#: Name of the pods' mean queue time, in seconds, in the rule for Prometheus' adapter.
QUEUE_METRIC = "serve_queue_seconds_mean"
#: Labels of the pods and namespaces that may send requests, and that may scrape.
CLIENT = {"serve-client": "true"}
MONITORING = {"kubernetes.io/metadata.name": "monitoring"}


def write(subject: Subject, folder: Path) -> Sequence[str]:
    """Write manifests, the PodMonitor, the adapter's rule and the image's files. See `base.Target`."""
    image.write_image(subject, folder / "image")
    name = dns_name(subject.name)
    write_yaml(folder / "manifests.yaml", manifests(subject, name))
    write_yaml(folder / "podmonitor.yaml", [pod_monitor(subject.settings.namespace, name)])
    write_yaml(folder / "prometheus-adapter.yaml", [adapter_rules()])
    return [
        *image.build_lines(subject),
        "create the secret of tokens (one per line), then apply:",
        image.secret_line(subject.settings.namespace, name),
        "  kubectl apply -f FOLDER/manifests.yaml",
        f"the autoscaler changes nothing until Prometheus collects {QUEUE_METRIC}:",
        image.scrape_secret_line(subject.settings.namespace, name),
        "  kubectl apply -f FOLDER/podmonitor.yaml (needs the Prometheus operator and a matching podMonitorSelector)",
        "  and add the rule in prometheus-adapter.yaml to prometheus-adapter",
        f"pods with the label {'='.join(*CLIENT.items())} may send requests",
    ]


def manifests(subject: Subject, name: str) -> list[dict[str, Any]]:
    """Return all objects of one model: deployment, service, autoscaler, disruption budget, network policy, account."""
    settings = subject.settings
    labels = {"app.kubernetes.io/name": name, "app.kubernetes.io/managed-by": "optimize-and-serve"}
    chosen = {"app.kubernetes.io/name": name}
    metadata = {"name": name, "namespace": settings.namespace, "labels": labels}
    found = image.mounts(subject, name)
    pod = {
        "serviceAccountName": name,
        "automountServiceAccountToken": False,
        "enableServiceLinks": False,
        "securityContext": image.pod_security(),
        "terminationGracePeriodSeconds": image.grace_s(),
        "containers": [image.container(subject, found, name="server")],
        "volumes": image.volumes(found),
        "topologySpreadConstraints": [
            {
                "maxSkew": 1,
                "topologyKey": "kubernetes.io/hostname",
                "whenUnsatisfiable": "ScheduleAnyway",
                "labelSelector": {"matchLabels": chosen},
            }
        ],
    }
    deployment = {
        "apiVersion": "apps/v1",
        "kind": "Deployment",
        "metadata": metadata,
        "spec": {
            # Without replicas: the autoscaler sets them, and another apply would undo that.
            "selector": {"matchLabels": chosen},
            "strategy": {"type": "RollingUpdate", "rollingUpdate": {"maxUnavailable": 0, "maxSurge": 1}},
            "template": {"metadata": {"labels": labels}, "spec": pod},
        },
    }
    service = {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": metadata,
        "spec": {
            "type": "ClusterIP",
            "selector": chosen,
            "ports": [{"name": "http", "port": 80, "targetPort": "http", "protocol": "TCP"}],
        },
    }
    account = {
        "apiVersion": "v1",
        "kind": "ServiceAccount",
        "metadata": metadata,
        "automountServiceAccountToken": False,
    }
    budget = {
        "apiVersion": "policy/v1",
        "kind": "PodDisruptionBudget",
        "metadata": metadata,
        "spec": {"maxUnavailable": 1, "selector": {"matchLabels": chosen}},
    }
    keys = image.keys_map(subject, metadata, name)
    return [
        account,
        *([keys] if keys is not None else []),
        deployment,
        service,
        _autoscaler(subject, metadata, name),
        budget,
        _network_policy(metadata, chosen),
    ]


def _autoscaler(subject: Subject, metadata: dict[str, Any], name: str) -> dict[str, Any]:
    settings = subject.settings
    metric = {
        "metric": {"name": QUEUE_METRIC},
        "target": {"type": "AverageValue", "averageValue": f"{settings.queue_ms}m"},
    }
    return {
        "apiVersion": "autoscaling/v2",
        "kind": "HorizontalPodAutoscaler",
        "metadata": metadata,
        "spec": {
            "scaleTargetRef": {"apiVersion": "apps/v1", "kind": "Deployment", "name": name},
            "minReplicas": settings.replicas,
            "maxReplicas": settings.max_replicas,
            "metrics": [{"type": "Pods", "pods": metric}],
            # A replica needs half a minute to be ready. One that is removed too soon is missing at the next peak.
            "behavior": {
                "scaleUp": {"stabilizationWindowSeconds": 30},
                "scaleDown": {"stabilizationWindowSeconds": 300},
            },
        },
    }


def _network_policy(metadata: dict[str, Any], chosen: dict[str, str]) -> dict[str, Any]:
    callers = [{"podSelector": {"matchLabels": CLIENT}}, {"namespaceSelector": {"matchLabels": MONITORING}}]
    return {
        "apiVersion": "networking.k8s.io/v1",
        "kind": "NetworkPolicy",
        "metadata": metadata,
        "spec": {
            "podSelector": {"matchLabels": chosen},
            "policyTypes": ["Ingress", "Egress"],
            "ingress": [{"from": callers, "ports": [{"port": "http", "protocol": "TCP"}]}],
            "egress": [],  # it sends no requests
        },
    }


def pod_monitor(namespace: str, name: str) -> dict[str, Any]:
    """Return the scrape configuration for Prometheus' operator, with a token from its own Secret.

    A pod's own token file has several lines. The PodMonitor is in its own file, because a cluster without the operator
    refuses the kind.
    """
    return {
        "apiVersion": "monitoring.coreos.com/v1",
        "kind": "PodMonitor",
        "metadata": {"name": name, "namespace": namespace},
        "spec": {
            "selector": {"matchLabels": {"app.kubernetes.io/name": name}},
            "podMetricsEndpoints": [
                {
                    "port": "http",
                    "path": "/metrics",
                    "interval": "15s",  # the autoscaler's rule uses the last minute
                    "authorization": {
                        "type": "Bearer",
                        "credentials": {"name": f"{name}-scrape", "key": image.SCRAPE_KEY},
                    },
                }
            ],
        },
    }


def adapter_rules() -> dict[str, Any]:
    """Return the rule for prometheus-adapter that computes `QUEUE_METRIC` from the server's ``/metrics``."""
    window = '{<<.LabelMatchers>>,stage="queue"}[1m]'
    query = (
        f"sum(rate(serve_stage_seconds_sum{window})) by (<<.GroupBy>>) / "
        f"clamp_min(sum(rate(serve_stage_seconds_count{window})) by (<<.GroupBy>>), 1e-9)"
    )
    return {
        "rules": [
            {
                "seriesQuery": 'serve_stage_seconds_count{namespace!="",pod!="",stage="queue"}',
                "resources": {"overrides": {"namespace": {"resource": "namespace"}, "pod": {"resource": "pod"}}},
                "name": {"as": QUEUE_METRIC},
                "metricsQuery": query,
            }
        ]
    }


KUBERNETES = register(Target("kubernetes", write))
