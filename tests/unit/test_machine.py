"""A machine's measured inputs: interpolation, SGLang's choice of communicator, names, saving, and one real measurement on the CPU."""
import ast
import importlib.util
import json
import os
from pathlib import Path

import pytest
from tiny_models import profile as tiny_profile
from tiny_models import write_pair

from workbench import machine as machines
from workbench.errors import BadInput, WorkbenchError
from workbench.machine import Latency, Machine, load, measure, name_of, of, save, table


def machine(**changes) -> Machine:
    latencies = (
        Latency("all_reduce", "nccl", 2, False, ((1024, 20e-6), (1048576, 60e-6))),
        Latency("all_reduce", "nccl", 2, True, ((1024, 10e-6), (1048576, 50e-6))),
        Latency("all_reduce", "custom", 2, True, ((1024, 5e-6), (65536, 8e-6))),
        Latency("all_gather", "nccl", 2, False, ((1024, 15e-6),)))
    return Machine(**{"name": "two", "engine": "cuda", "ranks": 2, "copy_bytes_per_s": 4e12, "matrix_ops_per_s": 7e14, "launch_s": 3e-6,
                      "graph_launch_s": 1.5e-6, "graph_replay_s": 8e-6, "latencies": latencies, **changes})


@pytest.fixture()
def profile(tmp_path):
    write_pair(tmp_path)
    return tiny_profile(tmp_path)


def test_latency_is_linear_between_sizes_and_never_below_the_smallest():
    two = Latency("all_reduce", "nccl", 2, False, ((1000, 10e-6), (3000, 30e-6)))
    assert [two.at(size) for size in (1, 1000, 2000, 3000, 5000)] == pytest.approx([10e-6, 10e-6, 20e-6, 30e-6, 50e-6])
    falling = Latency("all_reduce", "nccl", 2, False, ((1000, 30e-6), (3000, 10e-6)))       # noise must not make large messages free
    assert falling.at(1e9) == pytest.approx(10e-6)
    assert Latency("all_reduce", "nccl", 2, False, ((1000, 7e-6),)).at(9999) == pytest.approx(7e-6)


def test_sglangs_choice_of_communicator():
    m = machine()
    assert m.collective_s("all_reduce", 1024, 2, graph=True) == pytest.approx(5e-6)                     # custom where it takes the size
    assert m.collective_s("all_reduce", 1024, 2, graph=True, custom=False) == pytest.approx(10e-6)      # --disable-custom-all-reduce
    assert m.collective_s("all_reduce", 1048576, 2, graph=True) == pytest.approx(50e-6)                 # too large for custom
    assert m.collective_s("all_reduce", 1024, 2) == pytest.approx(20e-6)
    assert m.collective_s("all_gather", 1024, 2, graph=True) == pytest.approx(15e-6)                    # measured without a graph only
    assert m.collective_s("broadcast", 8, 1) == 0.0


def test_what_was_not_measured_is_refused():
    with pytest.raises(BadInput, match="no broadcast measured for groups of 2"):
        machine().collective_s("broadcast", 8, 2)
    with pytest.raises(BadInput, match="groups of 4"):
        machine().collective_s("all_reduce", 8, 4)


def test_a_machine_is_saved_by_its_name_and_read_back(tmp_path):
    assert load("two", tmp_path) is None
    assert save(machine(), tmp_path).name == "two.json"
    assert load("two", tmp_path) == machine()


@pytest.mark.parametrize("text", ["{", '{"name": "two"}', json.dumps(machine().to_json() | {"extra": 1}),
                                  json.dumps(machine().to_json() | {"launch_s": "fast"})])
def test_a_damaged_file_is_named(tmp_path, text):
    (tmp_path / "two.json").write_text(text)
    with pytest.raises(BadInput, match="^machine: "):
        load("two", tmp_path)


def test_names_tell_apart_what_changes_latencies(profile, monkeypatch):
    cores = len(os.sched_getaffinity(0))
    assert name_of(profile) == f"2-ranks-cpu-{cores}-cores"
    gpu = profile.model_copy(update={"engine": "cuda"})
    monkeypatch.setattr(machines, "_gpus", lambda visible: ["NVIDIA H200"] * 4)
    assert name_of(gpu) == "2-ranks-nvidia-h200"
    hostpath = gpu.model_copy(update={"server": gpu.server.model_copy(update={"environment": {"NCCL_P2P_DISABLE": "1", "OTHER": "x"}})})
    assert name_of(hostpath) == "2-ranks-nvidia-h200-nccl_p2p_disable=1"


def test_gpus_that_are_not_here_are_not_measured(profile, monkeypatch):
    monkeypatch.setattr(machines, "_gpus", lambda visible: ["NVIDIA H200"])
    with pytest.raises(BadInput, match="tp: is 2, but 1 GPU is visible"):
        name_of(profile.model_copy(update={"engine": "cuda"}))


def test_the_cpu_is_measured_by_real_processes_and_used_again(profile, tmp_path, monkeypatch):
    found = of(profile, tmp_path / "machines")
    assert (found.engine, found.ranks, found.name) == ("cpu", 2, name_of(profile))
    assert 1e7 < found.copy_bytes_per_s < 1e12 and 1e7 < found.matrix_ops_per_s < 1e13 and 0 < found.launch_s < 1e-2
    assert {(t.kind, t.backend, t.ranks, t.graph) for t in found.latencies} == {
        (kind, "gloo", 2, False) for kind in ("all_reduce", "all_gather", "broadcast")}
    assert all(0 < seconds < 1 for t in found.latencies for _, seconds in t.points)
    assert found.graph_launch_s is None and found.seconds > 0

    def again(*_, **__):
        raise AssertionError("measured twice")

    monkeypatch.setattr(machines, "measure", again)
    assert of(profile, tmp_path / "machines") == found


def test_a_measurement_that_fails_says_why():
    with pytest.raises(WorkbenchError, match="could not be measured"):
        measure("cuda", 1, name="nothing here", environment={"CUDA_VISIBLE_DEVICES": ""})


def test_what_is_measured_on_gpus_is_called_as_sglang_has_it():
    """The calls of engine/measure.py to SGLang's communicators, held against the installed source: no GPU is needed to see them change."""
    source = Path(importlib.util.find_spec("sglang").origin).parent / "srt" / "distributed" / "parallel_state.py"
    functions = {node.name: [a.arg for a in node.args.args] for node in ast.walk(ast.parse(source.read_text()))
                 if isinstance(node, ast.FunctionDef)}
    made = functions["init_model_parallel_group"]
    assert made[:3] == ["group_ranks", "local_rank", "backend"] and {"use_custom_allreduce", "group_name"} <= set(made)
    assert functions["all_gather_into_tensor"] == ["self", "output", "input"] and functions["broadcast"] == ["self", "input_", "src"]
    assert functions["all_reduce"] == ["self", "input_"] and functions["graph_capture"][-1] == "stream"
    assert "should_custom_ar" in source.read_text()


def test_the_table_has_units():
    rows = table(machine()).set_index("input")
    assert rows.loc["copy", "value"] == pytest.approx(4000) and rows.loc["copy", "unit"] == "GB/s"
    assert rows.loc["all_reduce of 1024 bytes, 2 ranks, custom, in a graph", "value"] == pytest.approx(5)
    assert "graph replay" not in table(machine(graph_replay_s=None)).input.tolist()
