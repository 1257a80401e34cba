"""Named settings of the communication layer: what they are made of, where they can be tried, and
whether they are active.
"""

import re

import fake_gpus
import pytest
from simulated_runs import profile

from workbench.answers import collectives
from workbench.experiment import communication
from workbench.experiment.arms import Arm
from workbench.experiment.communication import SETTINGS, Facts
from workbench.experiment.errors import BadInput
from workbench.predict import preflight, server_flags
from workbench.run.lab import Run
from workbench.serving import attestation, gpus, launch_command

H200 = Facts("cuda", 2, (9, 0), nvlink=True, p2p=True, environment={"NCCL_NVLS_ENABLE": "0"})
RTX6000 = Facts("cuda", 8, (12, 0), nvlink=False, p2p=True)


@pytest.mark.parametrize("name", SETTINGS)
def test_a_setting_says_what_it_does_and_changes_something(name):
    setting = SETTINGS[name]
    assert re.fullmatch(r"[a-z0-9-]+", name) and name == setting.name and len(setting.about) > 20
    assert setting.environment or setting.flags
    assert setting.flags.keys() <= (
        server_flags.known() or setting.flags.keys()
    )  # every flag is one of the installed SGLang


def test_names_are_part_of_an_arms_and_unknown_ones_are_refused():
    assert (
        Arm.parse("shared+comm=nccl-ring").comm == "nccl-ring"
        and Arm.parse("none+comm=gloo-lo").name == "none+comm=gloo-lo"
    )
    with pytest.raises(BadInput, match="unknown setting 'comm=ring'"):
        Arm.parse("shared+comm=ring")


def test_what_a_machine_cannot_do_is_skipped_with_the_reason():
    tried, skipped = communication.choose(H200)
    assert (
        "nccl-ring" in tried
        and "custom-v1" in tried
        and not any(name.startswith("gloo") for name in (*tried, *skipped))
    )
    assert (
        skipped["nccl-nvls"] == "NCCL_NVLS_ENABLE=0 turns it off on this machine"
    )  # SGLang's flag would overwrite the variable
    assert (
        skipped["pcie-ipc"] == "the GPUs are linked by NVLink"
        and "4, 8 ranks" in skipped["mscclpp"]
    )
    tried, skipped = communication.choose(RTX6000)
    assert (
        {"pcie-ipc", "nccl-p2p-sys"} <= set(tried)
        and "without NVLink" in skipped["custom-v1"]
        and "12.0" in skipped["torch-symm-mem"]
    )


def test_what_is_not_known_is_tried():
    assert {"custom-v1", "pcie-ipc"} <= set(communication.choose(Facts("cuda", 8))[0])


def test_the_cpu_engine_has_gloo():
    assert communication.choose(Facts("cpu", 2, interfaces=("lo", "eth0"))) == (
        ("gloo-plain", "gloo-lo", "gloo-lo-x2"),
        {},
    )
    assert communication.choose(Facts("cpu", 2))[1]["gloo-lo"] == "there is no network interface lo"
    assert (
        communication.choose(Facts("cpu", 1, interfaces=("lo",)))[1]["gloo-lo"]
        == "one rank talks to nobody"
    )
    assert communication.choose(Facts("cpu", 2, interfaces=("lo",)), ("nccl-ring",))[1] == {
        "nccl-ring": "it is for the cuda engine"
    }


def test_a_server_gets_the_settings_variables_and_flags_over_the_profiles():
    chosen = profile("cuda", server={"environment": {"NCCL_ALGO": "tree", "OTHER": "1"}})
    launch = launch_command.plan(chosen, Arm.parse("shared+comm=nccl-ring"), port=1, server="s")
    assert (
        launch.environment["NCCL_ALGO"] == "allreduce:ring" and launch.environment["OTHER"] == "1"
    )
    assert "--disable-custom-all-reduce" in launch.command
    assert (
        "--disable-custom-all-reduce"
        not in launch_command.plan(chosen, Arm.parse("shared"), port=1, server="s").command
    )


def test_arms_of_two_settings_are_not_held_by_one_server():
    with pytest.raises(BadInput, match="one setting of the communication layer"):
        launch_command.plan(
            profile(), [Arm.parse("shared"), Arm.parse("shared+comm=gloo-lo")], port=1, server="s"
        )


def test_a_setting_that_is_inactive_on_is_a_fault():
    def said(**communication):
        return [
            {
                "rank": 0,
                "communication": {
                    "environment": {"SGLANG_ENABLE_PCIE_IPC_ALLREDUCE": "1"},
                    "pcie_ipc": True,
                },
            },
            {"rank": 1, "communication": communication},
        ]

    wanted = {"environment": {"SGLANG_ENABLE_PCIE_IPC_ALLREDUCE": "1"}, "pcie_ipc": True}
    assert attestation.communication_faults("pcie-ipc", said(**wanted)) == []
    # SGLang logs that a communicator cannot be set up, and goes on by NCCL.
    assert attestation.communication_faults("pcie-ipc", said(**{**wanted, "pcie_ipc": False})) == [
        "rank 1 runs without the pcie_ipc communicator under pcie-ipc"
    ]
    assert (
        "rank 1 runs with SGLANG_ENABLE_PCIE_IPC_ALLREDUCE=None"
        in attestation.communication_faults("pcie-ipc", said(pcie_ipc=True))[0]
    )
    assert (
        attestation.communication_faults("nccl-ring", [{"rank": 0}])[0]
        == "rank 0 runs with NCCL_ALGO=None where nccl-ring needs allreduce:ring"
    )
    assert attestation.communication_faults(None, said()) == []
    # Memory that the ranks share would go past Gloo.
    off = {"environment": {"DRAFT_TP_SHARED_MEMORY": "off"}, "shared_memory": False}
    assert attestation.communication_faults("gloo-plain", [{"rank": 0, "communication": off}]) == []
    assert attestation.communication_faults(
        "gloo-plain", [{"rank": 0, "communication": off | {"shared_memory": True}}]
    ) == ["rank 0 runs with the shared_memory communicator under gloo-plain"]


def test_preflight_refuses_a_setting_of_another_machine():
    found = [
        c
        for c in preflight.check(profile(), [Arm.parse("shared+comm=nccl-ring")])
        if c.status == "refused" and "comm" in c.name
    ]
    assert [(c.name, c.detail) for c in found] == [
        ("arms +comm=nccl-ring", "cannot be tried here: it is for the cuda engine")
    ]


def test_links_are_those_that_the_driver_says(monkeypatch):
    fake_gpus.install(monkeypatch, ["GPU-a", "GPU-b"])
    assert (
        gpus.linked(gpus.visible(None), "NVLINK") is True
        and gpus.linked(gpus.visible("0"), "NVLINK") is None
    )
    fake_gpus.install(monkeypatch, ["GPU-a", "GPU-b"], linked=False)
    assert gpus.linked(gpus.visible(None), "NVLINK") is False
    fake_gpus.install(monkeypatch, [])
    assert gpus.linked((), "NVLINK") is None


def test_the_facts_of_gpus_are_of_those_that_the_ranks_take(monkeypatch):
    fake_gpus.install(monkeypatch, ["GPU-a", "GPU-b", "GPU-c"], capability=(12, 0), linked=False)
    found = gpus.facts(
        profile("cuda", server={"environment": {"CUDA_VISIBLE_DEVICES": "GPU-c,GPU-a"}})
    )
    assert (found.capability, found.nvlink, found.p2p) == ((12, 0), False, False)


def test_the_facts_of_a_run_are_those_of_the_machine_it_was_measured_on(tmp_path, monkeypatch):
    run = Run(profile(), tmp_path)
    monkeypatch.setattr(
        gpus,
        "facts",
        lambda _: Facts(
            "cuda", 2, (9, 0), True, None, ("lo",), {"NCCL_NVLS_ENABLE": "0", "HOME": "/x"}
        ),
    )
    first = collectives.facts(run)
    assert first == Facts(
        "cuda", 2, (9, 0), True, None, ("lo",), {"NCCL_NVLS_ENABLE": "0"}
    ) and "HOME" not in str(run.records)
    monkeypatch.setattr(gpus, "facts", lambda _: Facts("cpu", 8))
    assert collectives.facts(run) == first
