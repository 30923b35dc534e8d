"""Our own server with every protocol, in a thread of the tests' process, over small artifacts."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import uvicorn
import uvloop

from serve.asgi.http.application import Application
from serve.asgi.http.call import Limits
from serve.asgi.http.served_models import Models, Served
from serve.asgi.http.tokens import Tokens
from serve.asgi.process.metrics import Metrics
from serve.asgi.protocols import kserve_v1, oip_routes, predictions
from serve.asgi.protocols.grpc_server import GrpcServer
from serve.runtime.card.execution import Execution
from serve.runtime.card.serving import Serving
from serve.runtime.images.image_preprocessing import load
from serve.runtime.service.predictor import PassedOver, Predictor
from serve.runtime.service.service import Service
from tests.serve import artifacts

TOKEN = "a-token-for-tests"


def bearer() -> dict[str, str]:
    """A dictionary for one request: the client writes into it."""
    return {"authorization": f"Bearer {TOKEN}"}


BODY_LIMIT = 4 * 1024 * 1024
BODY_SECONDS = 4.0
PASSED_OVER = PassedOver("openvino", 'it "does not" run here')


@dataclass
class Running:
    """A server in a thread of its own, and its two addresses."""

    application: Application
    http: str
    grpc: str
    predictor: Predictor

    def probabilities(self, images: list[bytes]) -> Any:
        """What the model gives, without service and server in between."""
        card = self.predictor.card
        return (
            self.predictor.logits(torch.stack([load(image, card.preprocessing) for image in images])).softmax(1).numpy()
        )


@contextmanager
def run_server(
    root: Path, artifact: Path | None = None, engine: str = "onnxruntime", **options: Any
) -> Iterator[Running]:
    """Models ``small`` in two versions, and ``narrow``: one request of it may wait, and it passed something over.

    They are a classifier, unless there is an artifact, which the engine opens.
    """
    folder = artifacts.onnx(root / "onnx") if artifact is None else artifact
    token_file = root / "tokens"
    token_file.write_text(f"{TOKEN}\n")
    token_file.chmod(0o600)
    execution = Execution(engine, threads=1)
    rules = Serving((execution,), k=2, batch_size=4, instance_limit=8, **options)

    def served(name: str, version: str, queue: int, *passed: PassedOver) -> Served:
        predictor = Predictor(folder, execution, max_batch=4, passed_over=passed, serving=rules)
        service = Service(predictor, rules, decode_threads=1, queue_limit=queue)
        return Served(name=name, version=version, predictor=predictor, serving=rules, service=service)

    models = Models()
    small = [served("small", "1.0", 64), served("small", "2.0", 64)]
    models.replace({"small": small, "narrow": [served("narrow", "1.0", 1, PASSED_OVER)]})
    application = Application(
        models, limits=Limits(body_bytes=BODY_LIMIT, body_s=BODY_SECONDS), tokens=Tokens(token_file)
    )
    predictions.add_routes(application)
    kserve_v1.add_routes(application)
    oip_routes.add_routes(application)
    Metrics(application)
    grpc_server = GrpcServer(application)
    grpc_server.attach()
    http = uvicorn.Server(uvicorn.Config(application, port=0, lifespan="off", log_level="warning"))
    listening = threading.Event()

    async def serve() -> None:
        for hook in application.on_start:
            await hook()
        serving = asyncio.ensure_future(http.serve())
        while not http.started:
            await asyncio.sleep(0.01)
        listening.set()
        await serving
        for hook in reversed(application.on_stop):
            await hook()

    thread = threading.Thread(target=lambda: uvloop.run(serve()))
    thread.start()
    assert listening.wait(30)
    port = http.servers[0].sockets[0].getsockname()[1]
    try:
        yield Running(application, f"127.0.0.1:{port}", f"127.0.0.1:{grpc_server.port}", Predictor(folder, execution))
    finally:
        http.should_exit = True
        thread.join(30)
        for entry in models:
            entry.service.close()
