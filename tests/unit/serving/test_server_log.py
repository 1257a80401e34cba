"""What a person reads when a server fails: our own sentence first, else the first traceback of the
first rank; nothing private.
"""

from pathlib import Path

from workbench.serving import server_log

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


def test_the_first_traceback_of_the_first_rank(tmp_path):
    said = server_log.first_failure(write(tmp_path, TWO_RANKS))
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
    assert server_log.first_failure(write(tmp_path, harmless + TWO_RANKS)).endswith(
        "ValueError: the first to fail"
    )
    assert server_log.first_failure(write(tmp_path, harmless)).endswith(
        "ConnectionError: not open yet"
    )


def test_a_failure_that_sglang_passes_over_is_none_of_the_servers(tmp_path):
    chained = (
        "\nDuring handling of the above exception, another exception occurred:\n\nTraceback (most"
        ' recent call last):\n  File "d.py"\nE: again\n'
    )
    passed = (
        "[2026-01-01 00:00:00] post-warmup freeze_gc failed\nTraceback (most recent call last):\n "
        ' File "c.py"\nE: refused\n' + chained
    )
    assert server_log.first_failure(write(tmp_path, passed)) is None
    assert server_log.first_failure(
        write(tmp_path, passed + 'Traceback (most recent call last):\n  File "e.py"\nF: real\n')
    ).endswith("F: real")
    assert server_log.first_failure(write(tmp_path, passed + TWO_RANKS)).endswith(
        "ValueError: the first to fail"
    )


def test_our_own_sentence_comes_before_any_traceback(tmp_path):
    assert (
        server_log.first_failure(write(tmp_path, TWO_RANKS + "draft-tp: own-3 does not divide\n"))
        == "own-3 does not divide"
    )


def test_a_refusal_inside_a_rank_is_its_sentence(tmp_path):
    text = TWO_RANKS.replace(
        "ValueError: the first to fail", "workbench.engine.hooks.Refused: the pool has 1 heads"
    )
    assert server_log.first_failure(write(tmp_path, text)) == "TP1: the pool has 1 heads"


def test_a_quiet_or_missing_log(tmp_path):
    assert server_log.first_failure(write(tmp_path, "all is well\n")) is None
    assert (
        server_log.first_failure(tmp_path / "none") is None
        and server_log.tail(tmp_path / "none") == ()
    )


def test_the_tail_hides_folders_and_secrets(tmp_path):
    line = f"{Path.home()}/models api_key='abcdef123456' HF_TOKEN=hf_abcdefghij"
    assert server_log.tail(write(tmp_path, f"x\n{line}\n"), 1) == (
        "~/models api_key=<hidden> HF_TOKEN=<hidden>",
    )
