"""The command line: bad input is one sentence that names field and mend, exit 2, and nothing was
started.
"""

import os
import socket
import subprocess

import pytest
import yaml

from tests.simulated import records
from workbench import cli, commands
from workbench.answers import budget
from workbench.experiment import profile, profile_sections, runlog
from workbench.experiment.errors import BadInput
from workbench.predict import machine, measure_machine
from workbench.run import lab
from workbench.serving import server


@pytest.fixture(autouse=True)
def nothing_starts(monkeypatch):
    def started(*_, **__):
        raise AssertionError("a server was started")

    monkeypatch.setattr(server, "serve", started)


def profile_file(folder, **sections) -> str:
    data = yaml.safe_load((profile.PROFILES / "cpu-tiny.yaml").read_text())
    for name, value in sections.items():
        data[name] = {**data[name], **value} if isinstance(value, dict) else value
    path = folder / "mine.yaml"
    path.write_text(yaml.safe_dump(data))
    return str(path)


def refused(capsys, tmp_path, *arguments: str) -> str:
    status = cli.main(["replay", *arguments, "--out", str(tmp_path / "run")])
    said = capsys.readouterr().err.strip()
    assert status == 2 and said.startswith("workbench: ") and "\n" not in said
    assert not (tmp_path / "run" / "runs.jsonl").exists()
    return said


def test_an_unknown_profile(capsys, tmp_path):
    assert "cpu-tiny" in refused(capsys, tmp_path, "cpu-tinny")


def test_an_unknown_parameter(capsys, tmp_path):
    assert "'draf_tp' is unknown" in refused(capsys, tmp_path, "cpu-tiny", "-p", "draf_tp=1")


def test_a_parameter_that_is_no_pair(capsys, tmp_path):
    assert "no NAME=VALUE" in refused(capsys, tmp_path, "cpu-tiny", "-p", "pairs")


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ("pairs=many", "plan.pairs"),
        ("pairs=0", "plan.pairs"),
        ("arms=[none, owned]", "'owned' is unknown"),
        ("agreement=maybe", "speculation.agreement"),
        ("tp=3", "tp"),
        ("target=fixtures/nowhere", "pair.target"),
        ("steps=-1", "speculation.steps"),
        ("tp=4", "own-3"),
    ],
)
def test_a_value_that_does_not_fit(change, words, capsys, tmp_path):
    extra = ["-p", "arms=[none, shared, own-3]"] if words == "own-3" else []
    assert words in refused(capsys, tmp_path, "cpu-tiny", "-p", change, *extra)


def test_broken_yaml(capsys, tmp_path):
    (tmp_path / "broken.yaml").write_text("engine: cpu\npair: [unclosed\n")
    assert "not valid YAML in line" in refused(capsys, tmp_path, str(tmp_path / "broken.yaml"))


def test_a_field_that_no_profile_has(capsys, tmp_path):
    assert "no such field" in refused(capsys, tmp_path, profile_file(tmp_path, plan={"pears": 3}))


def test_a_port_in_use(capsys, tmp_path):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        assert str(port) in refused(
            capsys, tmp_path, profile_file(tmp_path, server={"flags": {"port": port}, "at_once": 1})
        )


def test_a_folder_that_holds_a_run(capsys, tmp_path):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "runs.jsonl").write_text("")
    assert cli.main(["replay", "cpu-tiny", "--out", str(tmp_path / "run")]) == 2
    assert "--resume" in capsys.readouterr().err


def test_an_unknown_notebook_to_skip(capsys, tmp_path):
    assert "09_none" in refused(capsys, tmp_path, "cpu-tiny", "--skip", "09_none")


def test_a_report_of_nothing(capsys, tmp_path):
    assert cli.main(["report", str(tmp_path)]) == 2
    assert "holds no run" in capsys.readouterr().err


def test_check_says_what_it_checked(capsys):
    assert cli.main(["check", "cpu-tiny"]) == 0
    said = capsys.readouterr().out
    assert "memory own-1" in said and "refused" not in said


def test_values_are_read_as_yaml():
    assert commands.changes(
        ["pairs=12", "arms=[none, own-1]", "restart=true", "resolution=0.02"]
    ) == {
        "pairs": 12,
        "arms": ["none", "own-1"],
        "restart": True,
        "resolution": 0.02,
    }
    with pytest.raises(BadInput):
        commands.changes(["arms=[none"])


def test_a_bare_name_stands_for_the_one_field_that_has_it():
    changed = profile.load("cpu-tiny", {"pairs": 9, "speculation.steps": 2, "draft_tokens": 3})
    assert (changed.plan.pairs, changed.speculation.steps, changed.speculation.draft_tokens) == (
        9,
        2,
        3,
    )


def test_a_profile_survives_being_written_down(tmp_path):
    kept = tmp_path / "profile.json"
    kept.write_text(profile.load("cpu-tiny").model_dump_json())
    assert profile.load(kept) == profile.load("cpu-tiny")
    assert str(profile_sections.ROOT) not in kept.read_text()


def test_the_machine_is_measured_as_the_profile_uses_it(monkeypatch, tmp_path):
    asked = []
    monkeypatch.setattr(
        measure_machine, "main", lambda chosen: asked.append((chosen.name, chosen.tp))
    )
    assert cli.main(["bench", "machine", "cpu-tiny", "-p", "tp=1"]) == 0 and asked == [
        ("cpu-tiny", 1)
    ]


def test_gpus_that_are_not_here_are_not_measured(capsys, monkeypatch):
    monkeypatch.setattr(machine.gpus, "ours", lambda profile: [])
    assert cli.main(["bench", "machine", "h200-x2"]) == 2
    assert (
        "tp: is 2, but no GPUs are visible; measure on the machine that serves the profile."
        in capsys.readouterr().err
    )


def test_blocks_measured_without_notebooks_have_their_machines_inputs(
    capsys, monkeypatch, tmp_path
):
    """As after 02_budget: the inputs are in the log before the first block."""
    inputs = machine.Machine(
        "this one",
        "cpu",
        2,
        thin_bytes_per_s=1e9,
        matrix_ops_per_s=1e10,
        launch_s=1e-6,
        latencies=tuple(
            machine.Latency(kind, "gloo", 2, False, ((1024, 1e-4),))
            for kind in ("all_reduce", "all_gather", "broadcast")
        ),
    )
    monkeypatch.setattr(measure_machine, "saved_or_measured", lambda chosen: inputs)
    monkeypatch.setattr(lab.Run, "measure", lambda self, tasks: tasks)
    assert (
        cli.main(["measure", "cpu-tiny", "--out", str(tmp_path / "run")]) == 3
    )  # nothing was compared
    found = [r for r in runlog.read(tmp_path / "run" / "runs.jsonl") if r.kind == "finding"]
    assert [r.name for r in found] == ["machine"] and machine.Machine.from_json(
        found[0].value
    ) == inputs


def test_blocks_that_are_stopped_say_so_in_the_log(monkeypatch, tmp_path):
    """As a stopped replay does: what is judged is judged as the part of a run."""

    def one_block_and_stopped(self, tasks):
        with runlog.RunLog(self.folder / "runs.jsonl") as log:
            log.append(next(r for r in records() if r.kind == "block"))
        raise KeyboardInterrupt

    monkeypatch.setattr(budget, "basis", lambda run: budget.Basis(why="not needed"))
    monkeypatch.setattr(lab.Run, "measure", one_block_and_stopped)
    assert cli.main(["measure", "cpu-tiny", "--out", str(tmp_path / "run")]) == 130
    block, stop = runlog.read(tmp_path / "run" / "runs.jsonl")
    assert (stop.kind, stop.what, stop.experiment, stop.arm) == (
        "failure",
        "stopped",
        block.experiment,
        block.arm,
    )


def test_outputs_that_cannot_be_written_are_refused_before_a_server_starts(capsys, tmp_path):
    """A read-only file system where one can be mounted, which stops root too; else a folder without
    the right to write.
    """
    folder = tmp_path / "outputs"
    folder.mkdir()
    mounted = (
        subprocess.run(
            ["mount", "-t", "tmpfs", "-o", "ro", "none", folder], capture_output=True
        ).returncode
        == 0
    )
    if not mounted:
        folder.chmod(0o555)
    try:
        said = refused(capsys, folder, "cpu-tiny")
    finally:
        if mounted:
            subprocess.run(["umount", folder], check=True)
        folder.chmod(0o755)
    assert "out: run cannot be written (" in said and "give a writable folder with --out" in said


@pytest.mark.parametrize("command", [("measure",), ("replay", "--resume")])
def test_a_damaged_log_is_named_by_its_line_and_left_as_it_is(command, capsys, tmp_path):
    kept = lab.open_lab("cpu-tiny", tmp_path).folder / "runs.jsonl"
    with runlog.RunLog(kept) as log:
        log.append(runlog.Finding(experiment="e", name="n", time="t", value=1))
    damaged = kept.read_bytes() + b"\x00garbage\n" + kept.read_bytes()
    kept.write_bytes(damaged)
    status = cli.main([command[0], "cpu-tiny", *command[1:], "--out", str(tmp_path)])
    said = capsys.readouterr().err.strip()
    assert (
        status == 1
        and said == "workbench: runs.jsonl: line 2 is damaged; restore the file or drop that line."
    )
    assert kept.read_bytes() == damaged


@pytest.mark.parametrize("number", cli.DISK)
def test_a_disk_that_refuses_anywhere_is_one_sentence(number, capsys, monkeypatch, tmp_path):
    def refuses(*_):
        raise OSError(number, os.strerror(number), str(tmp_path / "report.html"))

    monkeypatch.setattr(commands, "report", refuses)
    assert cli.main(["report", str(tmp_path)]) == 1
    said = capsys.readouterr().err.strip()
    assert (
        f"report.html cannot be written ({os.strerror(number)})" in said
        and "--resume goes on" in said
        and "\n" not in said
    )
