"""The run log: facts survive a crash, a torn line is dropped, damage before it is named."""

import resource

import pytest
from simulated_runs import FIXTURES

from workbench.experiment import runlog
from workbench.experiment.errors import WorkbenchError
from workbench.experiment.runlog import Finding, Request, RunLog


def fact(number: int) -> Finding:
    return Finding(experiment="e", name=f"n{number}", time="t", value=number)


def test_records_come_back_as_they_were_written(tmp_path):
    with RunLog(tmp_path / "new" / "runs.jsonl") as log:
        for number in range(3):
            log.append(fact(number))
    assert runlog.read(tmp_path / "new" / "runs.jsonl") == [fact(0), fact(1), fact(2)]


def test_a_finding_of_nothing_is_a_finding(tmp_path):
    nothing = fact(0).model_copy(update={"value": None})
    with RunLog(tmp_path / "runs.jsonl") as log:
        log.append(nothing)
    assert runlog.read(tmp_path / "runs.jsonl") == [nothing]


def test_a_torn_last_line_is_dropped_and_nothing_before_it(tmp_path):
    path = tmp_path / "runs.jsonl"
    with RunLog(path) as log:
        log.append(fact(0))
    with open(path, "a") as file:
        file.write('{"kind": "finding", "exper')
    assert runlog.read(path) == [fact(0)]
    with RunLog(path) as log:
        log.append(fact(1))
    assert runlog.read(path) == [fact(0), fact(1)]


@pytest.mark.parametrize("damage", ["garbage", "{}", '{"kind": "block"}', '{"kind": "unheard"}'])
def test_damage_inside_is_named_by_its_line(tmp_path, damage):
    path = tmp_path / "runs.jsonl"
    path.write_text(f"{fact(0).model_dump_json()}\n{damage}\n{fact(1).model_dump_json()}\n")
    with pytest.raises(WorkbenchError, match="line 2 is damaged"):
        runlog.read(path)


def test_a_folder_that_cannot_be_written_is_one_sentence(tmp_path):
    (tmp_path / "runs.jsonl").mkdir()
    with pytest.raises((WorkbenchError, IsADirectoryError)):
        with RunLog(tmp_path / "runs.jsonl"):
            pass


def test_a_full_disk_keeps_what_was_written(tmp_path, monkeypatch):
    path = tmp_path / "runs.jsonl"

    def full(_):
        raise OSError(28, "No space left on device")

    with RunLog(path) as log:
        log.append(fact(0))
        monkeypatch.setattr(runlog.os, "fsync", full)
        with pytest.raises(WorkbenchError, match="No space left on device"):
            log.append(fact(1))
    assert runlog.read(path)[0] == fact(0)


def test_a_disk_that_takes_half_a_line_leaves_no_torn_one_before_a_later_line(tmp_path):
    """The file system's own refusal, by a limit on the size of a file: the first write takes a part
    and says so, the second fails.
    """
    path, soft = tmp_path / "runs.jsonl", resource.getrlimit(resource.RLIMIT_FSIZE)
    with RunLog(path) as log:
        log.append(fact(0))
        size = path.stat().st_size
        resource.setrlimit(resource.RLIMIT_FSIZE, (size + 10, soft[1]))
        try:
            with pytest.raises(
                WorkbenchError, match="cannot be written .*: free space and use --resume"
            ):
                log.append(fact(1))
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, soft)
        assert path.stat().st_size == size
        log.append(fact(2))
    assert runlog.read(path) == [fact(0), fact(2)]


def test_garbage_after_the_last_line_is_dropped(tmp_path):
    path = tmp_path / "runs.jsonl"
    with RunLog(path) as log:
        log.append(fact(0))
    path.write_bytes(path.read_bytes() + b"\x00\xff\x00 no line")
    with RunLog(path) as log:
        log.append(fact(1))
    assert runlog.read(path) == [fact(0), fact(1)]


def test_what_is_unknown_stays_unknown():
    request = Request(prompt="p", prompt_tokens=1, completion_tokens=1, sent=0.0, end=1.0)
    assert (request.cached_tokens, request.verify_ct, request.histogram) == (None, None, None)


@pytest.mark.parametrize(
    ("experiment", "load"), [("steps_at_4", 4), ("steps", None), ("draft_tp", None)]
)
def test_the_load_of_an_older_log_is_that_of_its_experiments_name(experiment, load):
    made = runlog.read(FIXTURES / "sound.jsonl")
    content = next(r for r in made if r.kind == "block").model_dump(exclude={"load"})
    assert runlog.parse(content | {"experiment": experiment}).load == load
    assert runlog.parse(content | {"experiment": experiment, "load": 8}).load == 8
