"""Tables: numbers checked by hand, unknown stays unknown, what does not count is not counted."""

import math

import pandas as pd
import pytest
from simulated_runs import FIXTURES, profile

from tests.simulated import PROFILE, PROVENANCE, VERDICT, block, failure, records, refused
from workbench.experiment import runlog
from workbench.experiment.runlog import Finding
from workbench.judge.verdict import judge
from workbench.judge.verdict_file import VerdictFile
from workbench.report import cells, log_tables, tables

read = VerdictFile.read
UNKNOWN_NUMBERS = [None, math.nan, math.inf]


def test_throughput_is_all_tokens_over_the_blocks_seconds():
    made = block(5, "shared", 1, 0).model_copy(update={"seconds": 4.0})
    row = log_tables.blocks([made]).iloc[0]
    assert (row["tokens"], row["throughput (tokens/s)"], row["pair"]) == (256, 64.0, 1)


@pytest.mark.parametrize(
    ("result", "differ", "said"),
    [
        ("identical", 0, "identical"),
        ("identical", 2, "2 of 24 differ, as often as chance allows"),
        ("differs", 6, "6 of 24 differ"),
    ],
)
def test_answers_that_differ_are_counted_whatever_they_are_put_down_to(result, differ, said):
    counts = [
        {
            "arm": "own-1",
            "result": result,
            "mismatched": differ,
            "compared": 24,
            "own_mismatched": 0,
            "own_compared": 24,
        }
    ]
    verdict = {
        "arms": {"own-1": {}, "shared": {}},
        "parity": {"own-1": result},
        "parity_counts": counts,
    }
    assert tables.arms(read(verdict), {})["output"].tolist() == [said, "not checked"]


def test_a_block_without_duration_has_unknown_throughput():
    assert (
        log_tables.blocks([block(1, "shared", 0, 0).model_copy(update={"seconds": 0.0})])[
            "throughput (tokens/s)"
        ]
        .isna()
        .all()
    )


@pytest.mark.parametrize("role", ["warmup", "parity"])
def test_only_measured_blocks_count(role):
    log = [block(1, "shared", 0, 0, role=role), block(2, "own-1", 0, 0)]
    assert log_tables.blocks(log)["arm"].tolist() == ["own-1"]


def test_what_is_not_known_to_be_an_arms_is_not_shown_as_its():
    blocks = log_tables.blocks(records(2))
    kept = tables.with_result(blocks, read(refused()))
    assert "own-1" in set(blocks["arm"]) and set(kept["arm"]) == {"none", "shared", "shared#2"}
    by_experiment = {
        "arms": {"shared": {"tokens_per_s": 1.0}},
        "experiments": {"draft_tp": {"shared": {"tokens_per_s": None}}},
    }
    assert set(
        tables.with_result(blocks, read(by_experiment)).query("arm == 'shared'")["experiment"]
    ) == {"baseline"}


def test_positions_are_those_of_the_verdict():
    more = VERDICT["arms"] | {"own-2": {"accept": {"positions": [{"value": 0.5}]}}}
    table = tables.accept_by_position(read(VERDICT | {"arms": more}))
    shared = table[table["arm"] == "shared"]
    assert shared["position"].tolist() == [1, 2, 3] and shared[
        "accepted (% of cycles)"
    ].tolist() == pytest.approx([86, 69, 46])
    assert shared["low"].tolist() == pytest.approx([83.8, 66.3, 43.1]) and shared[
        "high"
    ].tolist() == pytest.approx([88.2, 71.7, 48.9])
    assert (
        set(table["arm"]) == {"shared", "own-1", "own-2"}
        and table[["low", "high"]].iloc[-1].isna().all()
    )


def test_shares_of_positions_and_the_bonus_token_are_the_accept_length():
    judged = judge(profile(), runlog.read(FIXTURES / "sound.jsonl")).file
    table = tables.accept_by_position(judged)
    for arm in ("shared", "own-1"):
        drafts = table.loc[table["arm"] == arm, "accepted (% of cycles)"].sum() / 100
        assert 1 + drafts == pytest.approx(judged.arms[arm].accept_length)


def many_blocks(number):
    arms = ["shared", "own-1", "none"]
    return pd.DataFrame(
        [
            ("draft_tp", arms[n % 3], n % 5, n // 3, 100 + n % 7, 1.0 + n % 2, 1)
            for n in range(number)
        ],
        columns=["experiment", "arm", "start", "pair", "tokens", "time (s)", "blocks"],
    )


@pytest.mark.parametrize("number", [5_000, 5_001, 12_345])
def test_thinning_keeps_every_arms_tokens_and_seconds(number):
    full = many_blocks(number)
    thin = log_tables.thinned(full)
    assert len(thin) <= 5_000 and thin["blocks"].sum() == number
    groups = ["experiment", "arm", "start"]
    pd.testing.assert_frame_equal(
        thin.groupby(groups)[["tokens", "time (s)"]].sum(),
        full.groupby(groups)[["tokens", "time (s)"]].sum(),
    )
    if number > 5_000:
        assert (
            thin["throughput (tokens/s)"] - thin["tokens"] / thin["time (s)"]
        ).abs().max() < 1e-9


def test_thinning_merges_neighbours_only():
    full = many_blocks(12_000).assign(tokens=lambda table: 2.0 ** -(table["pair"] % 7))
    thin = log_tables.thinned(full.sample(frac=1, random_state=0), limit=4_500)
    size = int(thin["blocks"].max())
    one = full[(full["arm"] == "shared") & (full["start"] == 0)]["tokens"].tolist()
    in_order = [sum(one[n : n + size]) for n in range(0, len(one), size)]
    assert (
        size > 1
        and thin[(thin["arm"] == "shared") & (thin["start"] == 0)]["tokens"].tolist() == in_order
    )


def test_more_starts_than_rows_are_merged_across_starts_and_more_arms_are_refused():
    full = many_blocks(100).assign(start=range(100))
    assert len(log_tables.thinned(full, limit=20)) <= 20
    with pytest.raises(ValueError, match="too many arms"):
        log_tables.thinned(full.assign(arm=[f"arm {n}" for n in range(100)]), limit=20)


def test_arms_say_what_they_are_and_what_they_did():
    table = tables.arms(read(VERDICT), PROFILE).set_index("arm")
    assert table["draft TP (ranks)"].to_dict() == {"none": "–", "shared": 2, "own-1": 1}
    assert table.loc[
        "shared",
        ["drafting", "throughput (tokens/s)", "accept rate (%)", "draft collectives (per cycle)"],
    ].tolist() == ["chain of 3 steps", 88.3, pytest.approx(67), 8]
    assert table.loc["none", tables.DRAFT_ONLY].tolist() == ["–"] * 5


@pytest.mark.parametrize(
    "arm, words",
    [
        ("own-1+steps=1", "chain of 1 step"),
        ("own-1+topk=2+draft_tokens=8", "tree of 3 steps, topk 2, 8 tokens"),
        ("own-1+topk=1+draft_tokens=9", "unknown"),
        ("no arm", "unknown"),
    ],
)
def test_an_arms_own_settings_are_named(arm, words):
    assert tables.arms(read({"arms": {arm: {}}}), PROFILE)["drafting"].tolist() == [words]


@pytest.mark.parametrize("value", UNKNOWN_NUMBERS)
def test_an_unknown_number_is_never_zero(value):
    facts = {
        "tokens_per_s": value,
        "cycle_ms": value,
        "accept_length": value,
        "accept_rate": value,
        "collectives_per_round": {} if value is None else {"draft": value},
        "stage_ms": {} if value is None else {"draft": value},
    }
    comparison = {"a": "own-1", "b": "shared", "ratio": value, "low": value, "high": value}
    verdict = read({"arms": {"own-1": facts}, "comparisons": [comparison | {"valid": True}]})
    shown = cells.shown(tables.arms(verdict, PROFILE)).iloc[0]
    for column in (
        "throughput (tokens/s)",
        "cycle (ms)",
        "accept length (tokens/cycle)",
        "accept rate (%)",
        "draft collectives (per cycle)",
        "attested",
    ):
        assert shown[column] == "unknown"
    assert cells.shown(tables.comparisons(verdict))["ratio"].tolist() == ["unknown"]
    assert tables.collectives(verdict)["collectives (per cycle)"].isna().all()
    assert tables.stage_times(verdict)["time (ms/cycle)"].isna().all()


def test_a_zero_is_never_unknown():
    facts = {"accept_rate": 0.0, "tokens_per_s": 0, "collectives_per_round": {"draft": 0}}
    verdict = read({"arms": {"own-1": facts}})
    shown = cells.shown(tables.arms(verdict, PROFILE)).iloc[0]
    assert (
        shown["accept rate (%)"],
        shown["throughput (tokens/s)"],
        shown["draft collectives (per cycle)"],
    ) == ("0", "0", "0")


def test_a_refused_comparison_keeps_its_reasons_and_no_ratio():
    refused_one = VERDICT["comparisons"][0] | {"valid": False, "reasons": [{"sentence": "why"}]}
    row = tables.comparisons(read({"comparisons": [refused_one]})).iloc[0]
    assert (row["comparison"], row["metric"]) == ("own-1 ÷ shared", "throughput")
    assert [reason.sentence for reason in row["reasons"]] == ["why"]
    assert row[["ratio", "low", "high", "these low", "these high"]].isna().all()


@pytest.mark.parametrize(
    "control, controls, ratios",
    [
        (VERDICT["control"], [], [1.004]),
        ({}, [VERDICT["control"], VERDICT["control"] | {"ratio": 0.99}], [1.004, 0.99]),
        ({}, [], []),
        (None, [], []),
    ],
)
def test_control_may_be_one_or_several_or_absent(control, controls, ratios):
    verdict = read({"control": control, "controls": controls})
    assert tables.controls(verdict)["ratio"].tolist() == ratios


def test_one_reason_is_said_once_with_all_that_it_concerns():
    table = tables.refusals(read(refused())).set_index("key")
    assert (
        table.loc["cached_tokens", "concerns"]
        == "the run; throughput of own-1 ÷ shared; cycle time of own-1 ÷ shared"
    )
    assert table.loc["not_attested", "reason"].startswith("own-1 was not attested on rank 1")
    assert table.loc["control", "concerns"] == "throughput of shared ÷ shared"
    assert tables.refusals(read(VERDICT)).empty


def test_a_reason_of_the_run_names_its_arms_and_experiment():
    reason = {"key": "k", "sentence": "s", "experiment": "draft_tp", "arms": ["own-1", "shared"]}
    told = read({"reasons": [reason, reason | {"sentence": "t", "arms": []}]})
    assert tables.refusals(told)["concerns"].tolist() == [
        "own-1 and shared in draft_tp",
        "draft_tp",
    ]


def test_collectives_are_in_the_cycles_order_with_their_kinds():
    table = tables.collectives(read(VERDICT))
    shared = table[table["arm"] == "shared"]
    assert shared["stage"].tolist() == ["draft", "verify", "draft-extend"]
    assert shared["kinds"].tolist() == [
        "6 all-reduce, 2 all-gather",
        "9 all-reduce, 1 all-gather",
        "3 all-reduce, 1 all-gather",
    ]
    assert table[table["arm"] == "own-1"]["collectives (per cycle)"].tolist() == [1, 10, 0]


def test_parity_is_said_with_its_counts_where_they_are_known():
    told = {
        "arm": "own-1",
        "experiment": "e",
        "result": "differs",
        "mismatched": 1,
        "compared": 12,
        "own_mismatched": 0,
        "own_compared": 3,
    }
    counted = read({"parity_counts": [told], "parity": {"own-1": "differs"}})
    assert tables.parity(counted).values.tolist() == [list(told.values())]
    plain = cells.shown(tables.parity(read({"parity": {"own-1": "identical"}})))
    assert plain.values.tolist() == [["own-1", "unknown", "identical", *["unknown"] * 4]]


def test_failures_name_what_failed_and_requests_that_did():
    broken = block(1, "own-1", 0, 0)
    broken = broken.model_copy(
        update={"requests": (broken.requests[0].model_copy(update={"error": "cut off"}),)}
    )
    assert log_tables.failures([failure(), broken])[["what", "reason"]].values.tolist() == [
        ["hung", "no token within 60 s"],
        ["request", "heldout-000: cut off"],
    ]


def test_of_two_findings_with_one_name_the_later_counts():
    log = [
        Finding(experiment="probe", name="option", time="t", value=value)
        for value in ("first", {"found": False})
    ]
    assert log_tables.findings(log)["value"].tolist() == ['{"found": false}']


def test_provenance_is_flat_and_keeps_lists():
    table = log_tables.provenance({**PROVENANCE, "ranks": [{"gpu": 0}, {"gpu": None}]}).set_index(
        "fact"
    )["value"]
    assert log_tables.provenance({"changed": False})["value"].tolist() == ["no"]
    assert (
        table["versions.sglang"] == "0.5.23"
        and table["flags"] == "--tp 2 --dtype float32"
        and table["machine.gpus"] == "none"
    )
    assert table["ranks.1.gpu"] == "0" and table["ranks.2.gpu"] == "unknown"


@pytest.mark.parametrize(
    "column, words",
    [
        ([1.0, 12.0], ["1", "12"]),
        ([0.5, None], ["0.5", "unknown"]),
        ([0.5, 1.25], ["0.50", "1.25"]),
        ([97.5, 95], ["97.5", "95.0"]),
        ([12.345, 3.2], ["12.35", "3.20"]),
        ([1 / 3], ["0.333"]),
        ([1234.5, 1.0], ["1,234", "1"]),
        ([True, False], ["yes", "no"]),
        (["–", 2.0], ["–", "2"]),
    ],
)
def test_a_columns_numbers_share_their_decimals(column, words):
    assert cells.shown(pd.DataFrame({"c": pd.Series(column, dtype=object)}))["c"].tolist() == words


def test_what_comes_once_a_request_is_no_part_of_a_cycle():
    per = {"prefill": 30.0, "draft_prefill": 5.0, "decode": 3.0, "verify": 4.0, "draft": 2.0}
    verdict = read({"arms": {"shared": {"stage_ms": per, "collectives_per_round": per}}})
    assert (
        tables.stage_times(verdict)["stage"].tolist()
        == tables.collectives(verdict)["stage"].tolist()
        == ["draft", "verify", "decode"]
    )
