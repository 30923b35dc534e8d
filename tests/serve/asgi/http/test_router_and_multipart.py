"""The own server's parts, each alone: router, versions by weight, tokens, where it listens, forms, logs."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import logging
import os
import re
import socket
import stat
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st
from typer.main import get_command

from serve.asgi.http.listen_sockets import Listening
from serve.asgi.http.messages import RefusedError, Response
from serve.asgi.http.multipart import parts_of
from serve.asgi.http.router import Router
from serve.asgi.http.served_models import Models, Served
from serve.asgi.http.tokens import Tokens, make_token_file
from serve.asgi.process.serving_plan import Plan, versions_of
from serve.asgi.process.systemd_notify import notify
from serve.asgi.protocols import grpc_admission
from serve.cli import app
from serve.packing.pack import package_run
from serve.runs.sealed_files import seal
from serve.runtime.errors import RequestError, UserError
from serve.runtime.service.logs import JsonLines, RequestLog
from serve.runtime.service.observation import Observation
from serve.runtime.service.stages import Stages
from tests.serve import artifacts

A, B, C = "a" * 20, "b" * 20, "c" * 20


async def nothing(_: Any) -> Response:
    return Response(200, b"")


def router() -> Router:
    made = Router()
    for methods, path in (
        ("POST PUT", "/predictions/{name}"),
        ("POST", "/predictions/{name}/{version}"),
        ("GET", "/v2/models/{name}/ready"),
        ("GET", "/v2/models/{name}/versions/{version}"),
        ("GET", "/ping"),
    ):
        made.add(methods, path, nothing)
    return made


@pytest.mark.parametrize(
    ("method", "path", "route", "parameters"),
    [
        ("POST", "/predictions/cat", "/predictions/{name}", {"name": "cat"}),
        ("PUT", "/predictions/cat/", "/predictions/{name}", {"name": "cat"}),
        ("POST", "/predictions/cat/2.0", "/predictions/{name}/{version}", {"name": "cat", "version": "2.0"}),
        ("POST", "/predictions/a%2Fb", "/predictions/{name}", {"name": "a/b"}),
        ("GET", "/v2/models/ready/ready", "/v2/models/{name}/ready", {"name": "ready"}),
        ("HEAD", "/ping", "/ping", {}),
    ],
)
def test_a_path_finds_its_route_and_parameters(method: str, path: str, route: str, parameters: dict[str, str]) -> None:
    found, given_ = router().find(method, path)
    assert (found.path, given_) == (route, parameters)


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [("GET", "/predictions/cat", 405), ("POST", "/", 404), ("POST", "/predictions//", 404), ("GET", "/v2/models", 404)],
)
def test_what_has_no_route_is_404_and_a_wrong_method_405_with_the_right_ones(
    method: str, path: str, status: int
) -> None:
    with pytest.raises(RefusedError) as caught:
        router().find(method, path)
    assert caught.value.status == status
    assert dict(caught.value.headers).get("allow") == ("POST, PUT" if status == 405 else None)


def test_a_path_cannot_be_answered_twice() -> None:
    with pytest.raises(ValueError, match="has a handler already"):
        router().add("PUT", "/predictions/{name}", nothing)
    with pytest.raises(ValueError, match="called"):
        router().add("GET", "/predictions/{model}/x", nothing)


def version(name: str, number: str, weight: int = 1) -> Served:
    service = cast(Any, SimpleNamespace(stalls=False))
    return Served(name, number, cast(Any, None), cast(Any, None), service, weight=weight)


@given(st.lists(st.integers(0, 20), min_size=1, max_size=4).filter(any))
def test_of_as_many_requests_as_the_weights_sum_to_each_version_gets_its_weight(weights: list[int]) -> None:
    models = Models()
    models.replace({"m": [version("m", str(index), weight) for index, weight in enumerate(weights)]})
    for _ in range(2):
        got = Counter(models.get("m").version for _ in range(sum(weights)))
        assert [got[str(index)] for index in range(len(weights))] == weights


@given(st.integers(0, 3000), st.sampled_from([(999, 1), (9, 1), (1, 1000), (3, 2)]), st.booleans())
def test_changed_weights_hold_from_the_next_request_on(asked: int, before: tuple[int, int], other: bool) -> None:
    models, first, second = Models(), version("m", "1", before[0]), version("m", "2", before[1])
    models.replace({"m": [first, second]})
    for _ in range(asked):
        models.get("m")
    second = version("m", "3") if other else second
    first.weight, second.weight = 1, 0
    models.replace({"m": [first, second]})
    assert {models.get("m").version for _ in range(50)} == {"1"}
    second.weight = 1
    models.replace({"m": [first, second]})
    assert Counter(models.get("m") for _ in range(50)) == {first: 25, second: 25}


def test_turns_go_on_where_the_same_is_told_again() -> None:
    models = Models()
    both = [version("m", "1", 9), version("m", "2")]
    got: Counter[str] = Counter()
    for _ in range(100):
        models.replace({"m": both})
        got[models.get("m").version] += 1
    assert got == {"1": 90, "2": 10}


def test_an_unknown_model_is_404_with_the_nearest_name_and_one_that_is_loading_503() -> None:
    models = Models(["resnet18-ptq"])
    with pytest.raises(RefusedError, match="is being loaded") as caught:
        models.get("resnet18-ptq")
    assert (caught.value.status, dict(caught.value.headers)["retry-after"]) == (503, "1")
    seen = [models.ready]
    models.replace({"resnet18-ptq": [version("resnet18-ptq", "1.0")]})
    seen.append(models.ready)
    assert seen == [False, True]
    with pytest.raises(RefusedError, match="did you mean resnet18-ptq") as caught:
        models.get("resnet18-pqt")
    assert caught.value.status == 404
    with pytest.raises(RefusedError, match=r"there are 1\.0") as caught:
        models.get("resnet18-ptq", "3")
    assert caught.value.status == 404


def test_a_version_that_is_out_is_released_only_when_nobody_holds_it() -> None:
    async def change() -> list[str]:
        events = []
        old = version("m", "1")
        models = Models()
        models.replace({"m": [old]})

        async def answer() -> None:
            with models.get("m").held():
                await asyncio.sleep(0.05)
                events.append("answered")

        asking = asyncio.ensure_future(answer())
        await asyncio.sleep(0)
        (out,) = models.replace({"m": [version("m", "2")]})
        assert out is old
        assert models.get("m").version == "2"
        await out.released()
        events.append("released")
        await asking
        return events

    assert asyncio.run(change()) == ["answered", "released"]


def token_file(folder: Path, *tokens: str, mode: int = 0o600) -> Path:
    path = folder / "tokens"
    path.write_text("# comment\n\n" + "\n".join(tokens) + "\n")
    path.chmod(mode)
    return path


def accepted(tokens: Tokens, header: str) -> bool:
    tokens._looked = float("-inf")  # a second has gone by
    try:
        tokens.check(header)
    except RefusedError as error:
        return (error.status, error.headers) != (401, (("www-authenticate", "Bearer"),))
    return True


def test_two_tokens_are_valid_at_once_and_a_rotation_refuses_nobody(tmp_path: Path) -> None:
    tokens = Tokens(token_file(tmp_path, A))
    assert [accepted(tokens, f"Bearer {entry}") for entry in (A, B)] == [True, False]
    token_file(tmp_path, A, B)
    assert [accepted(tokens, f"Bearer {entry}") for entry in (A, B)] == [True, True]
    token_file(tmp_path, B)
    assert [accepted(tokens, f"Bearer {entry}") for entry in (A, B)] == [False, True]


@pytest.mark.parametrize("header", ["", A, f"Basic {A}", "Bearer", "Bearer ", f"Bearer {A}x", f"Bearer {A[:-1]}", "é"])
def test_only_a_whole_bearer_token_is_valid(header: str, tmp_path: Path) -> None:
    assert not accepted(Tokens(token_file(tmp_path, A)), header)


@pytest.mark.parametrize("broken", ["", "short", "a b c d e f g h i j k l"])
def test_while_the_file_cannot_be_used_the_tokens_from_before_are_valid(
    broken: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    tokens = Tokens(token_file(tmp_path, A))
    token_file(tmp_path, broken)
    assert accepted(tokens, f"Bearer {A}")
    assert "stay valid" in caplog.text
    tokens.path.unlink()
    assert accepted(tokens, f"Bearer {A}")


def test_a_pipe_in_the_place_of_the_file_holds_nobody_up(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    tokens = Tokens(token_file(tmp_path, A))
    tokens.path.unlink()
    os.mkfifo(tokens.path, mode=0o600)
    assert accepted(tokens, f"Bearer {A}")
    assert "not a regular file" in caplog.text
    with pytest.raises(UserError, match="not a regular file"):
        Tokens(tokens.path)


def test_a_file_of_tokens_may_begin_with_a_byte_order_mark(tmp_path: Path) -> None:
    path = token_file(tmp_path, A)
    path.write_bytes(b"\xef\xbb\xbf" + path.read_bytes())
    assert accepted(Tokens(path), f"Bearer {A}")


@pytest.mark.parametrize("mode", [0o644, 0o640, 0o606, 0o660])
def test_a_file_of_tokens_that_others_may_read_is_refused_with_what_mends_it(mode: int, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="chmod 600"):
        Tokens(token_file(tmp_path, A, mode=mode))


def test_a_token_is_made_once_for_its_owner_only(tmp_path: Path) -> None:
    path = tmp_path / "private" / "tokens"
    assert make_token_file(path)
    made = path.read_text()
    assert not make_token_file(path)
    assert path.read_text() == made
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert accepted(Tokens(path), f"Bearer {made.splitlines()[-1]}")


@pytest.mark.parametrize("host", ["a..b", ".", "a" * 64])
def test_what_no_host_can_be_called_is_told_in_one_line(host: str) -> None:
    with pytest.raises(UserError, match=f"^--host {re.escape(host)}: "):
        Listening(host, port=0, expose=True).open()


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.0.2.1", "example.org"])
def test_others_are_let_in_only_where_that_is_said(host: str) -> None:
    with pytest.raises(UserError, match="--expose"):
        Listening(host)
    told = Listening(host, expose=True).opens(tokens=False)
    assert len(told) == 3
    assert "without TLS" in told[1]
    assert "no token: the server answers everyone who can reach it" in told[2]


def test_on_loopback_with_tokens_there_is_nothing_to_tell() -> None:
    assert Listening("localhost").opens(tokens=True) == Listening("::1").opens(tokens=True) == []
    assert Listening().opens(tokens=False) == ["no token: the server answers every user of this machine"]


def test_a_unix_socket_is_this_users_own_and_a_dead_one_is_replaced(tmp_path: Path) -> None:
    listening = Listening(path=tmp_path / "s")
    with listening.open() as opened:
        assert stat.S_IMODE((tmp_path / "s").stat().st_mode) == 0o600
        opened.listen()
        with pytest.raises(UserError, match="another server listens"):
            listening.open()
    listening.open().close()
    (tmp_path / "file").write_text("precious")
    with pytest.raises(UserError, match="is a file, not a socket"):
        Listening(path=tmp_path / "file").open()
    assert (tmp_path / "file").read_text() == "precious"


def test_a_port_that_is_taken_is_named() -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        with pytest.raises(UserError, match=f"127.0.0.1:{port} cannot be used"):
            Listening(port=port).open()


def test_of_two_servers_that_take_one_port_before_either_answers_the_second_is_told(tmp_path: Path) -> None:
    with Listening(port=0).open() as first:
        port = first.getsockname()[1]
        with pytest.raises(UserError, match=f"127.0.0.1:{port} cannot be used"):
            Listening(port=port).open()
    with Listening(path=tmp_path / "s").open(), pytest.raises(UserError, match="another server listens"):
        Listening(path=tmp_path / "s").open()


def form(*parts: tuple[str, str, bytes], boundary: bytes = b"xyz") -> bytes:
    return (
        b"".join(
            b'--%s\r\nContent-Disposition: form-data; name="%s"\r\nContent-Type: %s\r\n\r\n%s\r\n'
            % (boundary, name.encode(), kind.encode(), content)
            for name, kind, content in parts
        )
        + b"--%s--\r\n" % boundary
    )


@given(
    st.dictionaries(
        st.text("abcdefgh", min_size=1), st.binary().filter(lambda content: b"--xyz" not in content), max_size=5
    )
)
def test_a_form_gives_its_parts_as_they_were_sent(parts: dict[str, bytes]) -> None:
    body = form(*((name, "image/JPEG; q=1", content) for name, content in parts.items()))
    found = parts_of(body, "multipart/form-data; boundary=xyz")
    assert {part.name: bytes(part.content) for part in found} == parts
    assert {part.content_type for part in found} <= {"image/jpeg"}


@given(st.binary(max_size=200), st.integers(0, 120))
def test_a_form_that_is_none_or_was_cut_is_refused(noise: bytes, length: int) -> None:
    whole = form(("data", "image/jpeg", b"12345"))
    for body in (noise, whole[: min(length, len(whole) - 9)]):
        with pytest.raises(RequestError, match="multipart"):
            parts_of(body, "multipart/form-data; boundary=xyz")
    with pytest.raises(RequestError, match="boundary"):
        parts_of(whole, "multipart/form-data")
    with pytest.raises(RequestError, match="more than 64 parts"):
        parts_of(form(*[("a", "x", b"")] * 65), "multipart/form-data; boundary=xyz")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("models: [", "is not valid YAML"),
        (
            "models: {m: [{archive: a.mar}], m: [{archive: a.mar}]}",
            "models.yaml: is not valid YAML .*'m' is given",
        ),
        ("models: {1: [{archive: a.mar}], '1': [{archive: a.mar}]}", "'1' is given twice"),
        ("models: {m: [{archive: a.mar, weight: 1, weight: 9}]}", "'weight' is given twice"),
        ("models: {m: [{archive: a.mar, version: 2024-13-45}]}", "models.yaml: is not valid YAML .*month"),
        ("models: " + "[" * 5000, "models.yaml: is not valid YAML"),
        ("- 1", "models"),
        ("models: {}", "models"),
        ("models: {m: [{archive: a.mar, wait: 1}]}", "wait"),
        ("models: {m: [{archive: a.mar}, {archive: a.mar}]}", "version twice"),
        ("models: {m: [{archive: a.mar, weight: 0}]}", "weight above 0"),
        ("models: {m: [{archive: a.mar, weight: yes}]}", "m: weight: input should be a number"),
        ("models: {'m/n': [{archive: a.mar}]}", "cannot name"),
        ("models: {m: [{archive: a.mar, version: 'a b'}]}", "a version has up to 40 letters"),
        ("models: {m: [{archive: none.mar}]}", r"none\.mar: there is no such archive$"),
        ("models: {7: [{archive: a.mar}], 0x7: [{archive: a.mar}]}", "text, but YAML reads one as 7: put it in"),
        ("models: {on: [{archive: a.mar}]}", "must be text, but YAML reads one as True: put it in quotes"),
        ("models: {null: [{archive: a.mar}]}", "must be text, but YAML reads one as None: put it in quotes"),
        ("models: {1.0: [{archive: a.mar}]}", r"must be text, but YAML reads one as 1\.0: put it in quotes"),
        (
            "models: {m: [{archive: n=a.mar}]}",
            "n=a.mar: there is no such archive; .* names: leave out NAME=",
        ),
        (
            "models: {m: [{archive: n=run/ptq}]}",
            "n=run/ptq: in a file of models the keys are the names: leave out NAME=",
        ),
        (f"models: {{m: [{{archive: {'a' * 300}.mar}}]}}", "a.mar: cannot be read .File name too long"),
    ],
)
def test_a_file_of_models_that_says_something_else_is_refused_in_one_line(
    text: str, message: str, tmp_path: Path
) -> None:
    (tmp_path / "a.mar").write_bytes(b"")
    (tmp_path / "models.yaml").write_text(text)
    with pytest.raises(UserError, match=message) as caught:
        Plan((), tmp_path / "models.yaml", tmp_path).read()
    assert "\n" not in str(caught.value)


def test_a_file_of_models_names_versions_weights_and_archives_beside_it(tmp_path: Path) -> None:
    (tmp_path / "a.mar").write_bytes(b"")
    (tmp_path / "b.mar").write_bytes(b"")
    (tmp_path / "models.yaml").write_text(
        "models:\n  m:\n  - {archive: a.mar, weight: 9}\n  - {archive: b.mar, version: '2.0'}\n"
    )
    wanted = Plan((), tmp_path / "models.yaml", Path()).read()
    assert [(entry.name, entry.version, entry.archive.name, entry.weight) for entry in wanted] == [
        ("m", "1.0", "a.mar", 9),
        ("m", "2.0", "b.mar", 1),
    ]


def test_requests_that_fail_or_are_slow_are_logged_as_json_and_a_flood_is_not(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO, "serve.requests")
    log = RequestLog(0.5)
    fine = Observation("one", "/predictions/{name}", "m", "1.0", 200, 0.01, Stages(1, 2, 3, 4, 5), 3, 1)
    log(fine)
    log(dataclasses.replace(fine, status=415))
    assert not caplog.records
    log(dataclasses.replace(fine, seconds=0.6))
    line = json.loads(JsonLines().format(caplog.records[0]))
    assert (line["event"], line["request_id"], line["ms"], line["stages_ms"]["infer"]) == (
        "slow request",
        "one",
        600,
        4,
    )
    for _ in range(100):
        log(dataclasses.replace(fine, status=503, refusals=("queue-full",)))
    assert len(caplog.records) <= 40


def test_an_exception_in_the_log_is_one_line_of_json(caplog: pytest.LogCaptureFixture) -> None:
    try:
        raise ValueError("what\nwas wrong")
    except ValueError:
        logging.getLogger("serve.x").exception("it failed")
    text = JsonLines().format(caplog.records[0])
    assert "\n" not in text
    assert json.loads(text)["error"] == "ValueError: what"
    assert os.linesep not in text


def test_an_archive_is_served_by_its_files_name_or_another(tmp_path: Path) -> None:
    for name in ("a", "b"):
        (tmp_path / f"{name}.mar").write_bytes(b"")
    wanted = Plan((f"{tmp_path}/a.mar", f"cat={tmp_path}/b.mar"), None, tmp_path).read()
    assert [(entry.name, entry.archive.name) for entry in wanted] == [("a", "a.mar"), ("cat", "b.mar")]
    folder = tmp_path / "day=1"
    folder.mkdir()
    (folder / "c.mar").write_bytes(b"")
    assert Plan((f"{folder}/c.mar",), None, tmp_path).read()[0].name == "c"
    assert Plan((f"d={folder}/c.mar",), None, tmp_path).read()[0].name == "d"
    (tmp_path / "models.yaml").write_text("models: {m: [{archive: day=1/c.mar}]}")
    assert Plan((), tmp_path / "models.yaml", tmp_path).read()[0].archive == folder / "c.mar"
    with pytest.raises(UserError, match=r"cannot be read \(File name too long\)"):
        Plan((f"{'a' * 300}.mar",), None, tmp_path).read()
    with pytest.raises(UserError, match="a is given twice"):
        Plan((f"{tmp_path}/a.mar", f"a={tmp_path}/b.mar"), None, tmp_path).read()


def test_a_run_is_served_by_its_recommended_artifact_or_by_another(tmp_path: Path) -> None:
    for name in ("one", "two"):
        artifacts.torchscript(tmp_path / "small" / "artifacts" / name, name=name)
    package_run(tmp_path, "small")
    rows: list[dict[str, object]] = [{"name": name, "archive": {}} for name in ("one", "two")]
    (tmp_path / "small" / "report.json").write_text(json.dumps({"rows": rows, "recommended": "two"}))
    seal(tmp_path / "small")
    wanted = Plan(("small", "small/one", "cat=small/one"), None, tmp_path).read()
    assert [(entry.name, entry.version, entry.archive.stem) for entry in wanted] == [
        ("small-two", "1.0", "small-two"),
        ("small-one", "1.0", "small-one"),
        ("cat", "1.0", "small-one"),
    ]
    (tmp_path / "models.yaml").write_text("models: {cat: [{archive: small}, {archive: small/one, version: b}]}")
    wanted = Plan((), tmp_path / "models.yaml", tmp_path).read()
    assert [(entry.version, entry.archive.stem) for entry in wanted] == [("1.0", "small-two"), ("b", "small-one")]
    with pytest.raises(UserError, match=r"there is no run 'smal' \(did you mean small"):
        Plan(("smal",), None, tmp_path).read()


def test_what_is_documented_is_there() -> None:
    text = (Path(__file__).parents[4] / "docs" / "explanations" / "own-server.md").read_text()
    options = {option for entry in get_command(app).commands["run"].params for option in entry.opts}  # type: ignore[attr-defined]
    documented = set(re.findall(r"--[a-z]+(?:-[a-z]+)*", text)) - {"--workers"}
    assert documented - options == set()
    assert len(documented) > 15
    example = text.split("```yaml\n")[1].split("```")[0]
    assert [entry.weight for entry in versions_of(yaml.safe_load(example))["resnet18"]] == [9, 1]


@pytest.mark.parametrize("abstract", [False, True])
def test_systemd_is_told_where_it_asks(abstract: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    name = f"@serve-test-{os.getpid()}" if abstract else str(tmp_path / "notify")
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as systemd:
        systemd.bind("\0" + name[1:] if abstract else name)
        systemd.settimeout(5)
        monkeypatch.setenv("NOTIFY_SOCKET", name)
        notify("READY=1")
        assert systemd.recv(100) == b"READY=1"
    notify("READY=1")  # nobody is there: no fault
    monkeypatch.delenv("NOTIFY_SOCKET")
    notify("READY=1")


def test_a_reader_whose_own_time_is_over_gives_way_when_it_has_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grpc_admission, "_PATIENCE_S", 0.4)
    told: list[str] = []

    async def read(
        turns: grpc_admission.MessageAdmission, name: str, begins: float, seconds: float, lingers: float = 0.0
    ) -> None:
        await asyncio.sleep(begins)
        try:
            async with turns.turn():
                try:
                    await asyncio.sleep(seconds)
                finally:
                    await asyncio.sleep(lingers)
        except RefusedError as error:
            told.append(f"{name}: {error}")
        else:
            told.append(f"{name}: read")

    async def run() -> None:
        turns = grpc_admission.MessageAdmission(1, 1.0)
        await asyncio.gather(
            read(turns, "first", 0.0, 60.0, lingers=0.4),  # its time is over at 1 s, and it leaves at 1.4
            read(turns, "second", 0.8, 0.0),  # sees at 1.2 s that it has waited, and has its turn until 1.8
        )

    asyncio.run(run())
    assert told == ["first: the message did not arrive within 1 s", "second: read"]
