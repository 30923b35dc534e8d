"""TorchServe 0.12's configuration: ports, ``config.properties``, metrics. No process is started here."""

from __future__ import annotations

import os
import socket
from dataclasses import asdict, dataclass
from ipaddress import IPv4Address
from pathlib import Path
from typing import Any

import yaml

from serve.runtime.errors import UserError
from serve.torchserve.limits import MIB, Limits
from serve.torchserve.metrics import STAGE_METRICS

HOST = "127.0.0.1"

# Keys would expire after 60 minutes, and so would the printed curl line. They are in a 0600 file of a 0700 folder and
# are new at each start, so they stay valid as long as a server runs. The client renews older ones.
TOKEN_LIFE_MIN = 365 * 24 * 60

# TorchServe's default is 6.5 MB.
RESPONSE_LIMIT_BYTES = 64 * MIB


@dataclass(frozen=True)
class Ports:
    """The server's ports, on loopback only."""

    inference: int = 8080
    management: int = 8081
    metrics: int = 8082
    grpc_inference: int = 7070
    grpc_management: int = 7071

    def check_free(self, host: str = HOST) -> None:
        """Check that each port can be bound now.

        Args:
            host: the address of predictions. All others are on loopback.

        Raises:
            UserError: a port is out of range, given twice, or in use.
        """
        ports = asdict(self)
        if len(set(ports.values())) < len(ports):
            raise UserError(f"the server needs {len(ports)} different ports, got {', '.join(map(str, ports.values()))}")
        for purpose, port in ports.items():
            option = "--port" if purpose == "inference" else f"--{purpose.replace('_', '-')}-port"
            if not 1 <= port <= 65535:
                raise UserError(f"{option} must be between 1 and 65535, got {port}")
            with socket.socket() as probe:
                # As Java does: a connection of the last server in TIME_WAIT does not matter.
                probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                try:
                    probe.bind((host if purpose == "inference" else HOST, port))
                except OSError as error:
                    raise UserError(
                        f"port {port} cannot be used for {purpose} ({error.strerror}): stop the program that "
                        f"listens there, or choose another with {option}"
                    ) from None


def check_host(host: str, *, expose: bool) -> str:
    """Return the address for predictions, as digits.

    Args:
        host: an IPv4 address, or ``localhost``.
        expose: whether other machines may connect.

    Raises:
        UserError: the address is invalid, or not on loopback without ``expose``.
    """
    try:
        address = IPv4Address(HOST if host == "localhost" else host)
    except ValueError:
        raise UserError(f"--host must be an IPv4 address, such as 127.0.0.1 or 0.0.0.0, got {host!r}") from None
    if not address.is_loopback and not expose:
        raise UserError(f"--host {host} accepts connections from other machines: add --expose if you want that")
    return str(address)


def properties(
    ports: Ports, limits: Limits, *, archives: Path, metrics_file: Path, gpus: int | None, host: str = HOST
) -> str:
    """Return the text of ``config.properties``.

    Args:
        ports: the ports to listen on.
        limits: the server's limits.
        archives: the only folder from which models may be loaded.
        metrics_file: the project's metrics.yaml.
        gpus: most GPUs to use, 0 for none. None: TorchServe counts them with nvidia-smi.
        host: the address of predictions over HTTP. All else is on loopback.
    """
    threads = max(2, min(4, os.cpu_count() or 1))
    settings: dict[str, object] = {
        "inference_address": f"http://{host}:{ports.inference}",
        "management_address": f"http://{HOST}:{ports.management}",
        "metrics_address": f"http://{HOST}:{ports.metrics}",
        "grpc_inference_address": HOST,
        "grpc_inference_port": ports.grpc_inference,
        "grpc_management_address": HOST,
        "grpc_management_port": ports.grpc_management,
        "disable_token_authorization": "false",
        "token_expiration_min": TOKEN_LIFE_MIN,
        # For `serve add`, `replace` and `remove`, which use the management key, loopback and the server's own folder.
        "enable_model_api": "true",
        "allowed_urls": f"{archives.as_uri()}/.*",
        "install_py_dep_per_model": "false",
        "enable_envvars_config": "false",
        "metrics_mode": "prometheus",
        "metrics_config": metrics_file,
        # Else a Python process starts every minute, to measure the same as a node exporter.
        "disable_system_metrics": "true",
        "max_request_size": limits.body_mb * MIB,
        "max_response_size": RESPONSE_LIMIT_BYTES,
        "job_queue_size": limits.queue,
        "number_of_netty_threads": threads,
        "netty_client_threads": threads,
        # The handler parses JSON itself, with clear error messages.
        "decode_input_request": "false",
        "default_workers_per_model": 1,
    }
    if gpus is not None:
        settings["number_of_gpu"] = gpus
    return "".join(f"{name}={_escape(str(value))}\n" for name, value in settings.items())


def metrics_yaml() -> str:
    """Return TorchServe's own metrics and the handler's, in the format of its ``metrics.yaml``.

    Dimensions are matched by their order (see `serve.torchserve.metrics`). TorchServe adds ``Hostname`` to each list,
    so each metric needs its own list. A shared YAML alias would collect one for every metric.
    """
    from ts import __file__ as torchserve

    stock = Path(torchserve).parent / "configs" / "metrics.yaml"
    config: dict[str, Any] = yaml.safe_load(stock.read_text(encoding="utf-8"))
    ours = ["ModelName", "Level", "Provider", "Execution"]
    config["model_metrics"]["gauge"] += [
        {"name": "BatchSize", "unit": "count", "dimensions": [*ours]},
        # ``Models.groovy`` removes it with its version.
        {
            "name": "PassedOver",
            "unit": "count",
            "dimensions": ["ModelName", "ModelVersion", "Level", "Execution", "Reason"],
        },
    ]
    # TorchServe 0.12 gives every histogram the buckets of Prometheus' Java client, 0.005 to 10, whatever the unit. In
    # milliseconds they resolve the short stages. Longer ones are above the last bucket, and in the sum.
    config["model_metrics"]["histogram"] = [
        {"name": metric, "unit": "ms", "dimensions": [*ours]} for metric in STAGE_METRICS.values()
    ]
    config["model_metrics"]["counter"] = [
        {"name": "Images", "unit": "count", "dimensions": [*ours]},
        {"name": "Refused", "unit": "count", "dimensions": [*ours, "Kind"]},
    ]
    return str(yaml.safe_dump(config, sort_keys=False))


def _escape(value: str) -> str:
    r"""Escape a value for a Java properties file: Latin-1, with ``\`` and ``\uXXXX``."""
    # TorchServe would replace $$NAME$$ by an environment variable. A single dollar is harmless.
    units = value.replace("\\", "\\\\").encode("utf-16-be")
    codes = [int.from_bytes(units[i : i + 2], "big") for i in range(0, len(units), 2)]
    return "".join(chr(code) if 32 <= code < 127 else f"\\u{code:04x}" for code in codes)
