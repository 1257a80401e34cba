"""Synthetic traces whose host gaps, collectives and computation are known, one a shape, and files
that are no trace of one rank.
"""

import gzip
import json
import tracemalloc

import pytest

from workbench.answers.torch_trace import BETWEEN, read
from workbench.answers.trace_parts import cycles, decompose, sentence, table
from workbench.experiment.errors import BadInput

NCCL, CUSTOM = (
    "ncclDevKernel_AllReduce_Sum_bf16_RING_LL(ncclDevComm*)",
    "void all_reduce_1shot_push_kernel<bf16, 2>",
)
GEMM, ATTENTION, NORM = (
    "nvjet_tst_64x8_64x16_4x1_v_bz_TNT",
    "_fwd_grouped_kernel_stage1",
    "fused_add_rmsnorm_kernel",
)
SPANS = {"draft": "draft", "verify": "step[VERIFY bs=1]", "draft_extend": "draft_extend"}


class Writer:
    """A trace in the making; times in microseconds."""

    def __init__(self):
        self.events, self.correlation = (
            [{"ph": "M", "name": "process_name", "pid": 1, "ts": 0.0, "args": {"name": "python"}}],
            0,
        )

    def span(self, name, begin, end, tid=1):
        self.events.append(
            {
                "ph": "X",
                "cat": "user_annotation",
                "name": name,
                "pid": 1,
                "tid": tid,
                "ts": begin,
                "dur": end - begin,
            }
        )

    def launch(self, begin, end=None, tid=1, name="cudaLaunchKernel"):
        self.correlation += 1
        self.events.append(
            {
                "ph": "X",
                "cat": "cuda_runtime",
                "name": name,
                "pid": 1,
                "tid": tid,
                "ts": begin,
                "dur": (begin + 2 if end is None else end) - begin,
                "args": {"correlation": self.correlation},
            }
        )
        return self.correlation

    def kernel(self, name, begin, end, correlation, stream=7, device=0, category="kernel"):
        self.events.append(
            {
                "ph": "X",
                "cat": category,
                "name": name,
                "pid": device,
                "tid": stream,
                "ts": begin,
                "dur": end - begin,
                "args": {"correlation": correlation, "stream": stream, "device": device},
            }
        )

    def write(self, path, packed=False):
        text = json.dumps(
            {"schemaVersion": 1, "traceEvents": self.events, "traceName": "simulated"}
        ).encode()
        path.write_bytes(gzip.compress(text) if packed else text)
        return path


def cycle_by_cycle(
    work: dict[str, list[tuple[str, float]]], count: int = 20, ahead: float = 5.0, host: float = 0.0
) -> Writer:
    """Cycles on one stream. work: {stage: [(kernel, duration)]}. host: the device waits so long
    before each kernel because its launch
    comes late.
    ahead: otherwise each launch returns so long before the device is free."""
    trace, clock, launched = Writer(), 1000.0, 0.0
    for _ in range(count):
        for stage, kernels in work.items():
            opened = None
            for name, duration in kernels:
                begin = clock + host
                launched = max(launched + 0.5, begin - 2 if host else clock - ahead - 2)
                opened = launched - 0.25 if opened is None else opened
                trace.kernel(name, begin, begin + duration, trace.launch(launched, launched + 0.2))
                clock = begin + duration
            trace.span(SPANS[stage], opened, launched + 0.25)
    return trace


def shares(parts) -> dict[str, float]:
    """Seconds by class and gap, over all stages."""
    found = {
        kind: sum(p.seconds[kind] for p in parts.values())
        for kind in ("collective", "wait", "matrix", "attention", "other")
    }
    return found | {
        "host": sum(p.host_gap for p in parts.values()),
        "device": sum(p.device_gap for p in parts.values()),
    }


COMPUTE = {
    "draft": [(GEMM, 100)],
    "verify": [(NORM, 10), (GEMM, 400), (ATTENTION, 60)],
    "draft_extend": [(GEMM, 30)],
}
COMMUNICATION = {
    "draft": [(GEMM, 20), (NCCL, 80), (NCCL, 40)],
    "verify": [(GEMM, 60), (CUSTOM, 50)],
    "draft_extend": [(GEMM, 10), (NCCL, 40)],
}


def test_a_known_compute_share(tmp_path):
    parts = decompose(read(cycle_by_cycle(COMPUTE).write(tmp_path / "compute.json")))
    found = shares(parts)
    assert found["matrix"] == pytest.approx(20 * 530e-6, rel=0.02) and found[
        "attention"
    ] == pytest.approx(20 * 60e-6, rel=0.02)
    assert (
        found["other"] == pytest.approx(20 * 10e-6, rel=0.02)
        and found["collective"] == found["host"] == 0
    )
    assert parts["verify"].seconds["attention"] == pytest.approx(20 * 60e-6)
    assert parts["draft"].seconds["matrix"] == pytest.approx(20 * 100e-6)
    assert "neither of the two" in sentence(parts)


def test_a_known_share_of_collectives(tmp_path):
    parts = decompose(
        read(cycle_by_cycle(COMMUNICATION).write(tmp_path / "t.json.gz", packed=True))
    )
    found = shares(parts)
    assert found["collective"] == pytest.approx(20 * 210e-6, rel=0.02) and found[
        "matrix"
    ] == pytest.approx(20 * 90e-6, rel=0.02)
    assert parts["draft"].seconds["collective"] == pytest.approx(20 * 120e-6, rel=0.02)
    assert "communication as the larger cost" in sentence(
        parts
    ) and "0.16 ms of them the draft's" in sentence(parts)


def test_a_known_host_gap(tmp_path):
    parts = decompose(read(cycle_by_cycle(COMMUNICATION, host=70).write(tmp_path / "host.json")))
    found = shares(parts)
    # 7 kernels a cycle, each 70 us late; the very first wait lies before the first kernel.
    assert found["host"] == pytest.approx((20 * 7 - 1) * 70e-6, rel=0.02) and found["device"] == 0
    assert found["collective"] == pytest.approx(20 * 210e-6, rel=0.02)
    assert parts["draft"].host_gap == pytest.approx(
        20 * 2 * 70e-6, rel=0.02
    )  # before its second and third kernel
    assert parts[BETWEEN].host_gap == pytest.approx((20 * 3 - 1) * 70e-6, rel=0.02)
    assert "launching kernels and the host as the larger cost" in sentence(parts)


def test_everything_adds_up_to_the_time_from_first_to_last_kernel(tmp_path):
    trace = read(cycle_by_cycle(COMMUNICATION, host=11).write(tmp_path / "t.json"))
    assert sum(p.total for p in decompose(trace).values()) == pytest.approx(
        (trace.end.max() - trace.begin.min()) / 1e6
    )


def test_communication_beside_computation_costs_nothing(tmp_path):
    trace = Writer()
    for cycle in range(10):
        begin = 1000.0 * cycle + 100
        trace.span("step[VERIFY bs=1]", begin - 20, begin - 10)
        trace.kernel(GEMM, begin, begin + 300, trace.launch(begin - 19))
        trace.kernel(
            NCCL, begin + 200, begin + 500, trace.launch(begin - 17), stream=9
        )  # 100 us hidden, 200 us not
        trace.kernel(
            GEMM, begin + 550, begin + 600, trace.launch(begin - 15)
        )  # 50 us later, though launched
    verify = decompose(read(trace.write(tmp_path / "overlap.json")))["verify"]
    assert verify.seconds["matrix"] == pytest.approx(10 * 350e-6) and verify.seconds[
        "collective"
    ] == pytest.approx(10 * 200e-6)
    assert verify.collectives_s == pytest.approx(10 * 300e-6)
    assert verify.device_gap == pytest.approx(10 * 50e-6) and verify.host_gap == pytest.approx(
        9 * 400e-6
    )


def test_gaps_inside_a_graph_are_not_the_hosts(tmp_path):
    trace = Writer()
    for cycle in range(10):
        begin = 1000.0 * cycle + 100
        trace.span("step[DECODE bs=1]", begin - 50, begin + 500)
        graph = trace.launch(
            begin - 40, begin + 400, name="cudaGraphLaunch"
        )  # returns while its kernels run
        for n in range(4):
            trace.kernel(GEMM, begin + 100 * n, begin + 100 * n + 90, graph)
    found = decompose(read(trace.write(tmp_path / "graph.json")))["decode"]
    assert found.device_gap == pytest.approx(10 * 3 * 10e-6) and found.host_gap == pytest.approx(
        9 * 610e-6
    )
    assert found.kernels == 40 and found.rounds == 10


def test_verify_is_what_lies_between_draft_and_draft_extend(tmp_path):
    trace = Writer()
    trace.span("step[EXTEND bs=1 toks=9]", 0, 10)
    trace.span("draft_extend", 20, 30)  # the draft's own prefill
    trace.span("draft", 100, 200)
    trace.span("step[DRAFT bs=1]", 110, 190)
    trace.span("step[VERIFY bs=1]", 220, 280)
    trace.span("draft_extend", 300, 400)
    trace.span("draft", 1000, 1010, tid=2)  # of another thread, which launches nothing
    for at in (5, 25, 150, 250, 290, 350, 450):  # 290: sampling, after the target's step
        trace.kernel(GEMM, at + 5000, at + 5001, trace.launch(at, at + 1))
    parts = decompose(read(trace.write(tmp_path / "t.json")))
    assert {name: p.kernels for name, p in parts.items() if p.kernels} == {
        "prefill": 1,
        "draft_prefill": 1,
        "draft": 1,
        "verify": 2,
        "draft_extend": 1,
        "outside": 1,
    }
    assert parts["draft_extend"].rounds == parts["verify"].rounds == 1


def test_waiting_for_a_late_rank_is_not_communication(tmp_path):
    early, late = Writer(), Writer()
    for cycle in range(10):
        begin = 1000.0 * cycle + 100
        for trace, arrives in ((early, begin), (late, begin + 300)):
            trace.span("step[VERIFY bs=1]", begin - 50, begin + 500)
            trace.kernel(NCCL, arrives, begin + 340, trace.launch(arrives - 40, arrives - 20))
    first, second = (read(t.write(tmp_path / f"{n}.json")) for n, t in enumerate((early, late)))
    alone, together = decompose(first)["verify"], decompose(first, [second])["verify"]
    assert alone.seconds["collective"] == pytest.approx(10 * 340e-6) and alone.seconds["wait"] == 0
    assert together.seconds["collective"] == pytest.approx(10 * 40e-6) and together.seconds[
        "wait"
    ] == pytest.approx(10 * 300e-6)
    assert together.total == pytest.approx(alone.total)
    assert decompose(second, [first])["verify"].seconds["wait"] == 0
    assert "waits for another rank" in sentence(decompose(first, [second]))


def test_ranks_of_different_runs_are_not_put_together(tmp_path):
    one = read(cycle_by_cycle(COMMUNICATION).write(tmp_path / "one.json"))
    other = read(cycle_by_cycle(COMMUNICATION, count=19).write(tmp_path / "other.json"))
    with pytest.raises(BadInput, match="other collectives"):
        decompose(one, [other])


@pytest.mark.parametrize(
    ("collective", "thread"), [("gloo:all_reduce", 5), ("shared:broadcast", 1)]
)
def test_operators_stand_for_kernels_on_a_cpu_trace(collective, thread, tmp_path):
    trace = Writer()
    for cycle in range(10):
        begin = 1000.0 * cycle
        trace.span("draft", begin, begin + 400)
        trace.span("step[VERIFY bs=1]", begin + 400, begin + 500)
        for name, opened, closed, tid in (
            ("aten::linear", 0, 100, 1),
            ("aten::addmm", 10, 90, 1),
            ("c10d::allreduce_", 150, 160, 1),
            ("aten::add", 420, 440, 1),
        ):
            trace.events.append(
                {
                    "ph": "X",
                    "cat": "cpu_op",
                    "name": name,
                    "pid": 1,
                    "tid": tid,
                    "ts": begin + opened,
                    "dur": closed - opened,
                }
            )
        trace.span(collective, begin + 160, begin + 300, tid=thread)
    draft = decompose(read(trace.write(tmp_path / "cpu.json")))["draft"]
    assert draft.seconds["matrix"] == pytest.approx(10 * 100e-6) and draft.seconds[
        "collective"
    ] == pytest.approx(10 * 150e-6)
    assert draft.host_gap == pytest.approx(10 * 50e-6) and draft.device_gap == 0


@pytest.mark.parametrize(
    "kind, name",
    [
        ("collective", "ncclDevKernel_AllGather_RING_LL(ncclDevKernelArgsStorage<4096ul>)"),
        ("collective", "ncclDevKernel_Broadcast_RING_LL"),
        ("collective", "void sglang::cross_device_reduce_1stage<__nv_bfloat16, 2>"),
        ("attention", "_fwd_kernel_stage2"),
        (
            "attention",
            "void cutlass::device_kernel<flash::enable_sm90_or_later<flash::FlashAttnFwdSm90>>",
        ),
        ("attention", "void flashinfer::BatchDecodeWithPagedKVCacheKernel<>"),
        ("attention", "void flash::flash_fwd_splitkv_kernel<>"),
        ("matrix", "void cublasLt::splitKreduce_kernel<32, 16, int>"),
        ("matrix", "sm90_xmma_gemm_bf16bf16_bf16f32"),
        ("matrix", "fused_moe_kernel"),
        ("other", "void at::native::reduce_kernel<512, 1, at::native::ReduceOp<float>>"),
        ("other", "act_and_mul_kernel"),
        ("other", "void flashinfer::norm::FusedAddRMSNormKernel<8u>"),
        ("other", "Memcpy DtoH (Device -> Pinned)"),
    ],
)
def test_kernels_are_told_by_their_names(tmp_path, kind, name):
    trace = Writer()
    trace.span("step[DECODE bs=1]", 0, 10)
    trace.kernel(
        name, 20, 25, trace.launch(1), category="gpu_memcpy" if "Memcpy" in name else "kernel"
    )
    assert decompose(read(trace.write(tmp_path / "t.json")))["decode"].seconds[
        kind
    ] == pytest.approx(5e-6)


def test_the_table_is_a_cycles(tmp_path):
    rows = table(
        decompose(read(cycle_by_cycle(COMMUNICATION, host=70).write(tmp_path / "t.json")))
    ).set_index("stage")
    assert (
        rows.loc["draft", "collective (ms/cycle)"] == pytest.approx(0.12)
        and rows.loc["draft", "kernels (per cycle)"] == 3
    )
    assert rows.loc["draft-extend", "matrix (ms/cycle)"] == pytest.approx(0.01)
    assert rows["total (ms/cycle)"].sum() == pytest.approx(0.3 + 0.07 * (7 - 1 / 20))


def test_an_instant_event_in_a_gap_leaves_the_gap_whole(tmp_path):
    trace = Writer()
    trace.span("step[VERIFY bs=1]", 0, 500)
    for begin, end in ((100, 200), (250, 250), (300, 400)):
        trace.kernel(GEMM, begin, end, trace.launch(10))
    verify = decompose(read(trace.write(tmp_path / "t.json")))["verify"]
    assert verify.device_gap == pytest.approx(100e-6) and verify.seconds["matrix"] == pytest.approx(
        200e-6
    )


def test_reading_takes_a_fraction_of_the_files_size(tmp_path):
    trace = cycle_by_cycle(COMMUNICATION, count=300)
    stacks = [
        {
            "ph": "X",
            "cat": "python_function",
            "name": "forward",
            "pid": 1,
            "tid": 1,
            "ts": float(n),
            "dur": 1.0,
            "args": {"stack": "x" * 4000},
        }
        for n in range(2500)
    ]
    trace.events[1:1] = stacks
    path = trace.write(tmp_path / "large.json")
    tracemalloc.start()
    read(path)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert path.stat().st_size > 10_000_000 and peak < path.stat().st_size / 10


@pytest.mark.parametrize("packed", [False, True])
def test_a_file_cut_off_is_said_to_be(tmp_path, packed):
    path = cycle_by_cycle(COMPUTE).write(tmp_path / "t.json", packed)
    path.write_bytes(path.read_bytes()[:-200])
    with pytest.raises(BadInput, match="damaged or cut off"):
        read(path)


@pytest.mark.parametrize(
    "content, problem",
    [
        (b"", "damaged"),
        (b"no trace", "damaged"),
        (b'{"other": 1}', "no kernel and no operator"),
        (b'{"traceEvents": []}', "no kernel and no operator"),
    ],
)
def test_what_is_no_trace_is_refused(tmp_path, content, problem):
    (tmp_path / "t.json").write_bytes(content)
    with pytest.raises(BadInput, match=problem):
        read(tmp_path / "t.json")


def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(BadInput, match="gone.json cannot be read"):
        read(tmp_path / "gone.json")


def test_traces_that_cannot_tell_stages_are_refused(tmp_path):
    merged, deaf = Writer(), Writer()
    for device in (0, 1):
        merged.kernel(GEMM, 10, 20, merged.launch(1), device=device)
    deaf.kernel(GEMM, 10, 20, 1)
    with pytest.raises(BadInput, match="kernels of 2 devices"):
        read(merged.write(tmp_path / "merged.json"))
    with pytest.raises(BadInput, match="who launched its kernels"):
        read(deaf.write(tmp_path / "deaf.json"))
    deaf.kernel(GEMM, 30, 40, deaf.launch(25))
    with pytest.raises(BadInput, match="no verify and no decode"):
        cycles(decompose(read(deaf.write(tmp_path / "idle.json"))))
