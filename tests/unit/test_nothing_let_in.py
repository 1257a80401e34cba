"""Nobody is let in and no secret is let out: where servers listen, what a profile may hold, and
what is written down of an environment.
"""

from __future__ import annotations

import json

import pytest

from workbench.experiment import profile
from workbench.experiment.arms import Arm
from workbench.predict import server_flags
from workbench.run import provenance
from workbench.serving import launch_command, server, server_log

SECRET = "hf_abcdefghijklmnop"


def with_server(**fields) -> profile.Profile:
    tiny = profile.load("cpu-tiny")
    return tiny.model_copy(update={"server": tiny.server.model_copy(update=fields)})


def launched(chosen: profile.Profile) -> launch_command.Launch:
    return launch_command.plan(chosen, Arm.parse("none"), port=4242, server="x")


def option(launch: launch_command.Launch, name: str) -> str | None:
    words = launch.command
    return words[words.index(f"--{name}") + 1] if f"--{name}" in words else None


def test_a_server_listens_on_this_machine_alone_unless_the_profile_says_otherwise():
    launch = launched(profile.load("cpu-tiny"))
    assert (option(launch, "host"), launch.url) == ("127.0.0.1", "http://127.0.0.1:4242")
    for host, url in {
        "0.0.0.0": "http://127.0.0.1:4242",
        "10.0.0.5": "http://10.0.0.5:4242",
        "::1": "http://[::1]:4242",
    }.items():
        launch = launched(with_server(flags={"host": host}))
        assert (option(launch, "host"), launch.url) == (host, url)
    assert [
        c.status
        for c in server_flags.check(with_server(flags={"host": "0.0.0.0"}))
        if c.name == "server.flags.host"
    ] == ["warned"]


def test_code_of_a_model_folder_is_not_run_unless_the_profile_says_so():
    assert "--trust-remote-code" not in launched(profile.load("cpu-tiny")).command
    assert "--trust-remote-code" in launched(with_server(trust_remote_code=True)).command


@pytest.mark.parametrize(
    "fields",
    [
        {"flags": {"api-key": SECRET}},
        {"flags": {"admin_api_key": SECRET}},
        {"environment": {"HF_TOKEN": SECRET}},
        {"environment": {"AWS_SECRET_ACCESS_KEY": SECRET}},
    ],
)
def test_a_profile_holds_no_secret(fields):
    refused = [c for c in server_flags.check(with_server(**fields)) if c.status == "refused"]
    assert len(refused) == 1 and SECRET not in f"{refused[0].detail} {refused[0].mend}"


@pytest.mark.parametrize(
    "name",
    ["TOKENIZERS_PARALLELISM", "SGLANG_SIMULATE_ACC_LEN", "MAX_TOTAL_TOKENS", "NCCL_P2P_DISABLE"],
)
def test_a_harmless_name_is_no_secret(name):
    assert not server_log.is_secret(name)


def test_nothing_of_the_environment_is_written_down_but_what_the_collectives_hang_on(monkeypatch):
    for name in ("HF_TOKEN", "WANDB_API_KEY", "DATABASE_URL"):
        monkeypatch.setenv(name, SECRET)
    monkeypatch.setenv("NCCL_P2P_DISABLE", "1")
    facts = provenance.collect(
        profile.load("cpu-tiny"),
        ["workbench", "replay", "cpu-tiny", "-p", f"environment={{HF_TOKEN: {SECRET}}}"],
    )
    assert SECRET not in json.dumps(facts) and facts["nccl"] == {"NCCL_P2P_DISABLE": "1"}
    described = server.describe(launched(with_server(environment={"HF_TOKEN": SECRET})))
    assert (
        SECRET not in str(described) and described["environment"]["HF_TOKEN"] == server_log.HIDDEN
    )
