"""A machine's measured inputs: interpolation, SGLang's choice of communicator, names, saving, and
one real measurement on the CPU.
"""

import ast
import importlib.util
import json
import math
import os
import platform
import sys
from pathlib import Path

import fake_gpus
import pytest
from tiny_models import profile as tiny_profile
from tiny_models import write_pair

from workbench.engine.cpu import shared
from workbench.engine.orders import SHARED_MEMORY
from workbench.experiment.errors import BadInput, WorkbenchError
from workbench.predict import machine as machines
from workbench.predict import measure_machine
from workbench.predict.machine import (
    Latency,
    Machine,
    latencies,
    load,
    name_of,
    rates,
    save,
    unmeasured,
)
from workbench.predict.measure_machine import measure, saved_or_measured


def machine(**changes) -> Machine:
    found = (
        Latency("all_reduce", "nccl", 2, False, ((1024, 20e-6), (1048576, 60e-6))),
        Latency("all_reduce", "nccl", 2, True, ((1024, 10e-6), (1048576, 50e-6))),
        Latency("all_reduce", "custom", 2, True, ((1024, 5e-6), (65536, 8e-6))),
        Latency("all_gather", "nccl", 2, False, ((1024, 15e-6),)),
    )
    return Machine(
        **{
            "name": "two",
            "engine": "cuda",
            "ranks": 2,
            "copy_bytes_per_s": 4e12,
            "thin_bytes_per_s": 4e12,
            "matrix_ops_per_s": 7e14,
            "launch_s": 3e-6,
            "graph_launch_s": 1.5e-6,
            "graph_replay_s": 8e-6,
            "latencies": found,
            **changes,
        }
    )


@pytest.fixture()
def profile(tmp_path):
    write_pair(tmp_path)
    return tiny_profile(tmp_path)


def test_latency_is_linear_between_sizes_and_never_below_the_smallest():
    two = Latency("all_reduce", "nccl", 2, False, ((1000, 10e-6), (3000, 30e-6)))
    assert [two.at(size) for size in (1, 1000, 2000, 3000, 5000)] == pytest.approx(
        [10e-6, 10e-6, 20e-6, 30e-6, 50e-6]
    )
    falling = Latency(
        "all_reduce", "nccl", 2, False, ((1000, 30e-6), (3000, 10e-6))
    )  # noise must not make large messages free
    assert falling.at(1e9) == pytest.approx(10e-6)
    assert Latency("all_reduce", "nccl", 2, False, ((1000, 7e-6),)).at(9999) == pytest.approx(7e-6)


def test_sglangs_choice_of_communicator():
    m = machine()
    assert m.collective_s("all_reduce", 1024, 2, graph=True) == pytest.approx(
        5e-6
    )  # custom where it takes the size
    assert m.collective_s("all_reduce", 1024, 2, graph=True, custom=False) == pytest.approx(
        10e-6
    )  # --disable-custom-all-reduce
    assert m.collective_s("all_reduce", 1048576, 2, graph=True) == pytest.approx(
        50e-6
    )  # too large for custom
    assert m.collective_s("all_reduce", 1024, 2) == pytest.approx(20e-6)
    assert m.collective_s("all_gather", 1024, 2, graph=True) == pytest.approx(
        15e-6
    )  # measured without a graph only
    assert m.collective_s("broadcast", 8, 1) == 0.0


def test_what_was_not_measured_is_refused():
    with pytest.raises(BadInput, match="there is no broadcast in groups of 2"):
        machine().collective_s("broadcast", 8, 2)
    with pytest.raises(BadInput, match="groups of 4"):
        machine().collective_s("all_reduce", 8, 4)
    with pytest.raises(BadInput, match=r"no kernel launch \(out of memory\)"):
        machine(launch_s=None, unknown={"launch_s": "out of memory"}).known("launch_s")


def test_a_failed_custom_all_reduce_is_unknown_and_an_unused_one_is_nccls():
    def with_custom(**how) -> Machine:
        others = tuple(t for t in machine().latencies if t.backend != "custom")
        return machine(latencies=(*others, Latency("all_reduce", "custom", 2, True, (), **how)))

    failed = with_custom(why="RuntimeError: nvcc not found (rank 1)")
    with pytest.raises(
        BadInput, match="no all_reduce, 2 ranks, custom, in a graph .RuntimeError: nvcc not found"
    ):
        failed.collective_s("all_reduce", 1024, 2, graph=True)
    assert failed.collective_s("all_reduce", 1024, 2, graph=True, custom=False) == pytest.approx(
        10e-6
    )
    unused = with_custom(why="P2P test failed", unused=True)
    assert unused.collective_s("all_reduce", 1024, 2, graph=True) == pytest.approx(10e-6)
    assert unmeasured(failed) == {
        "all_reduce, 2 ranks, custom, in a graph": "unknown: RuntimeError: nvcc not found (rank 1)"
    }
    assert unmeasured(unused) == {
        "all_reduce, 2 ranks, custom, in a graph": "not used by SGLang here: P2P test failed"
    }
    assert latencies(unused)["1 KiB (us)"].tolist()[-1] == "not used" and math.isnan(
        latencies(failed)["1 KiB (us)"].tolist()[-1]
    )


def test_a_machine_is_saved_by_its_name_and_read_back(tmp_path):
    assert load("two", tmp_path) is None
    assert save(machine(), tmp_path).name == "two.json"
    assert load("two", tmp_path) == machine()


@pytest.mark.parametrize(
    "text",
    [
        "{",
        '{"name": "two"}',
        json.dumps(machine().to_json() | {"extra": 1}),
        json.dumps(machine().to_json() | {"launch_s": "fast"}),
    ],
)
def test_a_damaged_file_is_named(tmp_path, text):
    (tmp_path / "two.json").write_text(text)
    with pytest.raises(BadInput, match="^machine: "):
        load("two", tmp_path)


def test_names_tell_apart_what_changes_latencies(profile, monkeypatch):
    for key in [
        key for key in os.environ if key.startswith(("NCCL_", "TORCH_SYMM_MEM_", "SGLANG_"))
    ]:
        monkeypatch.delenv(key)
    cores = len(os.sched_getaffinity(0))
    assert name_of(profile) == f"2-ranks-cpu-{cores}-cores-{platform.machine()}"
    gpu = profile.model_copy(update={"engine": "cuda"})
    fake_gpus.install(monkeypatch, ["a", "b", "c", "d"])
    assert name_of(gpu) == "2-ranks-nvidia-h200"
    hostpath = gpu.model_copy(
        update={
            "server": gpu.server.model_copy(
                update={"environment": {"NCCL_P2P_DISABLE": "1", "OTHER": "x"}}
            )
        }
    )
    assert name_of(hostpath) == "2-ranks-nvidia-h200-nccl_p2p_disable=1"
    monkeypatch.setenv("TORCH_SYMM_MEM_DISABLE_MULTICAST", "1")
    monkeypatch.setenv("NCCL_DEBUG", "INFO")
    without = gpu.model_copy(
        update={
            "server": gpu.server.model_copy(update={"flags": {"disable-custom-all-reduce": True}})
        }
    )
    assert (
        name_of(without)
        == "2-ranks-nvidia-h200-torch_symm_mem_disable_multicast=1-no-custom-all-reduce"
    )


def test_gpus_that_are_not_here_are_not_measured(profile, monkeypatch):
    fake_gpus.install(monkeypatch, ["GPU-a"])
    with pytest.raises(BadInput, match="tp: is 2, but 1 GPU is visible"):
        name_of(profile.model_copy(update={"engine": "cuda"}))


@pytest.mark.parametrize(
    ("environment", "backend"),
    [({}, "shared" if shared.usable({}) else "gloo"), ({SHARED_MEMORY: "off"}, "gloo")],
)
def test_the_cpu_is_measured_by_real_processes_and_used_again(
    environment, backend, profile, tmp_path, monkeypatch
):
    profile = profile.model_copy(
        update={"server": profile.server.model_copy(update={"environment": environment})}
    )
    found = saved_or_measured(profile, tmp_path / "machines")
    assert (found.engine, found.ranks, found.name) == ("cpu", 2, name_of(profile))
    assert (
        1e7 < found.copy_bytes_per_s < 1e12
        and 1e7 < found.matrix_ops_per_s < 1e13
        and 0 < found.launch_s < 1e-2
    )
    assert {(t.kind, t.backend, t.ranks, t.graph) for t in found.latencies} == {
        (kind, backend, 2, False) for kind in ("all_reduce", "all_gather", "broadcast")
    }
    assert all(0 < seconds < 1 for t in found.latencies for _, seconds in t.points)
    assert (
        found.graph_launch_s is None
        and found.thin_bytes_per_s > 1e6
        and found.unknown == {}
        and found.seconds > 0
    )

    def again(*_, **__):
        raise AssertionError("measured twice")

    monkeypatch.setattr(measure_machine, "measure", again)
    assert saved_or_measured(profile, tmp_path / "machines") == found


def test_a_measurement_that_fails_says_why():
    with pytest.raises(WorkbenchError, match="could not be measured: "):
        measure("cuda", 1, name="nothing here", environment={"CUDA_VISIBLE_DEVICES": ""})
    with pytest.raises(WorkbenchError, match="could not be measured: it took more than 0.2 s"):
        measure("cpu", 1, name="in no time", deadline_s=0.2)


def test_one_input_that_fails_costs_none_of_the_others(tmp_path, monkeypatch):
    """An error is that input's own; a rank that dies leaves what was measured before it."""
    script = tmp_path / "faulty.py"
    script.write_text("""
import os
import torch
from workbench.engine import bench_clock, collective_bench, machine_bench as measure

measure.CPU = bench_clock.Sizes(1 << 20, (4, 64), 64, torch.float32, (1024, 4096), 2, 1)

def gather(self, output, x):
    raise RuntimeError("no such transport\\nand more")

collective_bench.Gloo.all_gather_into_tensor = gather
collective_bench.Gloo.broadcast = lambda self, x, src=0: os._exit(3)
if __name__ == "__main__":
    measure.main()
""")
    monkeypatch.setattr(measure_machine, "PROGRAM", (sys.executable, str(script)))
    found = measure(
        "cpu",
        2,
        name="faulty",
        environment={"PYTHONPATH": str(machines.ROOT), SHARED_MEMORY: "off"},
    )
    by_kind = {t.kind: t for t in found.latencies}
    assert (
        len(by_kind["all_reduce"].points) == 2
        and by_kind["all_reduce"].why == ""
        and found.copy_bytes_per_s > 0
        and found.unknown == {}
    )
    assert (
        by_kind["all_gather"].points == ()
        and by_kind["all_gather"].why == "RuntimeError: no such transport (rank 0)"
    )
    assert by_kind["broadcast"].points == () and by_kind["broadcast"].why.startswith(
        "not reached: "
    )
    assert found.collective_s("all_reduce", 1024, 2) > 0
    with pytest.raises(BadInput, match="no such transport"):
        found.collective_s("all_gather", 1024, 2)


def test_what_is_measured_on_gpus_is_called_as_sglang_has_it():
    """The calls of engine/machine_bench.py to SGLang's communicators, held against the installed
    source: no GPU is needed to see them change.
    """
    source = (
        Path(importlib.util.find_spec("sglang").origin).parent
        / "srt"
        / "distributed"
        / "parallel_state.py"
    )
    functions = {
        node.name: [a.arg for a in node.args.args]
        for node in ast.walk(ast.parse(source.read_text()))
        if isinstance(node, ast.FunctionDef)
    }
    made = functions["init_model_parallel_group"]
    assert made[:3] == ["group_ranks", "local_rank", "backend"] and {
        "use_custom_allreduce",
        "group_name",
    } <= set(made)
    assert functions["all_gather_into_tensor"] == ["self", "output", "input"] and functions[
        "broadcast"
    ] == ["self", "input_", "src"]
    assert (
        functions["all_reduce"] == ["self", "input_"] and functions["graph_capture"][-1] == "stream"
    )
    begun = functions["init_distributed_environment"]
    assert begun[:5] == ["world_size", "rank", "distributed_init_method", "local_rank", "backend"]
    # What the custom all-reduce asks of the world, and how it is asked whether it takes a message.
    communicators = source.parent / "device_communicators"
    assert (
        "get_world_group().local_rank" in (communicators / "custom_all_reduce_utils.py").read_text()
    )
    for version in ("custom_all_reduce.py", "custom_all_reduce_v2.py"):
        assert (
            "def should_custom_ar(self, inp: torch.Tensor)" in (communicators / version).read_text()
        )


def test_the_tables_have_units():
    rows = rates(machine(graph_replay_s=None, unknown={"launch_s": "no"}, launch_s=None)).set_index(
        "input"
    )
    assert rows.loc["copy", "value"] == pytest.approx(4000) and rows.loc["copy", "unit"] == "GB/s"
    assert math.isnan(rows.loc["kernel launch", "value"]) and "graph replay" not in rows.index
    by_size = latencies(machine())
    assert by_size.columns.tolist() == [
        "collective",
        "ranks",
        "back end",
        "in a graph",
        "1 KiB (us)",
        "64 KiB (us)",
        "1 MiB (us)",
    ]
    assert by_size.iloc[2].tolist() == [
        "all-reduce",
        2,
        "custom",
        "yes",
        pytest.approx(5),
        pytest.approx(8),
        "left to NCCL",
    ]
