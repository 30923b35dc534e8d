"""The soak: its verdicts are those of its figures, and its campaign runs against a real server."""

from __future__ import annotations

import shutil
import subprocess
from collections import Counter
from functools import partial
from pathlib import Path

import pytest

from benchmarks import soak_phases
from benchmarks.soak import pace, section, verdicts, workloads
from benchmarks.soak_phases import Course, Kill, Phases, Rejected, Soaked, course, live_heap
from serve.load.histogram import Histogram
from serve.load.plan import Result
from serve.load.reference_answers import opened
from serve.runtime.card.card import load_card
from serve.runtime.card.execution import Execution
from serve.runtime.card.serving import Serving
from serve.torchserve.archive_builder import serving_of
from serve.tune.servers import pack, serving
from tests.serve import artifacts


def result(milliseconds: float = 5.0, seconds: float = 10.0, **counts: int) -> Result:
    latency = Histogram()
    for _ in range(counts.get("answered", 0)):
        latency.add(milliseconds)
    came = counts.get("answered", 0) + counts.get("refused", 0)
    return Result(seconds, counts, latency, Histogram(), 0.1, came)


def sound() -> Soaked:
    return Soaked(
        "own",
        capacity=100.0,
        mixed_capacity=80.0,
        mixed=result(answered=480, refused=20),
        memory={"python": [(10.0 * step, 500.0 + (step % 3)) for step in range(60)]},
        overload={1.0: result(answered=990), 2.0: result(answered=950), 4.0: result(answered=920, rejected=3000)},
        afterwards=result(answered=10),
        bad_clients=Counter(
            {
                ("no HTTP", "status 400"): 5,
                ("slow body", "as known"): 3,
                ("slow body", "not finished"): 1,
                ("half-closed", "as known"): 2,
            }
        ),
    )


def failing(found: Soaked) -> list[str]:
    return [verdict.words for verdict in verdicts(found, queue=100) if not verdict.holds]


def test_a_sound_server_passes() -> None:
    assert failing(sound()) == []


@pytest.mark.parametrize(
    ("verdict", "said"),
    [("wrong", "1 wrong"), ("lost", "1 lost"), ("failed", "1 5xx"), ("rejected", "1 requests told")],
)
def test_one_bad_answer_fails(verdict: str, said: str) -> None:
    found = sound()
    found.mixed = result(answered=480, **{verdict: 1})
    assert [words.startswith(said) for words in failing(found)] == [True]


def test_an_error_that_a_bad_client_caused_fails() -> None:
    found = sound()
    found.bad_clients["oversized body", "status 500"] += 1
    assert "behaves badly" in failing(found)[0]


def test_a_client_that_is_slow_within_the_limits_and_is_dropped_fails() -> None:
    found = sound()
    found.bad_clients["slow body", "closed"] += 1
    assert failing(found) == ["slow body: 3 clients answered as known, 1 not"]
    found = sound()
    del found.bad_clients["slow body", "as known"]
    assert failing(found) == ["slow body: 0 clients answered as known, 0 not"], "none was tried"
    found.bad_clients["slow body", "closed"] += 9
    assert failing(found) == ["slow body: 0 clients answered as known, 9 not"]


def test_clients_whose_worker_was_killed_are_told_to_try_again_and_others_are_not() -> None:
    found = sound()
    found.kind = "torchserve"
    found.kills = [Kill(5.0, {"answered": 1})]
    found.bad_clients["half-closed", "status 503, while a worker was killed"] += 1
    assert failing(found) == []
    found.bad_clients["half-closed", "status 503"] += 1
    assert failing(found) == [
        "1 5xx caused by a client that behaves badly",
        "half-closed: 2 clients answered as known, 1 not",
    ]


def test_steady_growth_is_a_leak_and_noise_or_one_step_is_none() -> None:
    found = sound()
    found.memory["python"] = [(10.0 * step, 500.0 + 2.0 * step) for step in range(60)]  # 12 MB a minute
    assert found.growth == pytest.approx(12)
    assert "memory grew by 12.00 MB a minute" in failing(found)[0]
    found.memory["python"] = [(10.0 * step, 500.0 + 40 * (step > 10)) for step in range(60)]
    assert found.leaks is False


def test_growth_that_was_watched_for_too_short_a_time_is_not_said_to_pass() -> None:
    found = sound()
    found.memory["python"] = [(10.0 * step, 500.0 + 1.5 * step) for step in range(12)]  # 9 MB a minute, for two minutes
    assert found.leaks is None
    (told,) = [verdict.line for verdict in verdicts(found, queue=100) if verdict.holds is None]
    assert told.startswith("- **not judged**: memory grew by 9.00 MB a minute over 12 samples")
    assert told.endswith("Growth of 5 % takes 3 minutes at that rate.")


def filling(megabytes_a_minute: float, minutes: int = 10) -> list[tuple[float, float]]:
    return [(10.0 * step, 400.0 + megabytes_a_minute * step / 6) for step in range(minutes * 6)]


def test_of_java_what_stays_alive_in_its_heap_is_judged_and_not_a_heap_that_fills() -> None:
    found = sound()
    found.memory["java"] = filling(8)
    found.live_heap = [(at_s, 50.0) for at_s, _ in filling(0)[::3]]
    assert found.growth == pytest.approx(0)
    assert failing(found) == []
    page = section(found, verdicts(found, queue=100), Serving((Execution("openvino"),)))
    listed = page[page.index("Memory while it was watched:") + 2 :]
    assert listed[0].startswith("- java: 400 MB at first and 479 in the end, +8.00 a minute. Its heap may take ")
    assert listed[1].startswith("- python: ")
    assert listed[2:4] == ["- alive in the heap: 50 MB at first and 50 in the end, +0.00 a minute.", ""]
    found.live_heap = filling(8)[::3]
    assert "memory grew by 8.00 MB a minute over 60 samples. Of Java, only what is alive" in failing(found)[0]


def test_a_java_whose_heap_nobody_looked_into_is_not_judged_by_it_but_a_leaking_worker_is() -> None:
    found = sound()
    found.memory["java"] = filling(8)
    (told,) = [verdict for verdict in verdicts(found, queue=100) if verdict.holds is None]
    assert "Only Java's memory grew. A JDK's jcmd would tell" in told.words
    found.memory["python"] = filling(12)
    assert found.leaks is True


def test_what_is_alive_in_a_real_heap_is_told_without_what_was_dropped(tmp_path: Path) -> None:
    if shutil.which("jcmd") is None or shutil.which("java") is None:
        pytest.skip("no JDK")
    program = tmp_path / "Held.java"
    program.write_text(
        """class Held {
            public static void main(String[] words) throws Exception {
                byte[] held = new byte[30_000_000];
                for (int i = 0; i < 10; i++) { byte[] dropped = new byte[20_000_000]; }
                System.out.println("up"); System.in.read(); System.out.println(held.length);
            }
        }"""
    )
    java = ["java", "-Xmx512m", "-Xms512m", str(program)]
    with subprocess.Popen(java, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "up\n"
        alive = live_heap(process.pid)
        assert alive is not None
        assert 30 < alive < 80  # what was dropped, 200 MB, is not counted; the compiler's classes are
        process.communicate("\n")


def test_overload_that_costs_answers_or_keeps_them_waiting_fails() -> None:
    found = sound()
    found.overload[4.0] = result(answered=890)
    assert "goodput 89.0%" in failing(found)[0]
    found.overload[4.0] = result(seconds=100, answered=8996)
    assert "goodput 89.9% of capacity (at least 90%)" in failing(found)[0]
    page = section(found, verdicts(found, queue=100), Serving((Execution("openvino"),)))
    assert [line.split(" | ")[1:3] for line in page if line.startswith("| 4× |")] == [["90", "89.9%"]]
    found.overload[4.0] = result(milliseconds=2600, answered=950)
    assert failing(found)[0].startswith("at 4 times capacity")


def test_a_worker_that_comes_back_late_fails() -> None:
    found = sound()
    found.kind = "torchserve"
    found.kills = [Kill(5.0, {"answered": 1, "rejected": 9}), Kill(61.0, {"answered": 1})]
    assert "2 workers killed" in failing(found)[0]


def test_a_request_that_a_killed_worker_left_without_an_answer_fails() -> None:
    found = sound()
    found.kind = "torchserve"
    found.kills = [Kill(5.0, {"answered": 9, "rejected": 2, "lost": 1})]
    assert "Requests meanwhile: 0 wrong, 0 failed, 1 lost." in failing(found)[0]


def test_a_campaign_in_which_no_worker_of_torchserve_was_killed_shows_nothing_of_it() -> None:
    found = sound()
    found.kind = "torchserve"
    assert failing(found) == ["no worker was killed"]
    found.kills = [Kill(5.0, {"answered": 1})]
    assert failing(found) == []


def test_requests_that_were_told_to_try_again_are_told_with_the_time() -> None:
    found = sound()
    found.rejected = [Rejected("faults and kills", 213.4, 44, 31.2, 850), Rejected("memory watched", 5.0, 3, None)]
    page = section(found, verdicts(found, queue=100), Serving((Execution("openvino"),)))
    kill = "44 told to try again in the 10 s from second 213 of faults and kills, 31 s after a worker was killed"
    assert [line for line in page if "try again in the" in line] == [
        f"- {kill}. The generator was late by 850 ms at most.",
        "- 3 told to try again in the 10 s from second 5 of memory watched. The generator was late by 0 ms at most.",
    ]


@pytest.mark.parametrize(
    ("paces", "count", "sheds"),
    [
        ([70.0, 70.0], 44, True),  # a machine as fast as always
        ([40.0, 40.0], 44, None),  # a slower one: the load was more of what it could do
        ([40.0, 70.0], 44, True),
        ([40.0, 40.0], 45, True),  # one more than the chunks that are told
        ([], 0, False),
    ],
)
def test_requests_told_to_try_again_count_where_the_machine_was_as_fast_as_usual(
    paces: list[float], count: int, sheds: bool | None
) -> None:
    found = sound()
    found.paces = [70.0, 72.0, 68.0, 71.0, 69.0, *paces]
    assert found.usual_pace == pytest.approx(70, abs=1.5)
    found.rejected = [Rejected("memory watched", 5.0, 22, None, pace=pace) for pace in paces]
    found.mixed = result(answered=480, refused=20, rejected=count)
    assert found.sheds is sheds
    (verdict,) = [verdict for verdict in verdicts(found, queue=100) if "told to try again" in verdict.words]
    assert verdict.holds is (None if sheds is None else not sheds)
    assert ("The machine did 40 images/s in process meanwhile, and usually 69." in verdict.words) is (sheds is None)


def test_the_machines_pace_is_told_with_the_load_and_with_what_was_told_to_try_again() -> None:
    found = sound()
    found.paces = [70.0, 40.0, 71.0]
    found.rejected = [Rejected("memory watched", 5.0, 3, None, pace=40.0)]
    page = section(found, verdicts(found, queue=100), Serving((Execution("openvino"),)))
    (line,) = [line for line in page if "try again in the" in line]
    assert line.endswith("late by 0 ms at most. Right after it the machine did 40 images/s in process.")
    (line,) = [line for line in page if line.startswith("This machine did")]
    assert line.startswith("This machine did 70 images/s in process")
    assert "This is the median of 3 looks, from 40 to 71." in line


def test_a_campaign_takes_the_minutes_it_is_given() -> None:
    times = course(30)
    assert times.capacity_s * 2 + times.faults_s + times.steady_s + 3 * times.overload_s == pytest.approx(1800)
    assert times.steady_s > 600


@pytest.mark.slow
def test_a_campaign_against_a_real_server_compares_every_answer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(soak_phases, "_ROUNDS", 2)  # each is warmed up for a second
    artifact = artifacts.onnx(tmp_path / "artifact")
    way = serving_of(artifact, load_card(artifact))
    predictor = opened(artifact, way)
    photos, mixed = workloads(predictor, way, None)
    assert not photos.confusable()
    assert {known.status for item in mixed.items for known in item.known} >= {200, 400, 415}
    scratch = tmp_path / "scratch"
    scratch.mkdir(mode=0o700)
    said: list[str] = []
    with serving("own", {"soaked": pack(artifact, way, scratch, "soaked")}, scratch, 64) as live:
        machine = partial(pace, predictor, [photos.items[0].body])
        phases = Phases("own", live, photos, mixed, scratch=scratch, pace=machine, say=said.append)
        found = phases.run(Course(0.6, 2.5, 2.0, 0.3, 100, rest_s=0.0, afterwards_s=0.3))
    assert found.mixed is not None
    assert found.mixed.bad == 0, found.mixed.faults
    assert found.mixed.counts["refused"] > 0
    assert found.bad_client_faults == []
    assert found.bad_clients["slow body", "as known"] > 0
    # 503 tells anybody to try again where the machine is busier than it was when the load was chosen.
    failed = [client for client in found.bad_clients if client[1].startswith("status 5") and client[1] != "status 503"]
    assert failed == []
    assert {kind for kind, _ in found.bad_clients} >= {"half-closed", "no HTTP", "gone before the answer"}
    assert all(over.bad == 0 for over in found.overload.values())
    assert found.afterwards is not None
    assert found.afterwards.good > 0
    page = "\n".join(section(found, verdicts(found, 64), way))
    assert "pass: 0 wrong or swapped answers" in page
    assert found.capacity > 0
    assert min(found.paces) > 0
