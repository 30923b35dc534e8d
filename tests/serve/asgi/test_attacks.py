"""What was closed once stays closed at every door that was added since: bombs, leaks, pickles and native code."""

from __future__ import annotations

import base64
import dataclasses
import os
import re
import time
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
import tritonclient.grpc as triton_grpc
import tritonclient.http as triton_http
from tritonclient.utils import InferenceServerException
from typer.main import get_command

from benchmarks.attacks import Kind, attack
from benchmarks.hostile import bodies, bombs
from benchmarks.hostile.pictures import encoded, picture
from serve.archive.archive_file import check_archive
from serve.archive.signature import sign
from serve.archive.verification import Policy
from serve.asgi.process.model_loader import load
from serve.asgi.process.serving_plan import Wanted
from serve.cli import app
from serve.common.options import ServingOptions
from serve.load.plan import Target
from serve.runtime.card.card import CARD_FILE, read_card, sha256_file, write_card
from serve.runtime.errors import CardError, EngineError, Refusal
from serve.runtime.service.protocol import Request
from serve.torchserve.archive_builder import build_archive
from serve.tune.servers import Live
from tests.serve import artifacts, crafted
from tests.serve.archive.test_signature import make_keys
from tests.serve.asgi.protocols.test_oip_server import image_tensor
from tests.serve.own_server import Running, bearer

GOOD = artifacts.jpeg(1)


def by_predictions(server: Running, images: list[bytes]) -> tuple[int, str]:
    body = {"instances": [{"b64": base64.b64encode(image).decode()} for image in images]}
    answer = httpx.post(f"http://{server.http}/v1/models/small:predict", json=body, headers=bearer(), timeout=60)
    return answer.status_code, answer.text


def by_json(server: Running, images: list[bytes]) -> tuple[int, str]:
    data = [base64.b64encode(image).decode() for image in images]
    tensor = {"name": "image", "datatype": "BYTES", "shape": [len(images)], "data": data}
    answer = httpx.post(
        f"http://{server.http}/v2/models/small/infer", json={"inputs": [tensor]}, headers=bearer(), timeout=60
    )
    return answer.status_code, answer.text


def by_client(module: Any, place: Callable[[Running], str]) -> Callable[[Running, list[bytes]], tuple[int, str]]:
    def ask(server: Running, images: list[bytes]) -> tuple[int, str]:
        client = module.InferenceServerClient(place(server))
        try:
            client.infer("small", [image_tensor(module, images)], headers=bearer())
        except InferenceServerException as error:
            status = str(error.status()).removeprefix("StatusCode.")
            # gRPC has fewer words for what the client did wrong.
            numbers = {"INVALID_ARGUMENT": 400, "RESOURCE_EXHAUSTED": 413, "OUT_OF_RANGE": 413}
            return numbers[status] if status in numbers else int(status), error.message()
        finally:
            client.close()
        return 200, ""

    return ask


DOORS = {
    "version 1": by_predictions,
    "version 2 in JSON": by_json,
    "version 2 in binary": by_client(triton_http, lambda server: server.http),
    "gRPC": by_client(triton_grpc, lambda server: server.grpc),
}


@pytest.mark.parametrize("door", DOORS)
def test_no_bomb_costs_more_at_any_door_of_the_own_server(door: str, own_server: Running) -> None:
    for name, bomb in bombs.each():
        begun = time.process_time()
        status, text = DOORS[door](own_server, [bomb])
        seconds = time.process_time() - begun
        assert 400 <= status < 500 or (door == "version 1" and status == 200 and "413" in text), (name, status, text)
        assert seconds < 3, (name, seconds)
    status, text = DOORS[door](own_server, [GOOD])
    assert status == 200, text


def test_many_large_images_of_few_bytes_are_refused_together_at_every_door(own_server: Running) -> None:
    for door, ask in DOORS.items():
        begun = time.process_time()
        status, text = ask(own_server, [bombs.webp()] * 8)
        assert status in (400, 413) or "pixels in total" in text, (door, status, text)
        assert time.process_time() - begun < 3, door


def test_refused_images_leave_nothing_in_the_server(own_server: Running) -> None:
    whole = encoded(picture(5, (3000, 3000)), quality=60)
    broken = whole[: len(whole) // 2]

    def refuse(count: int) -> None:
        for _ in range(count):
            status, text = by_json(own_server, [broken])
            assert status == 400, text

    refuse(24)  # allocators keep some, for each thread that decodes
    before = psutil.Process().memory_info().rss
    refuse(24)
    grown = psutil.Process().memory_info().rss - before
    assert grown < 4 * 3000 * 3000 * 3, "less than 4 of 24 decoded images"


def test_the_benchmark_measures_what_a_server_really_answers(own_server: Running, tmp_path: Path) -> None:
    live = Live({"small": Target(own_server.http, "/predictions/small", bearer())}, os.getpid(), tmp_path)
    sent = (
        Kind("good", (GOOD,), honest=True),
        Kind("bomb", (bombs.bomb("png"),)),
        Kind("deep", (bodies.nested(10_000),)),
        Kind("mixed", (GOOD, b"no image")),
        Kind("announced", (b"",), announced=1 << 30),
    )
    found = attack(live, sent, repeats=2, refusals=9)
    assert {cost.title: dict(cost.answers) for cost in found.costs} == {
        "good": {200: 2},
        "bomb": {413: 2},
        "deep": {400: 2},
        "mixed": {200: 1, 415: 1},
        "announced": {413: 2},
    }
    assert found.refusals == {413: 6, 400: 3}, "those kinds alone of which all are refused"
    assert found.holds
    assert len(found.held) == 5
    assert all(cost.milliseconds > 0 for cost in found.costs)


def trusted_archive(folder: Path, name: str, tmp_path: Path) -> tuple[Path, Policy]:
    """An archive of a folder, signed by a key that the policy trusts."""
    keys = make_keys(tmp_path, "release")
    archive = build_archive(folder, tmp_path / f"{name}.mar", model_name=name)
    sign(archive, keys.private)
    return archive, Policy((keys.public,))


@pytest.mark.parametrize("way", [*crafted.RUN_BY_TORCH, "native code"])
def test_the_own_server_runs_nothing_that_a_program_brings_whoever_signed_it(way: str, tmp_path: Path) -> None:
    folder = artifacts.exported(tmp_path / "exported")
    marker = tmp_path / "ran"
    records = crafted.records_of(folder / "model.pt2")
    change, reason = crafted.WAYS[way]
    change(records, marker)
    crafted.write_records(folder / "model.pt2", records)
    card = read_card(folder)
    write_card(folder, dataclasses.replace(card, files={"model.pt2": sha256_file(folder / "model.pt2")}))
    archive, policy = trusted_archive(folder, "evil", tmp_path)
    with pytest.raises(EngineError, match=reason):
        load(Wanted("evil", "1.0", archive), gpu=None, queue=None, policy=policy)
    assert not marker.exists()


def test_the_own_server_does_not_run_the_python_of_an_archive(tmp_path: Path) -> None:
    """Signed or not, and whatever it is called: the server has the runtime that it was started with."""
    folder = artifacts.torchscript(tmp_path / "script")
    marker = tmp_path / "ran"
    archive = build_archive(folder, tmp_path / "tiny.mar", model_name="tiny")
    with zipfile.ZipFile(archive) as opened:
        files = {name: opened.read(name) for name in opened.namelist() if name != CARD_FILE}
        (tmp_path / "card").mkdir()
        (tmp_path / "card" / CARD_FILE).write_bytes(opened.read(CARD_FILE))
    evil = crafted.source(marker).encode() + b"\n"
    files |= {name: evil for name in files if name.endswith(".py")}
    (tmp_path / "evil.py").write_bytes(evil)
    card = read_card(tmp_path / "card")
    packed = {name: sha256_file(tmp_path / "evil.py") if name.endswith(".py") else h for name, h in card.packed.items()}
    write_card(tmp_path / "card", dataclasses.replace(card, packed=packed))
    with zipfile.ZipFile(archive, "w") as written:
        for name, content in {**files, CARD_FILE: (tmp_path / "card" / CARD_FILE).read_bytes()}.items():
            written.writestr(name, content)
    check_archive(archive)
    served = load(Wanted("tiny", "1.0", archive), gpu=None, queue=None, policy=Policy())
    served.service.close()
    assert not marker.exists()


def test_no_bomb_costs_more_where_a_decoder_lies_beside_the_engine(tmp_path: Path) -> None:
    folder = artifacts.torchscript(tmp_path / "script")
    options = ServingOptions(decoder="reduced", batch_size=4)
    archive = build_archive(folder, tmp_path / "tiny.mar", model_name="tiny", options=options)
    served = load(Wanted("tiny", "1.0", archive), gpu=None, queue=None, policy=Policy())
    with served.service as service:
        for name, bomb in bombs.each():
            begun = time.process_time()
            answered = service.submit(Request((bomb, GOOD), 1, listed=True)).result(timeout=30)
            refused, label = answered.outcomes
            assert isinstance(refused, Refusal), name
            assert 400 <= refused.status < 500, (name, refused)
            assert not isinstance(label, Refusal), name
            assert time.process_time() - begun < 3, name


@pytest.mark.parametrize("kind", ["deflated", "overlapping"])
def test_an_archive_that_unpacks_to_more_than_it_has_is_refused_before_it_is_read(kind: str, tmp_path: Path) -> None:
    path = tmp_path / "bomb.mar"
    size = 1 << 30
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED if kind == "deflated" else zipfile.ZIP_STORED) as archive:
        if kind == "deflated":
            with archive.open("model.pt", "w", force_zip64=True) as stream:
                for _ in range(64):
                    stream.write(bytes(1 << 20))
        else:
            archive.writestr("model.pt", bytes(1 << 20))
            first = archive.getinfo("model.pt")
            for number in range(200):  # each entry of the directory says that it is the first
                again = zipfile.ZipInfo(f"model.onnx.{number}")
                again.header_offset, again.file_size = first.header_offset, first.file_size
                again.compress_size, again.CRC = first.compress_size, first.CRC
                archive.filelist.append(again)
                archive.NameToInfo[again.filename] = again
    assert path.stat().st_size < size
    begun = time.process_time()
    with pytest.raises(CardError, match="unpacks to more bytes than its directory states"):
        check_archive(path)
    assert time.process_time() - begun < 1


def test_the_page_on_security_names_only_what_is_there() -> None:
    root = Path(__file__).parents[3]
    page = (root / "docs" / "explanations" / "security.md").read_text(encoding="utf-8")
    named = re.findall(r"`(tests/[\w/]+\.py)`", page)
    assert named
    assert [name for name in named if not (root / name).is_file()] == []
    commands = vars(get_command(app))["commands"].values()
    known = {option for command in commands for entry in command.params for option in entry.opts}
    assert set(re.findall(r"--[a-z][a-z-]+", page)) <= known
