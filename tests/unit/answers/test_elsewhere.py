"""The origin's numbers, explained as a count by hand explains them: stage by stage, before anything
is measured.
"""

from types import SimpleNamespace

import pytest

from workbench import cli
from workbench.answers import budget, elsewhere
from workbench.experiment import profile
from workbench.experiment.profile_sections import ROOT
from workbench.predict import by_hand, ceilings, estimate, model_shape
from workbench.predict.basis import Basis
from workbench.run import recording
from workbench.run.lab import reopen

SHAPES = "fixtures/shapes/kimi-k25"
PAIR = ["-p", f"target={SHAPES}/target", "-p", f"draft={SHAPES}/draft"]
GIVEN = {"memory_bandwidth": 1.79e12, "collective_latency": 50e-6}


@pytest.fixture(scope="module")
def origin() -> estimate.Estimate:
    chosen = profile.load(
        "rtx6000-x8-kimi", {"target": f"{SHAPES}/target", "draft": f"{SHAPES}/draft"}
    )
    shapes = [
        model_shape.read(ROOT / SHAPES / side, f"pair.{side}") for side in ("target", "draft")
    ]
    return estimate.estimate(chosen, *shapes, by_hand.machine(None, 8, GIVEN))


def test_the_stages_are_those_counted_by_hand(origin):
    """Bytes at 1.79 TB/s (6.03 GB a plain step, 13.0 GB for the 45.6 of 384 experts that six tokens
    read), 123 all-reduces and one all-gather at 50 us, and the draft's.
    """
    rows = estimate.stages(origin).set_index(["arm", "stage"])
    by_count = {
        ("none", "decode"): (3.4, 6.2),
        ("shared", "verify"): (7.3, 6.2),
        ("shared", "draft"): (0.7, 0.8),
        ("shared", "draft_extend"): (0.35, 0.2),
    }
    for at, (read, collectives) in by_count.items():
        assert rows.loc[at, "weights and KV"] == pytest.approx(read, abs=0.06), at
        assert rows.loc[at, "collectives"] == pytest.approx(collectives, abs=0.01), at


def test_a_draft_of_its_own_loses_below_some_330_us_a_collective(origin):
    """A rank reads 12.97 GB of its own draft where shared reads 1.89; it saves 19 collectives."""
    assert estimate.wins_from_us(origin, "own-1") == pytest.approx(326, abs=2)
    assert estimate.wins_from_us(origin, "own-2") is None  # it makes one collective more
    assert estimate.wins_from_us(origin, "shared") is None
    at = {"collective_latency": 326.3e-6}
    there = estimate.estimate(
        origin.profile, origin.target, origin.draft, by_hand.machine(origin.machine, 8, at)
    )
    assert there.arms["own-1"].device_s == pytest.approx(there.arms["shared"].device_s, rel=1e-3)


def test_the_profile_tells_the_story_that_the_ceilings_start_from():
    told = budget._reported(SimpleNamespace(profile=profile.load("rtx6000-x8-kimi")))
    assert told == ceilings.Numbers()


def test_tokens_and_break_even_follow_from_the_cycles(origin):
    rows = estimate.arms(origin).set_index("arm")
    assert rows.loc["none", "tokens/s"] == pytest.approx(1e3 / rows.loc["none", "cycle (ms)"])
    shared = rows.loc["shared"]
    assert shared["tokens/s"] == pytest.approx(2.1e3 / shared["cycle (ms)"])
    assert shared["breaks even at"] == pytest.approx(
        shared["cycle (ms)"] / rows.loc["none", "cycle (ms)"]
    )
    assert shared["reported cycle (ms)"] == pytest.approx(29.58, abs=0.01)


def test_the_rest_of_the_origins_cycle_is_a_table(tmp_path):
    """11.1 ms a plain step, 3.9 of experts, 2.1 to 3.1 of drafting: some 18 of 29.6."""
    run = SimpleNamespace(profile=profile.load("cpu-tiny"))
    found = elsewhere.parts(run, SimpleNamespace(arms={}), Basis())
    rows = elsewhere.table(found).set_index("of the cycle")
    assert list(rows.loc["one plain step"])[:2] == pytest.approx([11.11, 11.11], abs=0.01)
    experts = "experts that 6 tokens read and one does not"
    assert rows.loc[experts, "at least (ms)"] == pytest.approx(3.9, abs=0.01)
    assert list(rows.loc["drafting: collectives"])[:2] == pytest.approx([1.0, 2.0])
    assert list(rows.loc["explained"])[:2] == pytest.approx([17.1, 18.1], abs=0.1)
    assert list(rows.loc["not explained"])[:2] == pytest.approx([11.5, 12.5], abs=0.1)
    said = elsewhere.sentence(found)
    assert "Of a cycle of 29.6 ms 17.1 to 18.1 ms are explained" in said and "Measure next" in said


def test_a_runs_own_cycle_is_explained_by_its_own_machine_alone():
    known, unknown = (
        reopen(recording.FOLDER / name)
        for name in ("h200-x2-full-head", "h200-x2-head-32000-first")
    )
    found = elsewhere.parts(known, known.verdict.file, budget.basis(known))
    *rows, explained, rest = found
    assert explained.low == pytest.approx(sum(row.low for row in rows))
    assert rest.low == pytest.approx(rest.high) and 0 < rest.low < explained.low
    assert elsewhere.parts(unknown, unknown.verdict.file, budget.basis(unknown)) == ()
    assert "inputs of its machine were not measured" in elsewhere.sentence(())
    assert elsewhere.table(()).empty


def test_the_command_takes_inputs_by_hand(capsys):
    values = [word for k, v in GIVEN.items() for word in ("-p", f"{k}={v:g}")]
    assert cli.main(["predict", "rtx6000-x8-kimi", *PAIR, *values]) == 0
    by_flags = capsys.readouterr().out
    assert "draft_extend" in by_flags and "own-1 326 us" in by_flags
    assert "Given by hand: memory_bandwidth 1.79e+12, collective_latency 5e-05" in by_flags
    assert cli.main(["predict", "rtx6000-x8-kimi", *PAIR]) == 0  # the profile's story has them
    assert capsys.readouterr().out == by_flags


def test_the_command_says_where_the_inputs_are_another_machines(capsys):
    words = ["predict", "rtx6000-x8-kimi", "recorded:h200-x2-hostpath-full-head", *PAIR]
    assert cli.main([*words, "-p", "memory_bandwidth=1.79e12"]) == 0
    assert "which is another machine than the profile's (Eight RTX PRO" in capsys.readouterr().out
    assert cli.main(["predict", "h200-x2", "recorded:h200-x2-head-32000"]) == 0
    assert "another machine" not in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["-p", "memory_bandwidth=0"], "memory_bandwidth: is 0"),
        (["-p", "collective_latency=fast"], "collective_latency"),
        (["-p", "memory_bandwith=1e12"], "'memory_bandwith' is unknown"),
        (["-p", "memory_bandwidth=1e12"], "collective_latency: is not given"),
    ],
)
def test_bad_inputs_are_named(words, said, capsys):
    assert cli.main(["predict", "h200-x8", *words]) == 2
    assert said in capsys.readouterr().err
