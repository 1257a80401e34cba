"""Forecasts for more ranks: what is extrapolated and how far, by hand; the table in docs/model.md
is what the recorded inputs give.
"""

import pytest
from test_cycle_time import machine

from workbench import cli
from workbench.answers import budget
from workbench.experiment import profile
from workbench.experiment.profile_sections import ROOT
from workbench.predict import more_ranks
from workbench.predict.machine import Latency
from workbench.run import recording
from workbench.run.lab import reopen

US = 1e-6
PAGE = (ROOT / "docs" / "model.md").read_text()


def test_latencies_are_kept_or_grow_with_the_steps_of_a_ring():
    measured = (
        Latency("all_reduce", "custom", 2, True, ((1024, 2 * US), (4096, 3 * US))),
        Latency("all_gather", "nccl", 2, True, (), "not tried"),
    )
    two = machine(2, latencies=measured)
    kept, grown = (more_ranks.widened(two, 8, by_steps) for by_steps in (False, True))
    assert kept.ranks == 8 and kept.thin_bytes_per_s == two.thin_bytes_per_s
    assert {(t.kind, t.ranks) for t in kept.latencies} == {
        (kind, n) for kind in ("all_reduce", "all_gather") for n in (2, 4, 8)
    }
    for ranks in (2, 4, 8):
        assert kept.collective_s("all_reduce", 1024, ranks, graph=True) == pytest.approx(2 * US)
        assert grown.collective_s("all_reduce", 4096, ranks, graph=True) == pytest.approx(
            3 * (ranks - 1) * US
        )
    assert all(t.why == "not tried" for t in kept.latencies if t.kind == "all_gather")
    four = machine(4)  # of several groups the largest that was measured tells
    assert more_ranks.widened(four, 8, True).collective_s(
        "all_reduce", 1, 8, graph=True
    ) == pytest.approx(10 * US * 7 / 3)


def test_the_host_hides_what_is_shorter_and_ratios_are_those_of_cycles():
    chosen, found = _forecast("h200-x8", "h200-x2-full-head", "full-head")
    rows = more_ranks.table(chosen, found).set_index("arm")
    assert list(rows.index) == ["shared", "own-1", "own-2", "own-4", "own-8"] and rows.loc[
        "shared"
    ].filter(like="÷").tolist() == [1.0, 1.0]
    for how in (more_ranks.LEAST, more_ranks.MOST):
        device, host, own = (
            rows[f"device (ms), {how}"],
            1e3 * found.host["shared"],
            1e3 * found.host["own-1"],
        )
        assert rows.loc["own-1", f"÷ shared, {how}"] == pytest.approx(
            device["shared"] / device["own-1"]
        )
        for arm in ("own-1", "own-2"):
            assert rows.loc[arm, f"with the host, {how}"] == pytest.approx(
                max(device["shared"], host) / max(device[arm], own)
            )
    assert (
        rows.loc["shared", f"device (ms), {more_ranks.MOST}"]
        > rows.loc["shared", f"device (ms), {more_ranks.LEAST}"]
    )


def _forecast(name: str, measured: str, head: str):
    chosen = profile.load(name, {"draft": f"fixtures/shapes/dense-7168/draft-{head}"})
    return chosen, budget.basis(reopen(recording.FOLDER / measured))


@pytest.mark.parametrize("head", ["full-head", "head-32000"])
@pytest.mark.parametrize("ranks", [4, 8])
@pytest.mark.parametrize("path", ["", "-hostpath"])
def test_what_is_written_down_is_what_the_recorded_inputs_give(ranks, path, head):
    """Each cell of docs/model.md: the ratio with the host and by the device alone, each between
    the two kinds of latencies, from the inputs of the run that went the same way.
    """
    name = f"h200-x{ranks}{path}"
    rows = more_ranks.table(*_forecast(name, f"h200-x2{path}-full-head", head)).set_index("arm")
    cells = []
    for arm in ("own-1", "own-2", "own-4"):
        if arm not in rows.index or arm == f"own-{ranks}":
            cells.append("–")
            continue
        ends = [
            " to ".join(
                dict.fromkeys(
                    sorted(
                        f"{rows.loc[arm, f'{kind}, {how}']:.2f}"
                        for how in (more_ranks.LEAST, more_ranks.MOST)
                    )
                )
            )
            for kind in ("with the host", "÷ shared")
        ]
        cells.append(f"{ends[0]} ({ends[1]})")
    assert f"| `{name}`, {head.replace('-', ' ')} | {' | '.join(cells)} |" in PAGE


def test_the_command_says_it_and_refuses_what_it_cannot_extrapolate(capsys):
    assert (
        cli.main(
            [
                "predict",
                "h200-x8",
                "recorded:h200-x2-full-head",
                "-p",
                "draft=fixtures/shapes/dense-7168/draft-full-head",
            ]
        )
        == 0
    )
    said = capsys.readouterr().out
    assert (
        "own-4" in said
        and "up to 8 ranks are not measured" in said
        and "recorded:h200-x2-tiny" in said
    )
    assert cli.main(["predict", "h200-x8", "recorded:h200-x2-head-32000-first"]) == 2
    assert "there is no prediction" in capsys.readouterr().err
