"""The endpoint, as a client sees it: a real TorchServe, real archives, real images."""

from __future__ import annotations

import base64
import http.client
import json
import math
import os
import re
import signal
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import psutil
import pytest
from PIL import Image
from prometheus_client.parser import text_string_to_metric_families

from benchmarks.hostile import bombs, mutations
from benchmarks.hostile.bombs import webp
from benchmarks.hostile.pictures import encoded, picture
from serve.common.layout import archive_path
from serve.load.http_connection import stages
from serve.runtime.card.execution import ENVIRONMENT
from serve.runtime.service.predictor import Predictor
from serve.runtime.service.stages import FRONTEND_STAGE, STAGE_BUCKETS, STAGES
from serve.torchserve.client import ServerError
from serve.torchserve.configuration import HOST
from serve.torchserve.state import archives_folder, state_folder
from tests.serve.artifacts import CLASSES, jpeg
from tests.serve.conftest import BATCH_PIXELS, KINDS, Served, name_of
from tests.serve.damaged import asked

pytestmark = pytest.mark.slow


def b64(data: bytes) -> dict[str, str]:
    return {"b64": base64.b64encode(data).decode()}


def post(served: Served, kind: str = "script", **content: Any) -> httpx.Response:
    headers = {**served.headers(), **content.pop("headers", {})}
    return httpx.post(served.url(kind), headers=headers, timeout=60, **content)


def assert_same(answer: list[dict[str, Any]], expected: list[dict[str, Any]]) -> None:
    """Equal classes in equal order; probabilities may differ by the rounding of another batch size."""
    assert [entry["label"] for entry in answer] == [entry["label"] for entry in expected]
    assert [e["probability"] for e in answer] == pytest.approx([e["probability"] for e in expected], abs=1e-4)


@pytest.mark.parametrize("kind", KINDS)
def test_served_answers_equal_those_of_the_artifact_in_process(served: Served, kind: str) -> None:
    images = [jpeg(seed, (60 + 7 * seed, 45)) for seed in range(4)]
    expected = Predictor(served.folders[kind]).predict(images, len(CLASSES))
    for image, labels in zip(images, expected, strict=True):
        answer = served.client.predict(name_of(kind), image, headers={"X-Top-K": str(len(CLASSES))})
        assert isinstance(labels, list)
        assert answer[0]["label"] == labels[0].label
        # Equal ones may change places: rows are compared class by class.
        mine = {entry["index"]: entry["probability"] for entry in answer}
        assert mine == pytest.approx({label.index: label.probability for label in labels}, abs=1e-4)
        assert [entry["probability"] for entry in answer] == sorted(mine.values(), reverse=True)


def test_raw_multipart_and_json_requests_get_the_same_answer(served: Served) -> None:
    image = jpeg(1)
    raw = post(served, content=image)
    assert raw.status_code == 200
    assert raw.headers["content-type"] == "application/json"
    assert len(raw.json()) == 3
    assert set(raw.json()[0]) == {"label", "index", "probability"}
    assert post(served, files={"data": ("x.jpg", image, "image/jpeg")}).json() == raw.json()
    assert post(served, content=image, headers={"content-type": "text/plain"}).json() == raw.json()
    listed = {"instances": [b64(image)]}
    assert post(served, json=listed).json() == {"predictions": [raw.json()]}
    utf8 = {"content-type": "application/json; charset=utf-8"}
    assert post(served, json=listed, headers=utf8).json() == {"predictions": [raw.json()]}


@pytest.mark.parametrize("kind", ["JPEG", "PNG", "WEBP", "BMP", "TIFF", "GIF"])
def test_each_image_format_is_accepted(served: Served, kind: str) -> None:
    assert len(served.client.predict(name_of("script"), encoded(picture(2), kind))) == 3


def test_no_damaged_image_of_any_format_is_a_fault_of_the_server(served: Served) -> None:
    statuses: Counter[int] = Counter()
    with httpx.Client(headers=served.headers(), timeout=60) as client:
        for number, image in enumerate(mutations.sample()):
            answer = client.post(served.url(), content=image, headers={"content-type": "application/octet-stream"})
            assert answer.status_code in (200, 400, 413, 415), (number, answer.status_code, answer.text)
            statuses[answer.status_code] += 1
        assert all(statuses[status] > 20 for status in (200, 400, 415)), statuses
        assert client.post(served.url(), content=jpeg(1)).status_code == 200


def test_an_answer_has_the_id_that_its_request_came_with_whoever_gives_it(served: Served) -> None:
    root = served.url().partition("/predictions")[0]
    asked = [
        ("POST", served.url(), served.headers(), jpeg(1), 200),
        ("POST", served.url(), served.headers(), b"no image", 415),
        ("POST", f"{root}/predictions/absent", served.headers(), jpeg(1), 404),
        ("POST", served.url(), {}, jpeg(1), 400),  # the last two are answered before TorchServe has them
        ("GET", f"{root}/ping", {}, b"", 200),
    ]
    with httpx.Client(timeout=60) as client:
        for given in ("mine", "!~" * 64, None, "", "a b", "\xe9", "!" * 129):
            named = {} if given is None else {b"x-request-id": given.encode("latin-1")}
            told = []
            for method, url, headers, content, status in asked:
                every = {name.encode(): value.encode() for name, value in headers.items()} | named
                answer = client.request(method, url, headers=every, content=content)
                assert answer.status_code == status
                told.append(answer.headers["x-request-id"])
            if given in ("mine", "!~" * 64):
                assert told == [given] * len(asked)
            else:
                assert given not in told
                assert len({*told, ""}) == len(asked) + 1, told  # each its own


def test_requests_that_do_not_wait_for_each_other_get_their_ids_in_their_order(served: Served) -> None:
    (token,) = (f"{name}: {value}" for name, value in served.headers().items())
    head = f"POST /predictions/{name_of('script')} HTTP/1.1\r\nHost: x\r\n{token}\r\nContent-Type: image/jpeg\r\n"
    names = ["first", "", "third"]
    image = jpeg(1)
    with socket.create_connection((HOST, served.running.ports.inference), timeout=60) as stream:
        for name in names:
            stream.sendall(f"{head}X-Request-Id: {name}\r\nContent-Length: {len(image)}\r\n\r\n".encode() + image)
        told = []
        with stream.makefile("rb") as answers:
            for _ in names:
                assert answers.readline().startswith(b"HTTP/1.1 200 ")
                fields = http.client.parse_headers(answers)
                answers.read(int(fields["Content-Length"]))
                told.append(fields["x-request-id"])
    assert (told[0], told[2]) == ("first", "third")
    assert told[1] not in (None, *names)


def test_a_thousand_damaged_images_among_whole_ones_cost_nobody_else_an_answer(served: Served) -> None:
    before = [worker["pid"] for worker in served.client.workers(name_of("script"))]
    with httpx.Client(headers=served.headers(), timeout=60) as client:
        seen = asked(client, served.url(), range(16_000, 17_000), jpeg(1))
    assert seen.total() == 1000
    assert min(seen["answered"], seen["refused"]) > 100, seen
    assert [worker["pid"] for worker in served.client.workers(name_of("script"))] == before


def test_instances_are_answered_in_order_each_with_its_classes_or_its_error(served: Served) -> None:
    good = [jpeg(seed) for seed in (1, 2)]
    body = {"instances": [b64(good[0]), b64(b""), {"b64": "%"}, {"c": 1}, b64(good[1])]}
    answer = post(served, json=body)
    assert answer.status_code == 200
    first, empty, invalid, missing, last = answer.json()["predictions"]
    assert_same(first, post(served, content=good[0]).json())
    assert_same(last, post(served, content=good[1]).json())
    assert "empty" in empty["error"]
    assert "instance 2" in invalid["error"]
    assert "base64" in invalid["error"]
    assert "instance 3" in missing["error"]


@pytest.mark.parametrize(
    ("body", "status", "message"),
    [
        (b"", 400, "empty"),
        (b"hello, I am not an image", 415, "not an image"),
        (jpeg(1)[:400], 400, "truncated"),
        (encoded(picture(1), "PNG")[:300], 400, "truncated"),
        (encoded(Image.new("1", (10_000, 10_000)), "PNG"), 413, "10000x10000 pixels"),
        (encoded(Image.new("1", (20_000, 20_000)), "PNG"), 413, "more than the limit of 50000000 pixels"),
        (b'{"instances": [', 400, "not valid JSON"),
        (b'{"instances": []}', 400, "empty"),
        (b'{"instances": {}}', 400, "must be"),
        (b'{"instances": [{}]}', 400, "no text field 'b64'"),
        (b'{"instances": [{"b64": "?"}]}', 400, "not valid base64"),
        (b'{"instances": [' + b",".join([b'{"b64": ""}'] * 65) + b"]}", 400, "the limit is 64"),
        (b'{"a":' * 100_000, 400, "not valid JSON"),
    ],
)
def test_a_bad_request_gets_its_own_status_and_names_the_fault(
    served: Served, body: bytes, status: int, message: str
) -> None:
    answer = post(served, content=body)
    assert answer.status_code == status
    assert message in answer.json()["error"]


def test_a_body_that_says_it_is_json_and_is_not_is_refused(served: Served) -> None:
    answer = post(served, content=jpeg(1), headers={"content-type": "application/json"})
    assert answer.status_code == 400
    assert "not valid JSON" in answer.json()["error"]


def test_explanations_are_refused_and_not_answered_with_predictions(served: Served) -> None:
    url = served.url().replace("/predictions/", "/explanations/")
    answer = httpx.post(url, content=jpeg(1), headers=served.headers())
    assert answer.status_code == 501
    assert "explanations" in answer.json()["error"]


def test_a_multipart_request_without_data_is_told_the_field(served: Served) -> None:
    answer = post(served, files={"picture": jpeg(1)})
    assert answer.status_code == 400
    assert "'data'" in answer.json()["error"]
    assert "picture" in answer.json()["error"]


@pytest.mark.parametrize("names", [("data", "data"), ("data", "body"), ("body", "data")])
def test_a_form_with_two_images_is_refused(served: Served, names: tuple[str, str]) -> None:
    answer = post(served, files=[(name, (f"{name}.jpg", jpeg(seed), "image/jpeg")) for seed, name in enumerate(names)])
    assert answer.status_code == 400
    assert "more than one part 'data' or 'body'" in answer.json()["error"]


def test_bad_items_of_a_concurrent_batch_leave_their_mates_alone(served: Served) -> None:
    bodies = [jpeg(1), b"", jpeg(2), b"CUDA is not an image", jpeg(3)[:200], jpeg(3)]
    before = {seed: served.client.predict(name_of("exported"), jpeg(seed)) for seed in (1, 2, 3)}
    together = threading.Barrier(len(bodies))

    def send(body: bytes) -> httpx.Response:
        together.wait()
        return post(served, "exported", content=body)

    with ThreadPoolExecutor(len(bodies)) as pool:
        answers = list(pool.map(send, bodies))
    assert [answer.status_code for answer in answers] == [200, 400, 200, 415, 400, 200]
    for index, seed in ((0, 1), (2, 2), (5, 3)):
        assert_same(answers[index].json(), before[seed])
    deadline = time.monotonic() + 10  # metrics are told beside the answers
    while _metric(served.client.metrics(), "BatchSize", "exported") <= 1:
        assert time.monotonic() < deadline, "the requests were not one batch"
        time.sleep(0.05)


@pytest.mark.parametrize(("waiting", "batch"), [(15, 8), (16, 16), (23, 16)])
def test_a_worker_is_given_both_of_its_networks_batches_where_both_wait_and_else_one(
    served: Served, waiting: int, batch: int
) -> None:
    name = name_of("int8")
    (found,) = served.client.workers(name)
    image = jpeg(1)

    def in_queue() -> int:
        return int(served.client.registered(name)["jobQueueStatus"]["pendingRequests"])

    def requests() -> float:
        counts = re.findall(
            rf'^ts_inference_requests_total{{[^}}]*"{name}"[^}}]*}} (\S+)$', served.client.metrics(), re.M
        )
        return sum(map(float, counts))

    worker = psutil.Process(found["pid"])
    with ThreadPoolExecutor(1 + waiting) as pool:
        worker.suspend()
        try:
            asked = requests()
            first = pool.submit(post, served, "int8", content=image)
            _until(lambda: requests() > asked)
            _until(lambda: in_queue() == 0)  # the worker has it
            others = [pool.submit(post, served, "int8", content=image) for _ in range(waiting)]
            _until(lambda: in_queue() == waiting)
        finally:
            worker.resume()
        assert {answer.result().status_code for answer in (first, *others)} == {200}
    _until(lambda: _metric(served.client.metrics(), "BatchSize", "int8") == batch)


def test_64_images_of_49_megapixels_in_one_request_cost_the_worker_nothing(served: Served) -> None:
    name, image = name_of("script"), webp(7000)
    (worker,) = served.client.workers(name)
    bomb = {"instances": [b64(image)] * 64}
    assert len(json.dumps(bomb)) < 10_000
    expected = served.client.predict(name, jpeg(1))
    process, taken = psutil.Process(worker["pid"]), []
    with ThreadPoolExecutor(1) as pool, httpx.Client(headers=served.headers(), timeout=60) as client:
        for _ in range(5):
            neighbour = pool.submit(served.client.predict, name, jpeg(1))
            started = processor_s(process)
            answer = client.post(served.url(), json=bomb)
            taken.append(processor_s(process) - started)
            assert answer.status_code == 413
            assert "64 images have 3136000000 pixels in total" in answer.json()["error"]
            assert_same(neighbour.result(), expected)
    assert min(taken) < 0.1  # of the worker's own time: other processes use these cores too
    (after,) = served.client.workers(name)
    assert after["pid"] == worker["pid"]


def test_what_a_batch_has_too_little_for_is_told_to_try_again_and_its_neighbours_are_answered(served: Served) -> None:
    large = encoded(Image.new("1", (6000, 5000 + 1)), "PNG")  # two of them are too much for one batch
    assert BATCH_PIXELS < 2 * 6000 * 5001
    bodies = [large, jpeg(1), large, bombs.bomb("progressive jpeg"), jpeg(2)]
    together = threading.Barrier(len(bodies))

    def send(body: bytes) -> httpx.Response:
        together.wait()
        return post(served, "exported", content=body)

    with ThreadPoolExecutor(len(bodies)) as pool:
        answers = list(pool.map(send, bodies))
    assert sorted(answers[index].status_code for index in (0, 2)) == [200, 503]
    (refused,) = (answer for answer in answers if answer.status_code == 503)
    assert "try again later" in refused.json()["error"]
    assert refused.headers["Retry-After"] == "1"
    assert [answers[index].status_code for index in (1, 3, 4)] == [200, 413, 200]
    assert post(served, "exported", content=large).status_code == 200, "alone, it is answered"


def test_its_start_told_how_far_it_was(served: Served) -> None:
    fractions = [fraction for fraction, _ in served.told]
    assert fractions == sorted(fractions)
    assert fractions[0] < 0.1
    answering = [int(message.removesuffix(" of 5 answer")) for _, message in served.told]
    assert answering == sorted(answering)
    assert (answering[0], answering[-1]) == (0, 5)


@pytest.mark.parametrize("k", [1, 2, len(CLASSES)])
def test_k_by_query_parameter_gives_that_many_classes(served: Served, k: int) -> None:
    assert len(served.client.predict(name_of("script"), jpeg(1), headers={"X-Top-K": str(k)})) == k
    answer = httpx.post(
        f"http://{HOST}:{served.running.ports.inference}/invocations",
        params={"model_name": name_of("script"), "k": k},
        content=jpeg(1),
        headers=served.headers(),
    )
    assert len(answer.json()) == k


def test_a_body_that_the_server_took_for_a_web_form_is_told_just_that(served: Served) -> None:
    # What curl's --data-binary says. Of most images TorchServe 0.12 cannot even read the form that they are not, and
    # answers 500 ErrorDataDecoderException itself; this beginning of one it can.
    headers = served.headers() | {"Content-Type": "application/x-www-form-urlencoded"}
    answer = httpx.post(served.url(), content=b"\xff\xd8\xff\xe0JFIF" + b"A" * 64, headers=headers, timeout=30)
    assert answer.status_code == 400
    assert answer.json()["error"] == (
        "the server read the body as a web form and found no image, because it was sent as "
        "application/x-www-form-urlencoded: send the header 'Content-Type: image/jpeg', or use curl's -T FILE instead "
        "of --data-binary"
    )


def test_a_body_without_a_content_type_is_taken_for_an_image(served: Served) -> None:
    answer = httpx.post(served.url(), content=jpeg(1), headers=served.headers(), timeout=30)
    assert_same(answer.json(), post(served, content=jpeg(1), headers={"Content-Type": "image/jpeg"}).json())


def test_k_by_header_or_form_field_works_on_the_predictions_path(served: Served) -> None:
    assert len(post(served, content=jpeg(1), headers={"X-Top-K": "1"}).json()) == 1
    assert len(post(served, files={"data": jpeg(1)}, data={"k": "2"}).json()) == 2


def test_k_beyond_the_number_of_classes_gives_all_of_them(served: Served) -> None:
    assert len(served.client.predict(name_of("script"), jpeg(1), headers={"X-Top-K": "1000"})) == len(CLASSES)


@pytest.mark.parametrize("k", ["0", "-1", "x", "True", "1.5", "", "9" * 30, "²"])
def test_an_illegal_k_is_refused(served: Served, k: str) -> None:
    with pytest.raises(ServerError, match="k must be a whole number from 1") as caught:
        served.client.predict(name_of("script"), jpeg(1), headers={"X-Top-K": k})
    assert caught.value.status == 400


def test_a_killed_worker_comes_back(served: Served) -> None:
    (worker,) = served.client.workers(name_of("int8"))
    os.kill(worker["pid"], signal.SIGKILL)
    deadline = time.monotonic() + 90
    answer = None
    while answer is None and time.monotonic() < deadline:
        try:
            answer = served.client.predict(name_of("int8"), jpeg(1))
        except ServerError as error:
            # TorchServe 0.12 takes SIGKILL for "out of memory": 507 for the request in hand, then 503.
            assert error.status in (500, 503, 507)  # noqa: PT017 - until the worker is back
            time.sleep(0.5)
    assert answer is not None, "the worker did not come back"
    assert len(answer) == 3
    (again,) = served.client.workers(name_of("int8"))
    assert again["pid"] != worker["pid"]


def test_no_port_answers_without_a_token_but_the_metrics_and_the_health_check(served: Served) -> None:
    ports = served.running.ports
    for url in (served.url(), f"http://{HOST}:{ports.management}/models"):
        answer = httpx.request("POST" if "predictions" in url else "GET", url)
        assert answer.status_code == 400
        assert "Token Authorization failed" in answer.text
    assert httpx.get(f"http://{HOST}:{ports.metrics}/metrics").status_code == 200
    health = httpx.get(f"http://{HOST}:{ports.inference}/ping")
    assert (health.status_code, health.json()) == (200, {"status": "Healthy"})


def test_new_keys_replace_the_old_ones_and_the_header_file_follows(served: Served) -> None:
    old = served.headers()
    served.client.renew_keys()
    assert post(served, content=jpeg(1), headers=old).status_code == 400
    assert post(served, content=jpeg(1)).status_code == 200
    assert served.client.ping() == "Healthy"


def test_models_come_from_the_servers_own_folder_only_and_with_the_management_key(served: Served) -> None:
    base = f"http://{HOST}:{served.running.ports.management}/models"
    own = archives_folder(served.store) / f"{name_of('onnx')}@1.0.mar"
    assert own.is_file()
    for headers in ({}, served.headers()):  # no key, and that of the predictions
        assert httpx.post(base, params={"url": own.name, "model_name": "mine"}, headers=headers).status_code == 400
        assert httpx.delete(f"{base}/{name_of('onnx')}", headers=headers).status_code == 400
    headers = {"Authorization": f"Bearer {served.client._key('management')}"}
    elsewhere = archive_path(served.store, "small", "onnx")
    urls = ["https://example.com/x.mar", elsewhere.as_uri(), str(elsewhere), f"../../small/archives/{elsewhere.name}"]
    for url in urls:
        answer = httpx.post(base, params={"url": url, "model_name": "mine"}, headers=headers)
        assert answer.status_code in (400, 404), (url, answer.text)
    assert served.client.models() == sorted(map(name_of, (*KINDS, "fallback")))


def test_the_server_listens_on_loopback_only(served: Served) -> None:
    process = psutil.Process(served.running.pid)
    listening = [entry for entry in process.net_connections("inet") if entry.status == psutil.CONN_LISTEN]
    assert len(listening) == 5
    assert {entry.laddr.ip.removeprefix("::ffff:") for entry in listening} == {HOST}


@pytest.mark.parametrize(
    ("kind", "execution", "provider"),
    [
        ("script", "torchscript", "torchscript/cpu"),
        ("int8", "torchscript", "torchscript/cpu"),
        ("exported", "exported", "aten/cpu"),
        ("onnx", "openvino", "openvino/CPU"),
    ],
)
def test_describe_tells_what_is_served_and_what_executes_it(
    served: Served, kind: str, execution: str, provider: str
) -> None:
    described = served.client.describe(name_of(kind))
    if described["device"] == "cpu":
        assert (described["execution"], described["provider"]) == (execution, provider)
        assert described["threads"] == len(os.sched_getaffinity(0))
    assert described["passed_over"] == []
    assert described["artifact"] == kind
    assert described["max_batch"] == 8
    assert described["classes"] == len(CLASSES)


def test_a_worker_has_the_environment_that_executions_are_measured_in(served: Served) -> None:
    (worker,) = served.client.workers(name_of("int8"))
    environment = psutil.Process(worker["pid"]).environ()
    assert {name: environment.get(name) for name in ENVIRONMENT} == dict(ENVIRONMENT)


def test_an_engine_that_was_passed_over_is_told_by_describe_and_the_workers_log(served: Served) -> None:
    described = served.client.describe(name_of("fallback"))
    assert described["execution"] == "onnxruntime"
    assert [entry["execution"] for entry in described["passed_over"]] == ["openvino[precision=f33]"]
    reason = described["passed_over"][0]["reason"]
    assert "Wrong value f33" in reason
    log = (state_folder(served.store) / "logs" / "model_log.log").read_text()
    assert f"passed over openvino[precision=f33]: {reason}" in log
    families = text_string_to_metric_families(served.client.metrics())
    (passed,) = (sample for family in families for sample in family.samples if sample.name == "PassedOver")
    assert passed.value == 1
    assert (passed.labels["ModelName"], passed.labels["ModelVersion"]) == (name_of("fallback"), "1.0")
    assert passed.labels["Execution"] == "openvino[precision=f33]"
    words = reason.replace(",", " ").replace(":", " ").replace("|", " ").split()
    assert passed.labels["Reason"] == " ".join(words)[:200].strip()
    assert "onnx: runs with onnxruntime (onnxruntime/CPUExecutionProvider, " in log
    assert_same(
        served.client.predict(name_of("fallback"), jpeg(1)),
        served.client.predict(name_of("onnx"), jpeg(1), headers={"X-Top-K": "5"}),
    )


def test_the_handlers_metrics_are_in_prometheus_form_with_their_provider(served: Served) -> None:
    before = _settled(served, "Images")
    refused = _settled(served, "Refused")
    served.client.predict_instances(name_of("onnx"), [jpeg(1), jpeg(2), b"no"])
    deadline = time.monotonic() + 10  # TorchServe reads them from the worker's output, later
    while _metric(served.client.metrics(), "Images", "onnx") < before + 3:
        assert time.monotonic() < deadline
        time.sleep(0.1)
    text = served.client.metrics()
    assert _metric(text, "Images", "onnx") == before + 3
    assert _metric(text, "Refused", "onnx") == refused + 1
    assert _metric(text, "BatchSize", "onnx") == 3
    assert re.search(rf'^Refused{{[^}}]*ModelName="{name_of("onnx")}"[^}}]*Kind="item-415"', text, re.MULTILINE)
    for stage in ("Wait", "Decode", "Preprocess", "Inference", "Postprocess"):
        assert _metric(text, f"{stage}Time_count", "onnx") >= 1
        assert _metric(text, f"{stage}Time_bucket", "onnx") <= _metric(text, f"{stage}Time_count", "onnx")
    assert _metric(text, "DecodeTime_sum", "onnx") > 0
    assert _metric(text, "InferenceTime_sum", "onnx") > 0
    labels = next(line for line in text.splitlines() if line.startswith("Images{") and name_of("onnx") in line)
    described = served.client.describe(name_of("onnx"))
    assert f'Provider="{described["provider"]}",Execution="{described["execution"]}",' in labels
    assert "ts_inference_requests_total" in text


def test_an_answer_says_where_its_time_went(served: Served) -> None:
    answer = httpx.post(served.url("onnx"), content=jpeg(1), headers={**served.headers(), "content-type": "image/jpeg"})
    told = dict(re.findall(r"(\w+);dur=([0-9.]+)", answer.headers["server-timing"]))
    assert list(told) == ["frontend", "queue", "decode", "preprocess", "infer", "postprocess"]
    assert float(told["decode"]) > 0
    assert sum(map(float, told.values())) < answer.elapsed.total_seconds() * 1e3


def test_each_request_is_in_prometheus_histograms_by_stage_with_its_own_time(served: Served) -> None:
    def told() -> dict[tuple[str, str, float], float]:
        families = text_string_to_metric_families(served.client.metrics())
        (family,) = [family for family in families if family.name == "serve_stage_seconds"]
        return {
            (sample.name.rpartition("_")[2], sample.labels["stage"], float(sample.labels.get("le", 0))): sample.value
            for sample in family.samples
            if (sample.labels["model"], sample.labels["version"]) == (name_of("script"), "1.0")
        }

    assert post(served, content=jpeg(1)).status_code == 200  # so that there are series
    before = told()
    answers = [post(served, content=content) for content in (jpeg(1), jpeg(2), b"no image")]
    assert post(served, content=jpeg(1), headers={"x-top-k": "none"}).status_code == 400  # it has no stages
    after = told()
    for stage in (FRONTEND_STAGE, *STAGES):
        seconds = [stages(answer.headers["server-timing"])[stage] / 1e3 for answer in answers]
        more = {key: after[key] - before[key] for key in after if key[1] == stage}
        assert more["count", stage, 0] == 3
        assert more["sum", stage, 0] == pytest.approx(sum(seconds), abs=1e-9)
        within = {bucket: sum(value <= bucket for value in seconds) for bucket in (*STAGE_BUCKETS, math.inf)}
        assert {le: count for (kind, _, le), count in more.items() if kind == "bucket"} == within


def processor_s(process: psutil.Process) -> float:
    """Processor time that a process has taken, in its own code and in the kernel's, to 10 ms."""
    times = process.cpu_times()
    return float(times.user + times.system)


def _until(holds: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 20
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def _settled(served: Served, name: str) -> float:
    """The counter once it stands: what earlier tests asked is told a little later."""
    seen = -1.0
    while seen != (seen := _metric(served.client.metrics(), name, "onnx")):
        time.sleep(0.5)
    return seen


def _metric(text: str, name: str, kind: str) -> float:
    match = re.search(rf'^{name}{{[^}}]*ModelName="{name_of(kind)}"[^}}]*}} (\S+)$', text, re.MULTILINE)
    return float(match[1]) if match else 0.0
