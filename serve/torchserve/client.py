"""A small client for the endpoint: predictions, health, descriptions, metrics, and tokens."""

from __future__ import annotations

import contextlib
import json
import os
import time
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, Self

import httpx

from serve.common.hints import command
from serve.load.workload import instances_body
from serve.runtime.errors import PipelineError, UserError
from serve.torchserve.configuration import HOST, Ports

KEY_FILE = "key_file.json"
HEADER_FILE = "authorization"

#: Keys are renewed when they are valid for less than this, in seconds.
_RENEW_BEFORE_S = 30.0

# A removal waits until the model's requests are answered.
_REMOVAL_S = 600.0


class ServerError(PipelineError):
    """The server does not answer, or answers with an error. ``status`` is its HTTP status, 0 without an answer."""

    def __init__(self, message: str, status: int = 0) -> None:
        super().__init__(message)
        self.status = status


class Client:
    """A client of one running server on loopback.

    Args:
        ports: the server's ports.
        state: the server's private folder with its keys (see `state.state_folder`).
        timeout_s: longest wait for one answer, in seconds.
        address: address of predictions, if not on loopback.
    """

    def __init__(self, ports: Ports, state: Path, timeout_s: float = 60.0, *, address: str | None = None) -> None:
        self._address = address or f"http://{HOST}:{ports.inference}"
        self._ports = ports
        self._state = state
        # Loopback needs no proxy from the environment.
        self._http = httpx.Client(timeout=timeout_s, trust_env=False)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Close the connections."""
        self._http.close()

    def predict(
        self, model: str, image: bytes, *, headers: Mapping[str, str] | None = None, version: str | None = None
    ) -> Any:
        """Return the answer to one encoded image, from its JSON: for a classifier the classes, best first.

        Args:
            model: name of the model.
            image: the file's bytes.
            headers: headers with parameters of the model's task, for example ``X-Top-K``. None: the archive's defaults.
            version: version of the model. None: its default version.

        Raises:
            ServerError: the server does not answer, or refuses the image with this message.
        """
        return self._predict(_versioned(model, version), headers or {}, content=image).json()

    def predict_instances(
        self, model: str, images: Sequence[bytes], *, headers: Mapping[str, str] | None = None
    ) -> list[Any]:
        """Return the answers to several images in one request. Refused ones have ``{"error": …}``.

        Raises:
            ServerError: see `predict`. Also if every image was refused.
        """
        sent = {**(headers or {}), "Content-Type": "application/json"}
        predictions: list[Any] = self._predict(model, sent, content=instances_body(images)).json()["predictions"]
        return predictions

    def ping(self) -> str:
        """Return ``Healthy``, ``Partial Healthy`` or ``Unhealthy``. It needs no token."""
        try:
            return str(self._request("GET", self._ports.inference, "/ping", None).json()["status"])
        except ServerError as error:
            if error.status != 503:
                raise
            return "Unhealthy"

    def models(self) -> list[str]:
        """Return the names of all registered models."""
        listed = self._send("GET", "/models", kind="management", params={"limit": 1000}).json()["models"]
        return sorted(str(entry["modelName"]) for entry in listed)

    def workers(self, model: str, version: str | None = None) -> list[dict[str, Any]]:
        """Return TorchServe's records of a model's workers: ``id``, ``pid``, ``status`` (``READY`` when loaded)."""
        workers: list[dict[str, Any]] = self.registered(model, version)["workers"]
        return workers

    def describe(self, model: str, version: str | None = None) -> dict[str, Any]:
        """Return the handler's description: artifact, precision, provider, device, and the answering process."""
        described: dict[str, Any] = self._describe(_versioned(model, version), {"customized": "true"})[
            "customizedMetadata"
        ]
        return described

    def registered(self, model: str, version: str | None = None) -> dict[str, Any]:
        """Return TorchServe's record of a model: ``modelVersion``, ``minWorkers``, ``workers``, ``responseTimeout``."""
        return self._describe(_versioned(model, version), {})

    def versions(self, model: str) -> list[str]:
        """Return all registered versions of a model."""
        listed = self._send("GET", f"/models/{model}/all", kind="management").json()
        return [str(entry["modelVersion"]) for entry in listed]

    def register(self, model: str, file: str, *, workers: int) -> None:
        """Register an archive from the server's own folder. It returns before the workers have loaded.

        Args:
            model: name for the model. If the name exists, this becomes another version of it. Until `set_default` it
                gets only requests with its version.
            file: the archive's name in the folder.
            workers: number of workers to start.

        Raises:
            ServerError: the archive is refused, or the version exists.
        """
        words = {"url": file, "model_name": model, "initial_workers": workers, "synchronous": "false"}
        self._send("POST", "/models", kind="management", params=words)

    def set_default(self, model: str, version: str) -> None:
        """Send requests without a version to this one."""
        self._send("PUT", f"/models/{model}/{version}/set-default", kind="management")

    def unregister(self, model: str, version: str | None = None) -> None:
        """Unregister a model, and return when its requests are answered. It does nothing for an unknown model.

        Raises:
            ServerError: it is the default version and there are others.
        """
        try:
            path = f"/models/{_versioned(model, version)}"
            self._send("DELETE", path, kind="management", timeout=_REMOVAL_S)
        except ServerError as error:
            if error.status != 404:
                raise

    def metrics(self) -> str:
        """Return all metrics in Prometheus' text format."""
        return self._send("GET", "/metrics", kind="metrics").text

    def renew_keys(self) -> None:
        """Make the server create new inference and management keys, and rewrite the file for curl."""
        for kind in ("management", "inference"):
            self._request("GET", self._ports.management, "/token", self._keys()["API"]["key"], params={"type": kind})
        self.write_header_file()

    def write_header_file(self) -> Path:
        """Write the inference key as a header into a private file, for ``curl -H @FILE``, if it has changed.

        Raises:
            UserError: the file cannot be written.
        """
        path = self._state / HEADER_FILE
        line = f"Authorization: Bearer {self._keys()['inference']['key']}\n"
        with contextlib.suppress(OSError, ValueError):
            if path.read_text(encoding="utf-8") == line:
                return path
        temporary = self._state / f".{HEADER_FILE}.{os.getpid()}"
        try:
            temporary.unlink(missing_ok=True)
            descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
            with os.fdopen(descriptor, "w") as stream:
                stream.write(line)
            temporary.replace(path)
        except OSError as error:
            temporary.unlink(missing_ok=True)
            raise UserError(f"{path}: cannot be written ({error.strerror or error})") from None
        return path

    def _predict(self, model: str, headers: Mapping[str, str], content: bytes) -> httpx.Response:
        # TorchServe 0.12 drops the query string of /predictions/NAME.
        sent = {name: value.encode() for name, value in headers.items()}  # as UTF-8: httpx takes text in ASCII only
        return self._send("POST", f"/predictions/{model}", headers=sent, content=content)

    def _describe(self, model: str, params: dict[str, str]) -> dict[str, Any]:
        answer: list[dict[str, Any]] = self._send("GET", f"/models/{model}", kind="management", params=params).json()
        return answer[0]

    def _send(
        self,
        method: str,
        path: str,
        *,
        kind: Literal["inference", "management", "metrics"] = "inference",
        **content: Any,
    ) -> httpx.Response:
        port: int = getattr(self._ports, kind)
        return self._request(method, port, path, None if kind == "metrics" else self._key(kind), **content)

    def _request(self, method: str, port: int, path: str, key: str | None, **content: Any) -> httpx.Response:
        headers = content.pop("headers", {}) | ({} if key is None else {"Authorization": f"Bearer {key}"})
        base = self._address if port == self._ports.inference else f"http://{HOST}:{port}"
        try:
            answer = self._http.request(method, f"{base}{path}", headers=headers, **content)
        except httpx.ConnectError:
            raise ServerError(
                f"no server answers on port {port}: start one with `{command('serve start RUN')}`"
            ) from None
        except httpx.HTTPError as error:
            raise ServerError(f"{method} {path}: no response ({type(error).__name__}: {error})") from None
        if answer.is_success:
            return answer
        raise ServerError(_message(answer), answer.status_code)

    def _keys(self) -> dict[str, dict[str, str]]:
        try:
            keys: dict[str, dict[str, str]] = json.loads((self._state / KEY_FILE).read_text(encoding="utf-8"))
        except (OSError, ValueError):
            raise ServerError(
                f"{self._state / KEY_FILE}: the keys of the server cannot be read; is it running?"
            ) from None
        return keys

    def _key(self, kind: str) -> str:
        """Return the key of a kind. It is renewed by the API key, which never expires, shortly before it expires."""
        entry = self._keys()[kind]
        if datetime.fromisoformat(entry["expiration time"]).timestamp() < time.time() + _RENEW_BEFORE_S:
            self.renew_keys()
            entry = self._keys()[kind]
        return entry["key"]


def _versioned(model: str, version: str | None) -> str:
    return model if version is None else f"{model}/{version}"


def _message(answer: httpx.Response) -> str:
    """Return the error's text: the handler's ``error``, or TorchServe's ``message``."""
    try:
        body = answer.json()
        text = body.get("error") or body.get("message")
    except (ValueError, AttributeError):
        text = None
    return str(text or answer.text[:200] or answer.reason_phrase)
