"""README's figures are those of the recordings."""

import json
import re

import faults
import pytest
import torch
from transformers import AutoModelForCausalLM

from workbench.answers import cycle_check, memory_check, negative_control
from workbench.experiment import runlog
from workbench.experiment.profile_sections import ROOT
from workbench.run import lab, recording

RECORDINGS = ROOT / "fixtures" / "recordings"
README = (ROOT / "README.md").read_text()
ROWS = re.findall(
    r"^\| `(?P<name>[\w-]+)` \| `(?P<a>[^`]+)` ÷ `(?P<b>[^`]+)` \| (?P<figures>[^|]+) \|",
    README,
    re.MULTILINE,
)


@pytest.mark.parametrize(("name", "a", "b", "figures"), ROWS)
def test_a_ratio_is_the_recorded_one(name, a, b, figures):
    verdict = json.loads((RECORDINGS / name / "verdict.json").read_text())
    (found,) = [
        c for c in verdict["comparisons"] if (c["a"], c["b"], c["metric"]) == (a, b, "tokens_per_s")
    ]
    assert (
        found["valid"]
        and figures == f"{found['ratio']:.3f} ({found['low']:.3f} to {found['high']:.3f})"
    )


def test_the_table_is_there():
    assert len(ROWS) >= 12 and {name for name, *_ in ROWS} == {
        name for name in recording.names() if name.startswith("h200")
    }


def answers(name: str) -> dict[str, dict[tuple[str, int], tuple[int, ...]]]:
    """{arm: {(prompt, requests at once): tokens}} of a recording's first parity blocks."""
    found: dict[str, dict] = {}
    for block in (
        r
        for r in runlog.read(RECORDINGS / name / "runs.jsonl")
        if r.kind == "block" and r.role == "parity" and r.pair == 0
    ):
        found.setdefault(block.arm, {}).update(
            {(r.prompt, block.concurrency): r.output_ids for r in block.requests}
        )
    return found


@pytest.mark.parametrize(
    ("name", "other", "verdict"),
    [
        ("h200-x2-tiny", 2, "identical"),
        ("h200-x2-tiny-control", 2, "identical"),
        ("h200-x2-tiny-paged", 6, "differs"),
    ],
)
def test_on_the_gpus_own_1_answers_as_shared_does_and_both_differ_from_none_as_often_as_said(
    name, other, verdict
):
    found = answers(name)
    none, shared = found.pop("none"), found.pop("shared")
    assert len(shared) == 24 and len(found) >= 2 and all(own == shared for own in found.values())
    assert sum(none[key] != shared[key] for key in none) == other and f"{other} of 24" in README
    assert {
        json.loads((RECORDINGS / name / "verdict.json").read_text())["parity"][arm]
        for arm in ("shared", *found)
    } == {verdict}


def test_answers_part_from_none_where_two_tokens_are_equal_to_bfloat16():
    prompts = {
        p["id"]: p["input_ids"]
        for p in json.loads((ROOT / "fixtures/tiny/heldout.json").read_text())
    }
    target = AutoModelForCausalLM.from_pretrained(
        ROOT / "fixtures/tiny/target", dtype=torch.float32
    ).eval()
    apart, best = [], []
    for name in ("h200-x2-tiny", "h200-x2-tiny-control", "h200-x2-tiny-paged"):
        found = answers(name)
        for key, none in found["none"].items():
            if none != (other := found["shared"][key]):
                place = next(i for i, (a, b) in enumerate(zip(none, other)) if a != b)
                with torch.inference_mode():
                    logits = target(torch.tensor([prompts[key[0]] + list(none[:place])])).logits[
                        0, -1
                    ]
                best.append(logits.max().item())
                apart.append(
                    max(best[-1] - logits[chosen].item() for chosen in (none[place], other[place]))
                )
    step = torch.finfo(torch.bfloat16).eps * 8  # of bfloat16 numbers from 8 to 16
    words = " ".join(README.split())
    assert len(apart) == 10 and max(apart) < step == 0.0625 and 8 <= min(best) <= max(best) < 16
    assert (
        f"{min(apart):.3f} to {max(apart):.3f} apart, at {min(best):.1f} to {max(best):.1f}, where"
        f" bfloat16 has steps of {step}" in words
    )


def test_a_corrupted_rank_was_caught_on_the_gpus_in_both_ways():
    found = negative_control.known(lab.reopen(RECORDINGS / "h200-x2-tiny-control"))
    assert list(found) == ["own-1+agreement=check", "own-1+agreement=off"] and all(
        value["detected"] for value in found.values()
    )
    assert (
        "ranks [1] drafted another tree than rank 0" in found["own-1+agreement=check"]["sentence"]
    )
    assert "`ranks [1] drafted another tree than rank 0`" in " ".join(README.split())


def test_what_timing_costs_is_said_with_its_interval_and_the_control():
    verdict = json.loads((RECORDINGS / "h200-x2-timing" / "verdict.json").read_text())
    (found,) = [
        c
        for c in verdict["comparisons"]
        if (c["a"], c["b"], c["metric"]) == ("shared", "shared+timing=off", "tokens_per_s")
    ]
    rate = {arm: verdict["arms"][arm]["tokens_per_s"] for arm in ("shared", "shared#2")}
    said = (
        f"`shared` ÷ `shared+timing=off` at {found['ratio']:.3f} ({found['low']:.3f} to"
        f" {found['high']:.3f}), where `shared` differs from itself by"
        f" {100 * (rate['shared#2'] / rate['shared'] - 1):.1f} %"
    )
    assert found["low"] < 1 < found["high"] and said in " ".join(README.split())


def test_what_eight_simulated_ranks_did():
    verdict, found = (
        json.loads((RECORDINGS / "cpu-tp8" / "verdict.json").read_text()),
        answers("cpu-tp8"),
    )
    assert (
        verdict["valid"] is False
        and verdict["engine"] == "cpu"
        and len(found) == 12
        and all(tokens == found["none"] for tokens in found.values())
    )
    arms = verdict["arms"]
    assert all(facts["attested"] for facts in arms.values())
    assert [
        arms[arm]["collectives_per_round"]["draft"] for arm in ("shared", "own-1", "own-2", "own-4")
    ] == [16, 1, 17, 17]
    assert (
        "each of 11 speculating arms" in README
        and "16 collectives on `shared`" in README
        and "17 on `own-2` and `own-4`" in README
    )


def test_memory_was_predicted_and_given_back_as_said():
    shown = [lab.reopen(RECORDINGS / name) for name in recording.names() if name.startswith("h200")]
    tables = {run.folder.name: memory_check.table(run)["off (%)"].dropna().abs() for run in shown}
    assert sum(len(off) > 0 for off in tables.values()) >= 6 and all(
        off.max() <= 1 for off in tables.values() if len(off)
    )
    assert all(run.finding("memory")["given_back"] for run in shown if tables[run.folder.name].size)


def test_the_table_of_faults_is_what_was_measured():
    found = json.loads((ROOT / "fixtures" / "faults.json").read_text())
    assert faults.table(found) in README and len(found["faults"]) >= 10


def test_the_cycles_are_those_measured_and_predicted_and_those_that_miss_are_named():
    table, said = cycle_check.recorded()
    columns = ["none", "shared", "own-1", "own-1+agreement=off"]
    shown = table[
        table["run"].str.startswith("h200")
        & ~table["run"].str.contains("tiny")
        & table["arm"].isin(columns)
    ]
    for name, rows in shown.groupby("run"):
        cells = {
            row["arm"]: (
                f"{row['measured cycle (ms)']:.2f} → {row['model alone (ms)']:.2f},"
                f" {row['off (%)']:+.0f} %"
            )
            for _, row in rows.iterrows()
        }
        assert f"| `{name}` | {' | '.join(cells.get(arm, '–') for arm in columns)} |" in README
    missed = shown[shown["off (%)"].abs() > cycle_check.ALLOWED]
    assert len(shown) == 30 and "Two of 30 are off by more than 15 %" in README
    assert list(zip(missed["run"], missed["arm"])) == [
        ("h200-x2-hostpath-head-32000", "shared"),
        ("h200-x2-kimi-mini-fused", "own-1+agreement=off"),
    ]
    ordered = [
        found
        for name in set(shown["run"])
        if (found := re.search(r"It orders (.+?)(\d+) (?:of the )?pairs of arms", said[name]))
    ]
    assert {found[1] for found in ordered} == {"each of the "}
    assert sum(int(found[2]) for found in ordered) == 24 and "all 24 pairs of arms here" in README


def test_what_the_model_misses_of_shared_is_what_the_notebook_says():
    missed = re.search(
        r"\(([\d.]+) ms of its drafting and ([\d.]+) ms between the stages\)", README
    )
    said = cycle_check.recorded()[1]["h200-x2-hostpath-head-32000"]
    assert (
        f"has +{missed[1]} ms in draft, " in said
        and f"+{missed[2]} ms in the host against the model" in said
    )


def test_the_reasons_why_own_1_loses_have_the_recorded_figures():
    def arms(name: str) -> dict:
        return json.loads((RECORDINGS / name / "verdict.json").read_text())["arms"]

    def drafting(name: str, arm: str) -> str:
        stages = arms(name)[arm]["stage_ms"]
        return f"{stages['draft'] + stages['draft_extend']:.2f}"

    words = " ".join(README.split())
    full, small = (
        [drafting(name, arm) for arm in ("own-1", "shared")]
        for name in ("h200-x2-full-head", "h200-x2-head-32000")
    )
    assert (
        f"{full[0]} ms a cycle on `own-1` and {full[1]} ms on `shared`" in words
        and f"{small[0]} against {small[1]} ms" in words
    )
    trace = lab.reopen(RECORDINGS / "h200-x2-full-head").finding("trace shared")["parts"]
    ms = 1e3 * sum(
        trace[stage]["seconds"].get("collective", 0) / trace[stage]["rounds"]
        for stage in ("draft", "draft_extend")
    )
    assert f"the trace of `shared` has {ms:.3f} ms" in words
    assert f"a cycle of {arms('h200-x2-tiny')['shared']['cycle_ms']:.2f} ms all the same" in words
    first, later = (
        arms(name)["shared"]["cycle_ms"]
        for name in ("h200-x2-head-32000-first", "h200-x2-head-32000")
    )
    assert f"took {first:.2f} ms, then {later:.2f}" in words
    for arm in ("shared", "own-1"):
        length = arms("h200-x2-tiny")[arm]["accept"]["length"]
        assert (
            f"{length['value']:.2f} ({length['low']:.2f} to {length['high']:.2f}) on `{arm}`"
            in words
        )
        assert (
            f"{arms('h200-x2-tiny-paged')[arm]['accept']['length']['value']:.2f}" == "3.59"
            and "by pages 3.59 and 3.59" in words
        )


def test_what_is_linked_is_there_and_a_picture_is_small():
    linked = [ROOT / path for path in re.findall(r"\]\(([\w./-]+)\)", README)]
    assert len(linked) > 10 and [str(path) for path in linked if not path.exists()] == []
    pictures = [path for path in linked if path.suffix == ".png"]
    assert set(pictures) == set((ROOT / "fixtures" / "pictures").iterdir()) and all(
        path.stat().st_size < 100_000 for path in pictures
    )
