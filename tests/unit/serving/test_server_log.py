"""What a person reads when a server fails: our own sentence first, else the first traceback of the
first rank; nothing private.
"""

from pathlib import Path

import pytest

from workbench.experiment.profile_sections import ROOT
from workbench.serving import faults, server_log
from workbench.serving.faults import Cause

TWO_RANKS = """[2026-01-01 00:00:00 TP1] Load weight begin.
[2026-01-01 00:00:01 TP1] Scheduler hit an exception: Traceback (most recent call last):
  File "a.py", line 1, in run
    boom()
ValueError: the first to fail

[2026-01-01 00:00:02 TP0] Scheduler hit an exception: Traceback (most recent call last):
  File "b.py", line 2, in run
    hear()
RuntimeError: connection closed by peer
"""


def write(tmp_path, text) -> Path:
    (tmp_path / "log").write_text(text)
    return tmp_path / "log"


def first(log: Path) -> str:
    return faults.first(log).text


def test_the_first_traceback_of_the_first_rank(tmp_path):
    said = first(write(tmp_path, TWO_RANKS))
    assert (
        said.startswith("TP1: ")
        and said.endswith("ValueError: the first to fail")
        and "connection closed" not in said
    )


def test_a_harmless_traceback_of_a_helper_thread_is_passed_over(tmp_path):
    harmless = (
        "Exception in thread Thread-1:\nTraceback (most recent call last):\n  File"
        ' "c.py"\nConnectionError: not open yet\n'
    )
    assert first(write(tmp_path, harmless + TWO_RANKS)).endswith("ValueError: the first to fail")
    assert first(write(tmp_path, harmless)).endswith("ConnectionError: not open yet")


def test_a_failure_that_sglang_passes_over_is_none_of_the_servers(tmp_path):
    chained = (
        "\nDuring handling of the above exception, another exception occurred:\n\nTraceback (most"
        ' recent call last):\n  File "d.py"\nE: again\n'
    )
    passed = (
        "[2026-01-01 00:00:00] post-warmup freeze_gc failed\nTraceback (most recent call last):\n "
        ' File "c.py"\nE: refused\n' + chained
    )
    assert faults.first(write(tmp_path, passed)) is None
    assert first(
        write(tmp_path, passed + 'Traceback (most recent call last):\n  File "e.py"\nF: real\n')
    ).endswith("F: real")
    assert first(write(tmp_path, passed + TWO_RANKS)).endswith("ValueError: the first to fail")


def test_our_own_sentence_comes_before_any_traceback(tmp_path):
    assert (
        first(write(tmp_path, TWO_RANKS + "draft-tp: own-3 does not divide\n"))
        == "own-3 does not divide"
    )


def test_a_refusal_inside_a_rank_is_its_sentence(tmp_path):
    text = TWO_RANKS.replace(
        "ValueError: the first to fail", "workbench.engine.hooks.Refused: the pool has 1 heads"
    )
    assert first(write(tmp_path, text)) == "TP1: the pool has 1 heads"


def test_a_quiet_or_missing_log(tmp_path):
    assert faults.first(write(tmp_path, "all is well\n")) is None
    assert faults.first(tmp_path / "none") is None and server_log.tail(tmp_path / "none") == ()


def test_the_tail_hides_folders_and_secrets(tmp_path):
    line = f"{Path.home()}/models api_key='abcdef123456' HF_TOKEN=hf_abcdefghij"
    assert server_log.tail(write(tmp_path, f"x\n{line}\n"), 1) == (
        "~/models api_key=<hidden> HF_TOKEN=<hidden>",
    )


@pytest.mark.parametrize(
    ("ended_by", "cause", "ranks"),
    [
        ("RanksDisagreed: ranks [1, 3] drafted another tree than rank 0: run", "DISAGREED", (1, 3)),
        ("torch.OutOfMemoryError: CUDA out of memory. Tried to allocate", "OUT_OF_MEMORY", ()),
        ("ValueError: the first to fail", "OTHER", ()),
    ],
)
def test_the_cause_is_decided_where_the_log_is_read(tmp_path, ended_by, cause, ranks):
    text = TWO_RANKS.replace("ValueError: the first to fail", ended_by)
    fault = faults.first(write(tmp_path, text))
    assert (fault.cause, fault.ranks) == (Cause[cause], ranks) and fault.sentence.endswith(ended_by)


def test_the_words_of_a_disagreement_are_those_of_the_engine():
    source = (ROOT / "workbench/engine/agreement.py").read_text()
    assert 'f"ranks {different} drafted another tree than rank 0' in source
