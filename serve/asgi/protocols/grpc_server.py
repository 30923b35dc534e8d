"""gRPC server of the Open Inference Protocol, with the models, queues, tokens and observers of the HTTP server.

It runs in the application's event loop. The service gets the client's deadline. A cancelled request is not computed.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import TYPE_CHECKING, Any

import grpc
import grpc.aio

from serve.asgi.http.application import CLIENT_GONE, fault, server_timing
from serve.asgi.http.inference_call import ClientGoneError, InferenceCall
from serve.asgi.http.listen_sockets import Listening
from serve.asgi.http.messages import RefusedError, bad_request, written
from serve.asgi.http.tls import Secrets, Tls
from serve.asgi.protocols import oip, oip_grpc
from serve.asgi.protocols.grpc_admission import MessageAdmission
from serve.asgi.protocols.oip_messages import SERVICE, message, read_message
from serve.asgi.protocols.oip_routes import project_version, refusal, signature
from serve.runtime.errors import RequestError, UserError
from serve.runtime.service.observation import Observation, request_id

if TYPE_CHECKING:
    from serve.asgi.http.application import Application

_LOG = logging.getLogger(__name__)
_PUBLIC = ("ServerLive", "ServerReady")
_METADATA_BYTES = 16 * 1024


class GrpcServer:
    """The gRPC service of one application.

    Args:
        application: answers the requests. Clients need a token if the application has tokens.
        listening: gives host and certificate.
        port: the port. 0 takes a free one, which ``port`` then shows.
        grace_s: seconds for open requests when the server stops, but not after the application's own end.
        shared: whether other processes of this user may listen at the port too.
    """

    def __init__(
        self,
        application: Application,
        listening: Listening | None = None,
        *,
        port: int = 0,
        grace_s: float = 30.0,
        shared: bool = False,
    ) -> None:
        self.application = application
        self.port = port
        self._shared = shared
        self._listening = listening or Listening()
        self._grace_s = grace_s
        limits = application.limits
        self._admission = MessageAdmission(max(1, limits.held_bytes // limits.body_bytes), limits.body_s)
        self._server: Any = None

    def attach(self) -> None:
        """Start and stop together with the application."""
        self.application.on_start.append(self.start)
        self.application.on_stop.append(self.stop)

    async def start(self) -> None:
        """Start to listen.

        Raises:
            UserError: the address cannot be used.
        """
        limits = self.application.limits
        server = grpc.aio.server(
            maximum_concurrent_rpcs=limits.connections,
            options=[
                ("grpc.max_receive_message_length", limits.body_bytes),
                ("grpc.max_send_message_length", -1),
                ("grpc.max_metadata_size", _METADATA_BYTES),
                ("grpc.max_allowed_incoming_connections", limits.connections),
                # Until the HTTP/2 preface is complete. grpc's default is two minutes.
                ("grpc.server_handshake_timeout_ms", round(limits.head_s * 1000)),
                ("grpc.http2.settings_timeout", round(limits.head_s * 1000)),
                ("grpc.max_connection_idle_ms", limits.keep_alive_s * 1000),
                # Keep HTTP/2's first window for an unread message. The probe would let it grow with the bandwidth.
                ("grpc.http2.bdp_probe", 0),
                # Else a second server could share the port, and take some of the requests.
                ("grpc.so_reuseport", int(self._shared)),
            ],
        )
        methods: dict[str, Callable[[Any, _GrpcRequest], Awaitable[Any]]] = {
            "ServerLive": self._server_live,
            "ServerReady": self._server_ready,
            "ModelReady": self._model_ready,
            "ServerMetadata": self._server_metadata,
            "ModelMetadata": self._model_metadata,
            "ModelInfer": self._model_infer,
        }
        handlers = {
            # Handlers get a stream and read one message of it. The token is checked before the message is received.
            name: grpc.stream_unary_rpc_method_handler(
                self._handler(name, method),
                request_deserializer=None,
                response_serializer=lambda response: response.SerializeToString(),
            )
            for name, method in methods.items()
        }
        server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(SERVICE, handlers),))
        host = self._listening.host
        place = f"[{host}]" if ":" in host else host
        credentials = _credentials(self._listening.tls)
        try:
            if credentials is None:
                self.port = server.add_insecure_port(f"{place}:{self.port}")
            else:
                self.port = server.add_secure_port(f"{place}:{self.port}", credentials)
        except RuntimeError:  # its text is about C++
            raise UserError(
                f"gRPC cannot listen at {place}:{self.port}: stop the program that listens there, or choose "
                "another --grpc-port"
            ) from None
        self.application.notes.append(f"gRPC at {place}:{self.port}{'' if credentials is None else ', with TLS'}")
        await server.start()
        self._server = server

    async def stop(self) -> None:
        """Stop accepting requests, and wait for open ones."""
        if self._server is not None:
            await self._server.stop(min(self._grace_s, self.application.ends_in))
            self._server = None

    def _handler(
        self, name: str, method: Callable[[Any, _GrpcRequest], Awaitable[Any]]
    ) -> Callable[[Any, Any], Awaitable[Any]]:
        async def answer(messages: AsyncIterator[bytes], context: Any) -> Any:
            rpc = _GrpcRequest(name, context)
            self.application.in_flight += 1
            try:
                response = await self._answer(method, messages, rpc)
            finally:
                self.application.in_flight -= 1
                self.application.held.bytes -= rpc.kept + rpc.answer
                self.application.observe(rpc.observation, rpc.arrived)
            if isinstance(response, RefusedError):
                code = grpc.StatusCode[oip_grpc.STATUSES.get(response.status, "UNKNOWN")]
                text, trailers = str(response), (*rpc.trailers(), *response.headers)
                # grpc 1.85 keeps this frame in a cycle when it aborts. The traceback of the refusal refers to the
                # message.
                del response
                await context.abort(code, text, trailers)
            context.set_trailing_metadata(rpc.trailers())
            self._count_unread(rpc.answer, context)
            return response

        return answer

    def _count_unread(self, size: int, context: Any) -> None:
        """Count the bytes of a long answer until the client has it, or is gone."""
        if not size:
            return
        held = self.application.held
        held.unread += size

        def done(_: Any) -> None:
            held.unread -= size

        context.add_done_callback(done)

    async def _answer(
        self, method: Callable[[Any, _GrpcRequest], Awaitable[Any]], messages: AsyncIterator[bytes], rpc: _GrpcRequest
    ) -> Any | RefusedError:
        observation = rpc.observation
        observation.status = 200
        try:
            if rpc.method in _PUBLIC:
                return await method(None, rpc)  # the message has no fields, so it need not be received
            if self.application.tokens is not None:
                self.application.tokens.check(rpc.metadata.get("authorization", ""))
            return await method(await self._receive(messages, rpc), rpc)
        except RefusedError as error:
            if error.kind not in observation.refusals:  # the refusal of an image is recorded already
                observation.refusals += (error.kind,)
            observation.status = error.status
            return error
        except (asyncio.CancelledError, ClientGoneError):
            # gRPC cancels on a disconnect or a passed deadline.
            observation.status = CLIENT_GONE
            observation.refusals += ("client-gone",)
            raise
        except Exception as error:  # noqa: BLE001 - gRPC would send the error's text to the client
            refused = fault(error, observation.request_id)
            observation.status, observation.refusals = refused.status, (*observation.refusals, refused.kind)
            return refused

    async def _receive(self, messages: AsyncIterator[bytes], rpc: _GrpcRequest) -> Any:
        """Receive and parse the one message of a request."""
        held = self.application.held
        async with self._admission.turn():
            held.take(0)  # raises if there is no room for a message
            try:
                content = await anext(messages)
            except StopAsyncIteration:
                raise RefusedError(400, "the request has no message", "bad-request") from None
            # grpc 1.85 keeps a message in a cycle if the end of its stream is not read. It would stay until the garbage
            # collector runs.
            whole = await anext(messages, None) is None
            rpc.kept = len(content)
            held.take(rpc.kept)
        if not whole:
            raise RefusedError(400, "the request has more than one message", "bad-request")
        try:
            return read_message(f"{rpc.method}Request", content)
        except ValueError as error:
            raise RefusedError(400, str(error), "bad-request") from None

    async def _server_live(self, _: Any, __: _GrpcRequest) -> Any:
        return message("ServerLiveResponse")(live=True)

    async def _server_ready(self, _: Any, __: _GrpcRequest) -> Any:
        return message("ServerReadyResponse")(ready=self.application.unready is None)

    async def _model_ready(self, request: Any, _: _GrpcRequest) -> Any:
        served = self.application.models.get(request.name, request.version or None)
        return message("ModelReadyResponse")(ready=served.ready)

    async def _server_metadata(self, _: Any, __: _GrpcRequest) -> Any:
        return message("ServerMetadataResponse")(**oip.server_metadata(project_version()))

    async def _model_metadata(self, request: Any, _: _GrpcRequest) -> Any:
        models = self.application.models
        return oip_grpc.write_metadata(signature(models, models.get(request.name, request.version or None)))

    async def _model_infer(self, request: Any, rpc: _GrpcRequest) -> Any:
        models, observation = self.application.models, rpc.observation
        served = models.get(request.model_name, request.model_version or None)
        observation.model, observation.version = served.name, served.version
        with served.held():
            described = signature(models, served)
            try:
                # Pixels are copied into a new layout, which may take long. A thread does it while the loop answers
                # others.
                encoded = all(entry.datatype == "BYTES" for entry in request.inputs)
                inference = (
                    oip_grpc.read(described, request)
                    if encoded
                    else await asyncio.to_thread(oip_grpc.read, described, request)
                )
            except RequestError as error:
                raise bad_request(error) from None
            observation.images = len(inference.request.images)
            answered = await InferenceCall(served, inference.request, rpc.deadline(inference.timeout_s)).answered()
            observation.tell(answered)

            def write() -> Any:
                outputs = oip.write_outputs(described, inference, answered.outcomes)
                return oip_grpc.write(described, served.version, inference, outputs)

            try:
                size = oip.answer_bytes(described, inference, answered.outcomes)
            except RequestError as error:
                raise bad_request(error) from None
            self.application.held.check_answer(size)
            rpc.answer = size
            self.application.held.take(size)
            try:
                return await written(described.task, inference.request, write)
            except RequestError as error:
                raise refusal(error) from None


def _credentials(tls: Tls | None) -> Any:
    """Return credentials that use the newest TLS files at each connection. None: no TLS."""
    if tls is None:
        return None
    secrets = tls.newest

    def renewed() -> Any:
        nonlocal secrets
        if tls.newest is secrets:
            return None
        secrets = tls.newest
        return _configuration(secrets)

    return grpc.dynamic_ssl_server_credentials(_configuration(secrets), renewed, secrets.authorities is not None)


def _configuration(secrets: Secrets) -> Any:
    return grpc.ssl_server_certificate_configuration(((secrets.key, secrets.chain),), secrets.authorities)


class _GrpcRequest:
    """One gRPC request, read from its context."""

    def __init__(self, method: str, context: Any) -> None:
        self.arrived = time.monotonic()
        self.method = method
        self.kept = 0  # bytes of its message
        self.answer = 0  # bytes of a long answer
        self.metadata = {name: value for name, value in context.invocation_metadata() or () if isinstance(value, str)}
        self.observation = Observation(
            request_id(self.metadata.get("x-request-id", "")), f"grpc/{method}", probe=method in _PUBLIC
        )
        self._left = context.time_remaining()

    def deadline(self, timeout_s: float | None) -> float | None:
        """When the client gives up, by gRPC or by the request, in seconds of `time.monotonic`. None: never."""
        limits = [seconds for seconds in (self._left, timeout_s) if seconds is not None]
        return self.arrived + min(limits) if limits else None

    def trailers(self) -> tuple[tuple[str, str], ...]:
        """Return the trailing metadata of the response."""
        observation = self.observation
        found: tuple[tuple[str, str], ...] = (("x-request-id", observation.request_id),)
        if observation.version is not None:
            found += (("x-model-version", observation.version),)
        if observation.stages is not None:
            found += (("server-timing", server_timing(observation, time.monotonic() - self.arrived).decode()),)
        return found
