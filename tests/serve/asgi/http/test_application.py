"""The own server's answers, in this process: as TorchServe's handler gives them, or refusals at once."""

from __future__ import annotations

import asyncio
import base64
import json
import re
import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from serve.archive.verification import Policy
from serve.asgi.http.application import CLIENT_GONE, Application
from serve.asgi.http.call import Limits
from serve.asgi.http.inference_call import InferenceCall
from serve.asgi.http.messages import RefusedError
from serve.asgi.http.served_models import Models, Served
from serve.asgi.http.tokens import Tokens
from serve.asgi.process.model_loader import load
from serve.asgi.process.serving_plan import Wanted
from serve.asgi.protocols import kserve_v1, oip_rest, oip_routes, predictions
from serve.common.options import ServingOptions
from serve.runtime.service.observation import Observation
from serve.runtime.service.predictor import Predictor
from serve.runtime.service.protocol import Reply, Request, answer
from serve.runtime.service.service import Service
from serve.torchserve.archive_builder import build_archive
from serve.torchserve.handler import ImageClassifierHandler
from tests.serve import artifacts
from tests.serve.asgi_client import Answer, ask, send
from tests.serve.torchserve.test_handler import context_of

JPEG = {"content-type": "image/jpeg"}
JSON = {"content-type": "application/json"}


@pytest.fixture(scope="module")
def artifact(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return artifacts.torchscript(tmp_path_factory.mktemp("artifact") / "script")


@pytest.fixture(scope="module")
def served(artifact: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    options = ServingOptions(k=3, batch_size=4, instance_limit=8)
    archive = build_archive(artifact, tmp_path_factory.mktemp("a") / "tiny.mar", model_name="tiny", options=options)
    opened = load(Wanted("tiny", "1.0", archive), gpu=None, queue=None, policy=Policy())
    yield opened
    opened.service.close()


def application(served: Served, **limits: Any) -> Application:
    models = Models(["tiny", "later"])
    models.replace({"tiny": [served]})
    models.expected = ("tiny", "later")
    made = Application(models, limits=Limits(**limits))
    predictions.add_routes(made)
    return made


@pytest.fixture(scope="module")
def handler(artifact: Path, tmp_path_factory: pytest.TempPathFactory) -> ImageClassifierHandler:
    made = ImageClassifierHandler()
    made.initialize(context_of(artifact, tmp_path_factory.mktemp("h"), None, k=3, batch_size=4, instance_limit=8))
    return made


def handled(handler: ImageClassifierHandler, body: bytes, headers: dict[str, str], k: str | None = None) -> Answer:
    """The handler's answer to the same request."""
    from ts.context import Context, RequestProcessor

    context = Context("tiny", "", {}, 4, None, "0.12.0")
    part = {"content-type": headers.get("content-type", "")}
    context.metrics = SimpleNamespace(add_metric=lambda *_, **__: None)
    context.request_processor = [RequestProcessor({**headers, "data": part})]
    (answer,) = handler.handle([{"data": body, **({"k": k} if k is not None else {})}], context)
    text = answer if isinstance(answer, bytes) else json.dumps(answer).encode()
    return Answer((context.get_all_request_header(0) and context.get_response_status(0)[0]) or 200, {}, text)


def rounded(body: bytes) -> bytes:
    """A JSON document with four digits of each probability."""
    return re.sub(rb"\d\.\d+(e-\d+)?", lambda number: b"%.4f" % float(number[0]), body)


def instances(*images: bytes) -> bytes:
    return json.dumps({"instances": [{"b64": base64.b64encode(image).decode()} for image in images]}).encode()


@pytest.mark.parametrize(
    ("body", "headers", "k"),
    [
        (artifacts.jpeg(1), JPEG, None),
        (artifacts.jpeg(2), JPEG, "2"),
        (artifacts.jpeg(2), JPEG, "0"),
        (artifacts.jpeg(1)[:200], JPEG, None),
        (b"no image", JPEG, None),
        (instances(artifacts.jpeg(1), b"no image", artifacts.jpeg(2)), JSON, None),
        (instances(b"no image"), JSON, None),
        (instances(*[artifacts.jpeg(1)] * 9), JSON, None),
        (b'{"instances": []}', JSON, None),
        (b"{", JSON, None),
        (b'{"instances": [{"b64": "\\ud800"}]}', JSON, None),
    ],
)
def test_an_answer_is_what_the_handler_of_torchserve_answers(
    body: bytes, headers: dict[str, str], k: str | None, served: Served, handler: ImageClassifierHandler
) -> None:
    expected = handled(handler, body, headers, k)
    query = "" if k is None else f"?k={k}"
    found = ask(application(served), "POST", f"/predictions/tiny{query}", body, headers)
    assert found.status == expected.status
    if body.count(b"b64") < 2:
        assert found.body == expected.body
    else:  # whether two images go through the network together, their timing decides, and with it the last digits
        assert rounded(found.body) == rounded(expected.body)
    assert found.headers["content-type"] == "application/json"


@pytest.mark.parametrize("names", [("data", "data"), ("data", "body"), ("body", "body")])
def test_a_form_with_two_images_is_refused(served: Served, names: tuple[str, str]) -> None:
    parts = [f'--b\r\nContent-Disposition: form-data; name="{n}"\r\n\r\n'.encode() + artifacts.jpeg(1) for n in names]
    body = b"\r\n".join([*parts, b"--b--\r\n"])
    found = ask(
        application(served), "POST", "/predictions/tiny", body, {"content-type": "multipart/form-data; boundary=b"}
    )
    assert found.status == 400
    assert "more than one part 'data' or 'body'" in found.json()["error"]


def test_a_browsers_question_from_another_site_is_told_what_to_do(served: Served) -> None:
    asked = {"origin": "https://example.org", "access-control-request-method": "POST"}
    found = ask(application(served), "OPTIONS", "/predictions/tiny", headers=asked)
    assert found.status == 405
    assert "CORS" in found.json()["error"]
    assert "proxy" in found.json()["error"]


@pytest.mark.parametrize("path", ["/", "/ping", "/health/live", "/health/ready", "/v2/health/live", "/v2/health/ready"])
def test_questions_for_health_are_no_requests_to_log(served: Served, path: str) -> None:
    made = application(served)
    oip_routes.add_routes(made)
    kserve_v1.add_routes(made)
    seen: list[Observation] = []
    made.observers.append(seen.append)
    ask(made, "GET", path)
    ask(made, "GET", "/models")
    assert [observation.probe for observation in seen] == [True, False]


def test_an_image_is_answered_as_the_predictor_does_however_it_comes(served: Served, artifact: Path) -> None:
    image = artifacts.jpeg(3)
    (expected,) = Predictor(artifact, served.predictor.execution).predict([image], 2)
    assert isinstance(expected, list)
    boundary = "multipart/form-data; boundary=b"
    form = b'--b\r\nContent-Disposition: form-data; name="data"; filename="x.jpg"\r\n\r\n' + image + b"\r\n"
    k = b'--b\r\nContent-Disposition: form-data; name="k"\r\n\r\n2\r\n'
    made = application(served)
    answers = [
        ask(made, "POST", "/predictions/tiny?k=2", image, JPEG),
        ask(made, "PUT", "/predictions/tiny/1.0?k=2", image),
        ask(made, "POST", "/predictions/tiny", image, {"x-top-k": "2"}),
        ask(made, "POST", "/predictions/tiny?k=2", image, {"x-top-k": "1"}),  # as the handler: the header is the last
        ask(made, "POST", "/predictions/tiny?k=2", image, {"content-type": "application/x-www-form-urlencoded"}),
        ask(made, "POST", "/predictions/tiny", form + k + b"--b--\r\n", {"content-type": boundary}),
        ask(made, "POST", "/predictions/tiny", [image[:100], image[100:500], image[500:]], {"x-top-k": "2"}),
    ]
    assert {answer.status for answer in answers} == {200}
    assert len({answer.body for answer in answers}) == 1
    assert [(entry["label"], entry["index"]) for entry in answers[0].json()] == [
        (label.label, label.index) for label in expected
    ]
    assert [entry["probability"] for entry in answers[0].json()] == pytest.approx(
        [label.probability for label in expected], abs=1e-6
    )
    timing = answers[0].headers["server-timing"]
    assert [part.partition(";")[0].strip() for part in timing.split(",")] == [
        "queue", "decode", "preprocess", "infer", "postprocess", "total",
    ]  # fmt: skip
    assert answers[0].headers["x-model-version"] == "1.0"


def test_the_requests_id_is_answered_or_made(served: Served) -> None:
    made = application(served)
    assert ask(made, "GET", "/ping", headers={"x-request-id": "abc-1"}).headers["x-request-id"] == "abc-1"
    first, second = (ask(made, "GET", "/ping", headers={"x-request-id": "a b"}).headers["x-request-id"] for _ in "ab")
    assert first != second
    assert len(first) == 16


def test_a_body_beyond_the_limit_is_refused_before_the_rest_is_read(served: Served) -> None:
    made = application(served, body_bytes=1000)
    told = ask(made, "POST", "/predictions/tiny", b"", {"content-length": "1001"})
    assert told.status == 413
    assert "1000 bytes" in told.json()["error"]
    chunks = [b"x" * 600, b"x" * 600, *[b"never read"] * 5]
    left: list[bytes] = []

    async def count() -> None:
        sent = iter(chunks)

        async def receive() -> dict[str, Any]:
            return {"type": "http.request", "body": next(sent), "more_body": True}

        async def take(_: Any) -> None:
            left.extend(sent)

        scope = {"type": "http", "method": "POST", "path": "/", "query_string": b"", "headers": []}
        await made({**scope, "raw_path": b"/predictions/tiny"}, receive, take)

    asyncio.run(count())
    assert left == [b"never read"] * 5
    assert made.held.bytes == 0


def test_bodies_that_are_held_together_are_bounded(served: Served) -> None:
    made = application(served, held_bytes=1000)
    assert ask(made, "POST", "/predictions/tiny", b"x" * 1001).status == 503
    answer = ask(made, "POST", "/predictions/tiny", b"x" * 900)
    assert answer.status == 415
    assert made.held.bytes == 0


def test_a_body_that_does_not_come_is_given_up(served: Served) -> None:
    made = application(served, body_s=0.1)

    async def stall() -> list[Any]:
        sent: list[Any] = []

        async def receive() -> dict[str, Any]:
            await asyncio.sleep(10)
            return {}

        async def take(message: Any) -> None:
            sent.append(message)

        scope = {"type": "http", "method": "POST", "path": "/", "query_string": b"", "headers": []}
        await made({**scope, "raw_path": b"/predictions/tiny"}, receive, take)
        return sent

    assert asyncio.run(asyncio.wait_for(stall(), 5))[0]["status"] == 408


@pytest.mark.parametrize(
    ("path", "headers", "status", "says"),
    [
        ("/predictions/tyni", {}, 404, "did you mean tiny"),
        ("/predictions/tiny/2.0", {}, 404, "there are 1.0"),
        ("/predictions/later", {}, 503, "being loaded"),
        ("/predictions/tiny", {"content-encoding": "gzip"}, 415, "compressed"),
        ("/predictions/tiny", {"x-request-deadline-ms": "soon"}, 400, "milliseconds"),
        ("/predictions/tiny", {"x-request-deadline-ms": "0"}, 504, "deadline"),
        ("/predictions/tiny?" + "&".join(f"a{i}=1" for i in range(101)), {}, 400, "100 parameters"),
        ("/elsewhere", {}, 404, "/predictions/NAME"),
        ("/predictions/tiny?k=0", {}, 400, "k must be a whole number from 1 to 999999999, got '0'"),
        ("/predictions/tiny?k=-1", {}, 400, "k must be a whole number from 1 to 999999999, got '-1'"),
        ("/predictions/tiny?k=x", {}, 400, "k must be a whole number from 1 to 999999999, got 'x'"),
        ("/predictions/tiny?k=True", {}, 400, "k must be a whole number from 1 to 999999999, got 'True'"),
        ("/predictions/tiny", {"x-top-k": "0"}, 400, "k must be a whole number from 1 to 999999999, got '0'"),
    ],
)
def test_what_cannot_be_answered_is_told_with_its_status(
    path: str, headers: dict[str, str], status: int, says: str, served: Served
) -> None:
    answer = ask(application(served), "POST", path, artifacts.jpeg(1), headers)
    assert answer.status == status
    assert says in answer.json()["error"]


class Computing:
    """A service's stand-in that never answers, and says what was cancelled."""

    def __init__(self, served: Served) -> None:
        self.futures: list[Future[Any]] = []
        self.waiting = 0
        self.broken = None
        self.full: str | None = None
        self._served = served

    def submit(self, request: Any, *, deadline: float | None = None, here: bool = False) -> Future[Any]:
        self.futures.append(Future())
        return self.futures[-1]


def never_answering(served: Served) -> tuple[Application, Computing]:
    service: Any = Computing(served)
    stuck = Served("tiny", "1.0", served.predictor, served.serving, service)
    return application(stuck), service


def test_at_its_deadline_a_request_is_answered_504_and_not_computed_any_more(served: Served) -> None:
    made, service = never_answering(served)
    started = time.monotonic()
    answer = ask(made, "POST", "/predictions/tiny", artifacts.jpeg(1), {"x-request-deadline-ms": "100"})
    assert answer.status == 504
    assert 0.09 < time.monotonic() - started < 3
    assert service.futures[0].cancelled()


def test_for_a_client_that_has_gone_nothing_more_is_computed(served: Served) -> None:
    made, service = never_answering(served)
    seen: list[Observation] = []
    made.observers.append(seen.append)
    answer = asyncio.run(send(made, "POST", "/predictions/tiny", artifacts.jpeg(1), gone_after_s=0.1))
    assert answer is None
    assert service.futures[0].cancelled()
    assert [(entry.status, entry.refusals) for entry in seen] == [(CLIENT_GONE, ("client-gone",))]


def test_who_observes_does_not_hold_up_an_answer(served: Served) -> None:
    made = application(served)
    seen: list[Observation] = []
    made.observers.append(seen.append)

    async def asked() -> tuple[int, int]:
        await send(made, "POST", "/predictions/tiny", artifacts.jpeg(1))
        at_once = len(seen)  # in this turn the answer is written
        await asyncio.sleep(0)
        return at_once, len(seen)

    assert asyncio.run(asked()) == (0, 1)
    assert (seen[0].status, seen[0].images) == (200, 1)


def test_a_full_queue_is_told_at_once(served: Served, artifact: Path) -> None:
    class Full(Computing):
        def submit(self, request: Any, *, deadline: float | None = None, here: bool = False) -> Future[Any]:
            from serve.runtime.service.service import QueueFull

            raise QueueFull("256 requests are already waiting: try again later")

    service: Any = Full(served)
    full = Served("tiny", "1.0", served.predictor, served.serving, service)
    answer = ask(application(full), "POST", "/predictions/tiny", artifacts.jpeg(1))
    assert (answer.status, answer.headers["retry-after"]) == (503, "1")
    assert "try again" in answer.json()["error"]

    async def refused() -> list[Any]:
        loop = asyncio.get_running_loop()
        with pytest.raises(RefusedError):
            await InferenceCall(full, Request((artifacts.jpeg(1),), 5, listed=False)).answered()
        return [timer for timer in loop._scheduled if not timer.cancelled()]  # type: ignore[attr-defined]

    assert asyncio.run(refused()) == [], "a timer keeps its images for as long as it has to answer"


@pytest.mark.parametrize(("count", "k", "apart"), [(1, 5, False), (2, 3, False), (2, 5, True), (2, 5000, True)])
def test_a_long_answer_is_written_beside_the_event_loop(
    count: int, k: int, apart: bool, served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    threads: list[bool] = []

    def noted(*given: Any) -> Reply:
        threads.append(threading.current_thread() is threading.main_thread())
        return answer(*given)

    monkeypatch.setattr("serve.asgi.http.messages.answer", noted)
    monkeypatch.setattr("serve.asgi.http.messages._LONG_ANSWER", 6)
    body = instances(*[artifacts.jpeg(1)] * count)
    assert ask(application(served), "POST", f"/predictions/tiny?k={k}", body, JSON).status == 200
    assert threads == [not apart]


def test_an_engine_that_fails_is_a_500_and_the_next_request_is_answered(served: Served) -> None:
    class Failing(Computing):
        def submit(self, request: Any, *, deadline: float | None = None, here: bool = False) -> Future[Any]:
            future: Future[Any] = Future()
            future.set_exception(RuntimeError("CUDA error: an illegal memory access\nat line 1"))
            return future

    service: Any = Failing(served)
    failing = Served("tiny", "1.0", served.predictor, served.serving, service)
    answer = ask(application(failing), "POST", "/predictions/tiny", artifacts.jpeg(1))
    assert answer.status == 500
    assert ask(application(served), "POST", "/predictions/tiny", artifacts.jpeg(1)).status == 200


def test_each_request_is_observed_once_with_what_became_of_it(served: Served) -> None:
    made = application(served)
    seen: list[Observation] = []
    made.observers.append(seen.append)
    ask(made, "POST", "/predictions/tiny", artifacts.jpeg(1))
    ask(made, "POST", "/predictions/tiny", instances(artifacts.jpeg(1), b"no image"), JSON)
    ask(made, "POST", "/predictions/none", artifacts.jpeg(1))
    one, two, three = seen
    assert (one.route, one.model, one.version, one.status) == ("/predictions/{name}", "tiny", "1.0", 200)
    assert one.stages is not None
    assert one.stages.infer > 0
    assert (one.batch_size, one.images, one.refusals) == (1, 1, ())
    assert (two.images, two.refusals, two.status) == (2, ("item-415",), 200)
    assert (three.model, three.status, three.refusals) == (None, 404, ("unknown-model",))
    assert all(entry.seconds > 0 for entry in seen)


def test_health_needs_no_token_and_everything_else_does(served: Served, tmp_path: Path) -> None:
    (tmp_path / "tokens").write_text("t" * 20 + "\n")
    (tmp_path / "tokens").chmod(0o600)
    made = application(served)
    made.models.expected = ("tiny",)
    made.tokens = Tokens(tmp_path / "tokens")
    for path in ("/health/live", "/health/ready", "/ping"):
        assert ask(made, "GET", path).status == 200
    for method, path in (("POST", "/predictions/tiny"), ("GET", "/models"), ("GET", "/models/tiny")):
        assert ask(made, method, path, artifacts.jpeg(1)).status == 401
        assert ask(made, method, path, artifacts.jpeg(1), {"authorization": "Bearer " + "t" * 20}).status == 200


def test_it_is_ready_when_every_model_is_and_not_while_it_ends(served: Served) -> None:
    made = application(served)  # "later" is not loaded yet
    assert ask(made, "GET", "/health/ready").status == ask(made, "GET", "/ping").status == 503
    assert ask(made, "GET", "/health/live").status == 200
    made.models.expected = ("tiny",)
    unchecked = {"models": 1, "why": "its archive has no known.json"}
    assert ask(made, "GET", "/health/ready").json() == {"ready": True, "unchecked": unchecked}
    assert ask(made, "GET", "/ping").json() == {"status": "Healthy"}
    made.draining = True
    ending = ask(made, "POST", "/predictions/tiny", artifacts.jpeg(1))
    assert (ending.status, ending.headers["connection"]) == (200, "close")
    assert ask(made, "GET", "/health/ready").status == 503
    assert ask(made, "GET", "/health/live").status == 200


def test_it_is_not_ready_while_an_engine_stalls(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    made = application(served)
    made.models.expected = ("tiny",)
    asked = ("/health/ready", "/ping")
    assert [ask(made, "GET", path).status for path in asked] == [200] * 2
    monkeypatch.setattr(Service, "stalls", True)
    assert [ask(made, "GET", path).status for path in asked] == [503] * 2
    assert ask(made, "GET", "/models/tiny").json()["ready"] is False
    assert ask(made, "GET", "/health/live").status == 200
    assert ask(made, "POST", "/predictions/tiny", artifacts.jpeg(1)).status == 200


def test_a_model_is_described_as_the_handler_does_with_how_it_stands_here(
    served: Served, handler: ImageClassifierHandler
) -> None:
    told = ask(application(served), "GET", "/models/tiny").json()
    described = handler.describe_handle()
    assert {name: told[name] for name in described if name != "versions"} == {
        name: value for name, value in described.items() if name != "versions"
    }
    assert (told["modelVersion"], told["ready"], told["waiting"]) == ("1.0", True, 0)
    listed = ask(application(served), "GET", "/models").json()["models"]
    assert [(entry["modelName"], entry["ready"]) for entry in listed] == [("tiny", True), ("later", False)]
    assert listed[0]["unchecked"] == "its archive has no known.json"
    assert told["checked"][-1] == "known answer not checked: its archive has no known.json"


def test_a_fault_of_a_route_is_a_500_that_names_the_request_and_no_more(
    served: Served, caplog: pytest.LogCaptureFixture
) -> None:
    made = application(served)

    async def fail(_: Any) -> Any:
        raise KeyError("secret")

    made.router.add("GET", "/fault", fail)
    answer = ask(made, "GET", "/fault", headers={"x-request-id": "id-7"})
    assert answer.status == 500
    assert "id-7" in answer.json()["error"]
    assert "secret" not in answer.json()["error"]
    assert "id-7" in caplog.text


WORDS = st.sampled_from(["predictions", "models", "tiny", "1.0", "v1", "v2", "health", "ready", "%2F", "", "é"])
NAMES = ["content-type", "x-top-k", "x-request-deadline-ms", "content-length", "x-request-id", "accept"]
VALUES = st.text(max_size=20) | st.sampled_from(["application/json", "multipart/form-data; boundary=b", "0", "5"])
BODIES = st.binary(max_size=200) | st.sampled_from(
    [artifacts.jpeg(1), b'{"instances": [', b"{}", b'{"instances": [{}]}', b"[]"]
)


@dataclass(frozen=True)
class Sent:
    method: str
    path: str
    query: str
    headers: dict[str, str]
    body: bytes


@given(
    sent=st.builds(
        Sent,
        st.sampled_from(["GET", "POST", "PUT", "HEAD", "DELETE", "PATCH", "X"]),
        st.lists(WORDS, max_size=5).map("/".join),
        st.text(max_size=20).map(lambda text: text.replace("?", "")),
        st.dictionaries(st.sampled_from(NAMES), VALUES.map(lambda text: text.encode().decode("latin-1"))),
        BODIES,
    )
)
@settings(max_examples=200, deadline=None)
def test_whatever_is_sent_is_no_fault_of_the_server_and_its_answer_is_json(sent: Sent, served: Served) -> None:
    answer = ask(application(served), sent.method, f"/{sent.path}?{sent.query}", sent.body, sent.headers)
    assert answer.status != 500
    answer.json()


SHORT, LONG = b'{"inputs": []}', b'{"id": "%s"}' % (b"x" * 40_000)
PIXELS = b'{"inputs": [{"datatype": "UINT8"}]}'
ESCAPED = PIXELS.replace(b"U", rb"\u0055")


@pytest.mark.parametrize(
    ("document", "binary", "told", "beside"),
    [
        (SHORT, 50_000, True, False),
        (SHORT, 10, True, False),
        (PIXELS, 10, True, False),
        (PIXELS, 50_000, True, True),
        (ESCAPED, 10, True, False),
        (ESCAPED, 50_000, True, True),
        (LONG, 10, True, True),
        (LONG, 50_000, True, True),
        (LONG, 0, False, True),
    ],
)
def test_what_is_long_to_read_is_not_read_in_the_event_loop(
    document: bytes, binary: int, *, told: bool, beside: bool, served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    threads = []

    def read(*given: Any) -> Any:
        threads.append(threading.current_thread())
        return reading(*given)

    reading = oip_rest.read
    monkeypatch.setattr(oip_rest, "read", read)
    asked = application(served)
    oip_routes.add_routes(asked)
    headers = {oip_rest.LENGTH_HEADER: str(len(document))} if told else {}
    assert ask(asked, "POST", "/v2/models/tiny/infer", document + bytes(binary), headers).status == 400
    assert [thread is not threading.main_thread() for thread in threads] == [beside]
