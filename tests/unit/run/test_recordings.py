"""Recordings: each says again what was recorded, holds nothing of the machine and starts no server;
what cannot be kept is refused.
"""

import json
import re
from collections import Counter
from pathlib import Path

import pytest
from simulated_runs import profile as sound_profile

from tests.simulated import PROVENANCE, records
from workbench import cli, publish
from workbench.answers import collectives, experiments, probe, wiring
from workbench.experiment import communication, plans, profile, runlog
from workbench.experiment.errors import BadInput, WorkbenchError
from workbench.experiment.runlog import Block, RunLog
from workbench.judge.stopping import STOPPED
from workbench.judge.verdict_file import VerdictFile
from workbench.predict import preflight
from workbench.replay import NOTEBOOKS, missing
from workbench.report import chart_parts
from workbench.run import lab, provenance, recording
from workbench.serving import gpus, server, server_log

read = VerdictFile.read
MACHINE = re.compile(r"(?<![\w.])[~/](root|home|tmp|usr|data|mnt|work|opt|var|\.cache|\.pyenv)/")


@pytest.fixture(autouse=True)
def nothing_is_measured(monkeypatch):
    def started(*_, **__):
        raise AssertionError("a server was started, or the machine was looked at")

    for module, function in (
        (server, "serve"),
        (preflight, "check"),
        (probe, "installed"),
        (provenance, "collect"),
        (gpus, "facts"),
    ):
        monkeypatch.setattr(module, function, started)


# Whose charts are drawn, one of each engine and kind of pair. The others' are made of their own
# figures too, and only their drawing, which is Vega's and takes half of the time, is left out.
DRAWN = ("cpu-tiny", "h200-x2-full-head", "h200-x2-kimi-mini")


@pytest.mark.parametrize("name", recording.names())
def test_every_recording_gives_its_verdict_again(name, tmp_path, monkeypatch):
    if name not in DRAWN:
        monkeypatch.setattr(chart_parts, "_drawn", lambda spec: "<svg></svg>")
    run = lab.open_lab(f"recorded:{name}", tmp_path / "run")
    before = (run.folder / "runs.jsonl").read_bytes()
    for notebook in NOTEBOOKS:
        if notebook.measures in run.provenance["blocks"]:
            experiments.measure(run, notebook.measures)
    assert (
        probe.answer(probe.searched(run))
        and isinstance(run.preflight(), list)
        and wiring.check(run).sentence
    )
    judged = publish.publish(run)
    assert list(recording.differences(recording.stored_verdict(name), judged)) == []
    assert judged.source == "recorded" and (run.folder / "runs.jsonl").read_bytes() == before
    report = (run.folder / "report.html").read_text()
    assert (
        provenance.sentence(run.provenance) in report
        and f"workbench replay recorded:{name}" in report
    )
    assert ("CPU engine" in report) == (run.profile.engine == "cpu")


@pytest.mark.parametrize("name", recording.names())
def test_every_recording_is_small_and_public(name):
    files = [path for path in (recording.FOLDER / name).rglob("*") if path.is_file()]
    assert {path.name for path in files} >= {*recording.PARTS, "verdict.json"} and any(
        path.suffix == ".log" for path in files
    )
    assert sum(path.stat().st_size for path in files) <= recording.LIMIT
    for path in files:
        assert not MACHINE.search(path.read_text()), path


# --- recording a run
# ----------------------------------------------------------------------


@pytest.fixture
def run(tmp_path, monkeypatch):
    """A finished run whose models lay outside the repository, on another machine."""
    monkeypatch.setattr(recording, "FOLDER", tmp_path / "recordings")
    folder = tmp_path / "run"
    (folder / "logs").mkdir(parents=True)
    pair = {"target": "/data/models/big", "draft": "/data/models/big-draft"}
    sound = sound_profile().model_dump(mode="json")
    setting = profile.Profile(
        **sound
        | {
            "pair": pair,
            "workload": sound["workload"] | {"prompts": "fixtures/tiny/heldout.json"},
        }
    )
    (folder / "profile.json").write_text(setting.model_dump_json())
    facts = PROVENANCE | {
        "hashes": {"prompts": provenance.digest(Path(setting.workload.prompts))},
        "command": f"workbench replay {folder}/x.yaml",
    }
    (folder / "provenance.json").write_text(json.dumps(facts))
    (folder / "logs" / "000-none.log").write_text(
        "\x1b[1mserver_args={'model_path': '/data/models/big'}\x1b[0m\nINFO:     127.0.0.1:42294 -"
        ' "POST /generate HTTP/1.1" 200 OK\n[2026-01-01 00:00:00 TP0] Decode batch, #running-req:'
        ' 1\n  File "/venv/lib/python3.11/site-packages/sglang/srt/x.py", line 3\n[2026-01-01'
        " 00:00:00] wrote /scratch/a/b.json, hf_token='abcdefgh'\n"
    )
    with RunLog(folder / "runs.jsonl") as log:
        for line in numbered(records()):
            if isinstance(line, runlog.Start):
                line = line.model_copy(
                    update={"command": ("python", "--model-path", "/data/models/big")}
                )
            log.append(line)
    return folder


def keep(run, name="kept"):
    found = lab.reopen(run)
    return recording.record(found.folder, found.profile, found.prompts, name)


def test_a_recording_holds_what_was_measured_and_nothing_of_the_machine(run):
    made = keep(run)
    told, lines = (
        "".join(path.read_text() for path in made.rglob("*.*") if path.is_file()),
        runlog.read(made / "runs.jsonl"),
    )
    assert [b.requests for b in lines if isinstance(b, Block)] == [
        b.requests for b in records() if isinstance(b, Block)
    ]
    assert (
        "/data/" not in told
        and "/scratch" not in told
        and str(run) not in told
        and "abcdefgh" not in told
        and "\x1b" not in told
    )
    assert (made / "logs" / "000-none.log").read_text().splitlines() == [
        "server_args={'model_path': '.../big'}",
        '  File "sglang/srt/x.py", line 3',
        "[2026-01-01 00:00:00] wrote .../b.json, hf_token=<hidden>",
    ]
    assert json.loads((made / "profile.json").read_text())["pair"]["target"] == ".../big"
    assert json.loads((made / "verdict.json").read_text())["source"] == "recorded"


def test_it_replays_where_neither_pair_nor_prompts_exist(run, tmp_path, capsys):
    keep(run)
    found = lab.open_lab("recorded:kept", tmp_path / "again")
    assert (
        found.recording == "kept"
        and not found.profile.pair.target.exists()
        and len(found.prompts) == 240
    )
    found.measure(plans.draft_tp(found.profile, len(found.prompts)))
    judged = publish.publish(found)
    assert list(recording.differences(recording.stored_verdict("kept"), judged)) == []
    # What no notebook answered at the time is not made up now.
    assert wiring.check(found).sentence == "Not checked when this was recorded."
    assert (
        probe.answer(probe.searched(found)) == "Not answered when this was recorded."
        and probe.table(None).empty
        and found.preflight() == []
    )
    assert found.record_finding("draft_tp", "new", 3) == 3 and found.finding("new", int) is None
    assert collectives.facts(found) == communication.Facts("cpu", 2)
    # Opened again, as each notebook does, and by its folder.
    assert (
        lab.open_lab(found.folder / "profile.json", found.folder).recording
        == lab.reopen(found.folder).recording
        == "kept"
    )
    assert (
        cli.main(["report", str(found.folder)]) in (0, 3)
        and json.loads((found.folder / "verdict.json").read_text())["source"] == "recorded"
    )


def test_an_absent_block_is_an_error_in_words(run, tmp_path):
    made = keep(run)
    lines = (made / "runs.jsonl").read_bytes().splitlines(keepends=True)
    (made / "runs.jsonl").write_bytes(b"".join(lines[:-4]))
    found = lab.open_lab("recorded:kept", tmp_path / "again")
    with pytest.raises(
        WorkbenchError,
        match=(
            r"recorded:kept holds 15 blocks of baseline where 18 were recorded, and nothing is"
            r" measured"
        ),
    ):
        found.measure(plans.baseline(found.profile, len(found.prompts)))
    assert (
        list(recording.differences(recording.stored_verdict("kept"), publish.publish(found))) != []
    )


def test_what_a_recording_never_measured_is_an_error_in_words(run, tmp_path):
    whole = (run / "runs.jsonl").read_bytes().splitlines(keepends=True)
    (run / "runs.jsonl").write_bytes(b"".join(line for line in whole if b'"baseline"' not in line))
    keep(run)
    found = lab.open_lab("recorded:kept", tmp_path / "again")
    with pytest.raises(
        WorkbenchError, match="holds no blocks of baseline, and nothing is measured"
    ):
        found.measure(plans.baseline(found.profile, len(found.prompts)))


def test_a_run_that_was_stopped_says_what_it_lacks(run):
    """Blocks of its plan, and the negative control; a run that came to its end lacks nothing."""
    setting = profile.Profile.model_validate_json((run / "profile.json").read_text())
    setting = setting.model_copy(
        update={
            "plan": setting.plan.model_copy(
                update={"arms": ("none", "shared", "own-1"), "negative_control": True}
            )
        }
    )
    (run / "profile.json").write_text(setting.model_dump_json())
    kept, found = (run / "runs.jsonl").read_bytes(), lab.reopen(run)
    lines = [line for line in runlog.read(run / "runs.jsonl") if not isinstance(line, Block)]
    tasks = plans.numbered(plans.draft_tp(found.profile, len(found.prompts)))
    pattern = next(r for r in runlog.read(run / "runs.jsonl") if isinstance(r, Block))
    blocks = [
        pattern.model_copy(
            update={"experiment": "draft_tp", "block": number, "arm": task.planned.arm}
        )
        for number, task in tasks
    ]
    (run / "runs.jsonl").write_text(
        "".join(line.model_dump_json() + "\n" for line in (*lines, *blocks[:-3]))
    )
    lost = dict(Counter(block.arm for block in blocks[-3:]))
    lacking = missing(found)
    assert (
        lacking
        == {
            "draft_tp": lost,
            "negative control": {"own-1+agreement=check": 1, "own-1+agreement=off": 1},
        }
        and sum(lost.values()) == 3
    )
    said = provenance.sentence({"missing": lacking})
    assert (
        all(f"draft_tp: {count} of {arm}" in said for arm, count in lost.items())
        and "stopped before its end" in said
    )
    (run / "runs.jsonl").write_text(
        "".join(line.model_dump_json() + "\n" for line in (*lines, *blocks))
    )
    assert missing(found).keys() == {"negative control"} and "stopped" not in provenance.sentence(
        {}
    )
    (run / "runs.jsonl").write_bytes(kept)
    made = recording.record(run, found.profile, found.prompts, "kept", lacking)
    assert json.loads((made / "provenance.json").read_text())["missing"] == lacking


def numbered(lines):
    """The simulated records with their blocks numbered as a run numbers them: from 0 in each
    experiment.
    """
    seen = Counter()
    for line in lines:
        yield (
            line.model_copy(update={"block": seen[line.experiment]})
            if isinstance(line, Block)
            else line
        )
        seen[line.experiment] += isinstance(line, Block)


def drop(run, kind: bytes) -> None:
    lines = (run / "runs.jsonl").read_bytes().splitlines(keepends=True)
    (run / "runs.jsonl").write_bytes(b"".join(line for line in lines if kind not in line))


def change(run, **facts) -> None:
    kept = json.loads((run / "provenance.json").read_text())
    (run / "prompts.json").write_text("[]")
    (run / "provenance.json").write_text(json.dumps(kept | facts))


@pytest.mark.parametrize(
    ("fault", "words"),
    [
        (lambda run: drop(run, b'"kind":"block"'), "no measured block"),
        (lambda run: drop(run, b'"block":3,'), "not complete"),
        (lambda run: change(run, recording="other"), "itself a replay of recorded:other"),
        (
            lambda run: change(run, hashes={"prompts": "0"}),
            "not what it was when the run was measured",
        ),
    ],
)
def test_a_run_that_cannot_be_kept_is_refused(fault, words, run):
    fault(run)
    with pytest.raises(BadInput, match=words):
        keep(run)
    assert recording.names() == []


def test_a_name_that_is_taken_or_none_and_a_run_too_large_are_refused(run, monkeypatch):
    with pytest.raises(BadInput, match="no name of a recording"):
        keep(run, "../x")
    monkeypatch.setattr(recording, "LIMIT", 1000)
    with pytest.raises(BadInput, match=r"takes 0\.\d MB, more than 0.001 MB"):
        keep(run)
    assert list(recording.FOLDER.iterdir()) == []
    monkeypatch.setattr(recording, "LIMIT", 5_000_000)
    keep(run)
    with pytest.raises(BadInput, match="is there already"):
        keep(run)


def test_the_command_line(run, tmp_path, capsys):
    def refused(*arguments: str) -> str:
        assert cli.main(list(arguments)) == 2
        return capsys.readouterr().err

    assert "no recording 'kept'; use one of none yet" in refused(
        "replay", "recorded:kept", "--out", str(tmp_path / "out")
    )
    keep(run)
    assert "changes a setting that was recorded" in refused(
        "replay", "recorded:kept", "-p", "pairs=3", "--out", str(tmp_path / "out")
    )
    assert "recorded:kept" in refused("replay", "recorded:kep", "--out", str(tmp_path / "out"))
    assert "holds another run" in refused("replay", "recorded:kept", "--out", str(run), "--resume")
    assert "is a recording, which is only replayed" in refused("check", "recorded:kept")
    assert "holds no run" in refused("record", str(tmp_path / "nowhere"), "new")
    assert not (tmp_path / "out").exists()


def test_figures_are_compared_and_words_are_not():
    stored = read({"sentence": "a", "arms": {"x": {"cycle_ms": 2.0, "accept_rate": None}}})
    near = {"cycle_ms": 2.0 + 1e-9, "accept_rate": None, "tokens_per_s": 1.0}
    later = read({"sentence": "b", "arms": {"x": near}, "profile": "new"})
    assert list(recording.differences(stored, later)) == []
    apart = read({"arms": {"x": {"cycle_ms": 2.1, "accept_rate": 0.0}}})
    assert len(list(recording.differences(stored, apart))) == 2
    assert sorted(
        recording.differences(
            read({"valid": True, "arms": {"x": {"blocks": 1}}}),
            read({"valid": False, "arms": {"x": {"blocks": 2}}}),
        )
    ) == ["arms.x.blocks is 2 where 1 was recorded", "valid is False where True was recorded"]


def test_paths_become_public():
    assert (
        server_log.without_paths(
            "at /srv/x/fixtures/tiny/target, tokens/s, http://127.0.0.1:1/a/b and ./a/b"
        )
        == "at ./fixtures/tiny/target, tokens/s, http://127.0.0.1:1/a/b and ./a/b"
    )
    assert (
        server_log.without_paths(
            "~/.cache/e/lib/python3.11/site-packages/a/b.py '/model/x' 3/4 a:/b/c"
        )
        == "a/b.py '.../x' 3/4 a:.../c"
    )


def test_a_log_is_cut_in_its_middle(tmp_path):
    (tmp_path / "a.log").write_text("".join(f"line {n}\n" for n in range(500)))
    told = server_log.trimmed(tmp_path / "a.log", 10, 5).splitlines()
    assert (
        len(told) == 16
        and told[9:11] == ["line 9", "[485 lines are left out here]"]
        and told[-1] == "line 499"
    )


def test_a_folder_laid_out_twice_is_left_alone(run, tmp_path):
    keep(run)
    recording.lay_out("kept", tmp_path / "again")
    (tmp_path / "again" / "report.html").write_text("x")
    recording.lay_out("kept", tmp_path / "again")
    assert (tmp_path / "again" / "report.html").read_text() == "x"


def test_a_run_that_stopped_early_has_gaps_and_can_be_kept(run):
    drop(run, b'"block":3,')
    with RunLog(run / "runs.jsonl") as log:
        for experiment in ("baseline", "draft_tp"):
            log.append(
                runlog.Finding(
                    experiment=experiment,
                    name=STOPPED,
                    time="t",
                    value={"why": "seconds", "blocks_left": 1},
                )
            )
    assert json.loads((keep(run) / "provenance.json").read_text())["blocks"].keys() == {
        "baseline",
        "draft_tp",
    }
