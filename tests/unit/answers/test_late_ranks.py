"""A wait in a collective is charged to the rank that was late and to what kept it, and traces of
some ranks alone decide nothing.
"""

from __future__ import annotations

import json

import numpy as np
import pytest
from test_cycle import lab, log
from test_torch_trace import ATTENTION, GEMM, NCCL, Writer

from workbench.answers import late_ranks, profiled_cycles
from workbench.answers.torch_trace import read
from workbench.answers.trace_parts import decompose, sentence
from workbench.judge.verdict_file import VerdictFile

CYCLES, COLLECTIVE = 10, 50.0


def ranks(
    *before: list[tuple[str, float]], hidden: bool = False, cycles: int = CYCLES, first: bool = True
) -> list[Writer]:
    """One writer a rank: in each cycle a first kernel of 100 us, then what is said of the rank
    ("gap": the launch comes so much later; "device gap": it came in time, or a kernel's name, with
    its microseconds), then one collective which all of them end together.

    hidden: a kernel on another stream covers the collective.
    first: a collective in front of all cycles, from which what a rank does is seen.
    """
    found, clock = [Writer() for _ in before], 1000.0
    for trace in found if first else ():
        trace.kernel(NCCL, 980, 1000, trace.launch(970))
    for _ in range(cycles):
        arrived = [clock + 100 + sum(us for _, us in work) for work in before]
        ended = max(arrived) + COLLECTIVE
        for trace, work, at in zip(found, before, arrived):
            trace.kernel(GEMM, clock, clock + 100, trace.launch(clock - 20))
            now, late = clock + 100, None
            for what, us in work:
                if what == "gap":
                    late = now + us - 3
                elif what != "device gap":
                    trace.kernel(what, now, now + us, trace.launch(late or clock - 15))
                    late = None
                now += us
            last = late or clock - 10
            trace.kernel(NCCL, at, ended, trace.launch(last))
            trace.span("step[VERIFY bs=1]", clock - 25, last + 10)
            if hidden:
                trace.kernel(GEMM, at, ended, trace.launch(clock - 9), stream=9)
        clock = ended
    return found


def parts(tmp_path, writers: list[Writer]):
    traces = [read(w.write(tmp_path / f"TP-{n}.json")) for n, w in enumerate(writers)]
    return decompose(traces[0], traces[1:])


def late(found) -> dict[str, float]:
    """Microseconds a cycle of all charges of verify."""
    return {name: 1e6 * s / CYCLES for name, s in found["verify"].late.items()}


def test_a_host_gap_of_another_rank_is_launching_and_not_nothing(tmp_path):
    """Rank 1's 1.5 ms gap, told as "support neither" before."""
    found = parts(tmp_path, ranks([], [("gap", 1500)]))
    assert late(found) == pytest.approx({"rank 1: host gap": 1500})
    said = sentence(found)
    assert "1.5 ms for rank 1's host gap" in said
    assert said.endswith("they support launching kernels and the host as the larger cost.")


def test_ones_own_gap_is_ones_own(tmp_path):
    found = parts(tmp_path, ranks([("gap", 1500)], []))
    assert late(found) == {} and found["verify"].host_gap == pytest.approx(CYCLES * 1.5e-3)
    assert "launching kernels and the host" in sentence(found)


@pytest.mark.parametrize(
    ("work", "cause"), [((GEMM, 900), "matrix"), ((ATTENTION, 900), "attention")]
)
def test_a_slower_kernel_of_another_rank_is_neither(work, cause, tmp_path):
    """A GPU that computes more slowly, as one whose clock is held down."""
    found = parts(tmp_path, ranks([(work[0], 100)], [work]))
    assert late(found) == pytest.approx({f"rank 1: {cause}": 800})
    assert "they support neither of the two" in sentence(found)


def test_of_three_ranks_the_last_is_charged(tmp_path):
    found = parts(tmp_path, ranks([], [("gap", 300)], [("gap", 900)]))
    assert late(found) == pytest.approx({"rank 2: host gap": 900})
    assert found["verify"].seconds["collective"] == pytest.approx(CYCLES * COLLECTIVE / 1e6)


def test_a_wait_has_as_many_reasons_as_it_has(tmp_path):
    """What both ranks do alike is no reason: 200 us of both ranks' kernels."""
    found = parts(tmp_path, ranks([(GEMM, 200)], [(GEMM, 300), ("gap", 400), (ATTENTION, 100)]))
    assert late(found) == pytest.approx(
        {"rank 1: matrix": 100, "rank 1: host gap": 400, "rank 1: attention": 100}
    )


def test_a_gap_that_was_launched_in_time_is_the_devices(tmp_path):
    found = parts(tmp_path, ranks([], [("device gap", 700)]))
    assert late(found) == pytest.approx({"rank 1: device gap": 700})


def test_ranks_that_take_turns_are_each_charged(tmp_path):
    one, other = ranks([], [("gap", 400)]), ranks([("gap", 600)], [])
    shift = max(e["ts"] + e.get("dur", 0) for e in one[0].events)
    for writer, more in zip(one, other):
        for event in more.events[1:]:
            event["ts"] += shift
            if "correlation" in event.get("args", {}):
                event["args"]["correlation"] += 10_000
        writer.events += more.events[1:]
    found = parts(tmp_path, one)["verify"]
    assert found.late["rank 1: host gap"] == pytest.approx(CYCLES * 400e-6, rel=0.01)
    assert found.host_gap >= CYCLES * 600e-6 * 0.99 and set(found.late) == {"rank 1: host gap"}


def test_clocks_of_ranks_need_not_agree(tmp_path):
    writers = ranks([], [("gap", 1500)])
    for event in writers[1].events:
        event["ts"] += 7e6
    assert late(parts(tmp_path, writers)) == pytest.approx({"rank 1: host gap": 1500})


def test_a_wait_that_computation_hides_is_not_charged(tmp_path):
    found = parts(tmp_path, ranks([], [("gap", 500)], hidden=True))
    assert found["verify"].seconds["wait"] == pytest.approx(0, abs=1e-9)
    assert sum(late(found).values()) == pytest.approx(0, abs=1e-6)


def test_charges_add_up_to_the_waits(tmp_path):
    found = parts(tmp_path, ranks([(GEMM, 70)], [("gap", 333), (GEMM, 12)]))
    assert sum(p.seconds["wait"] for p in found.values()) == pytest.approx(
        sum(sum(p.late.values()) for p in found.values())
    )


def test_a_wait_that_nobody_can_be_charged_with_does_not_decide(tmp_path):
    """The trace begins after what kept the late rank."""
    found = parts(tmp_path, ranks([], [("gap", 1500)], cycles=1, first=False))
    assert set(found["verify"].late) == {f"rank 1: {late_ranks.UNKNOWN}"}
    assert "is not known" in sentence(found) and "unknown" not in sentence(found)


def written(tmp_path, writers: dict[str, Writer], arm: str = "shared", **plan):
    run = lab(tmp_path, log(), **plan)
    folder = run.folder / "traces" / arm
    folder.mkdir(parents=True)
    for name, writer in writers.items():
        writer.write(folder / name)
    return run, profiled_cycles.decompositions(run)


def test_all_ranks_of_a_run_give_a_conclusion(tmp_path):
    one, other = ranks([], [("gap", 1500)])
    _, found = written(tmp_path, {"cycles-TP-0.trace.json": one, "cycles-TP-1.trace.json": other})
    assert "launching kernels and the host" in profiled_cycles.answer(found, VerdictFile())


FILES = {
    "rank 1 missing": (("cycles-TP-0.trace.json",), "the trace of rank 1 is missing"),
    "rank 0 missing": (("cycles-TP-1.trace.json",), "the trace of rank 0 is missing"),
    "rank 0 twice": (
        ("a-TP-0.trace.json", "b-TP-0.trace.json"),
        "the trace of rank 1 is missing",
    ),
    "one too many": (
        ("a-TP-0.trace.json", "a-TP-1.trace.json", "b-TP-1.trace.json"),
        "3 files for 2 ranks, rank 1 more than once",
    ),
    "no rank said": (("x.json", "y.json"), "the trace of rank 0 and 1 is missing"),
}


@pytest.mark.parametrize(("names", "why"), FILES.values(), ids=FILES)
def test_without_every_rank_there_is_no_conclusion(names, why, tmp_path):
    """With rank 1's file missing: "1.55 ms of collectives ... support communication" before."""
    writers = ranks([], [("gap", 1500)], [])
    run, found = written(tmp_path, dict(zip(names, writers)))
    said = profiled_cycles.answer(found, VerdictFile())
    assert why in said and "support" not in said
    assert profiled_cycles.table(found).empty and profiled_cycles.bars(found).empty
    assert found["shared"].parts["verify"].kernels  # the kernels of a rank are counted all the same
    assert profiled_cycles.decompositions(run) == found


def test_a_log_without_charges_is_read(tmp_path):
    one, other = ranks([], [("gap", 1500)])
    run, found = written(tmp_path, {"TP-0.json": one, "TP-1.json": other})
    path = run.folder / "runs.jsonl"
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    for part in lines[-1]["value"]["parts"].values():
        part.pop("late", None)
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    for file in (run.folder / "traces" / "shared").iterdir():
        file.unlink()
    again = lab(tmp_path / "again", [])
    (again.folder / "runs.jsonl").write_text(path.read_text())
    said = profiled_cycles.answer(profiled_cycles.decompositions(again), VerdictFile())
    assert "1.5 ms more are waits for another rank)" in said and "is not known" in said
    assert np.isfinite(found["shared"].parts["verify"].total)
