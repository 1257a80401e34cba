"""Memory: what a rank reports is summed over real storages, each once, and stands beside the
preflight's prediction.
"""

from types import SimpleNamespace

import pytest
import torch
from torch import nn

from tests.simulated import PROFILE, TIME
from workbench.answers import memory_check
from workbench.engine import memory
from workbench.experiment import profile
from workbench.experiment.arms import Arm
from workbench.experiment.runlog import RunLog, Start
from workbench.predict import memory as predicted
from workbench.predict import model_shape
from workbench.predict.memory import MIB
from workbench.run import lab


class Model(nn.Module):
    def __init__(self, table: nn.Parameter, rows: int = 8):
        super().__init__()
        self.embed_tokens = table
        self.proj = nn.Linear(4, rows, bias=False)
        self.register_buffer("rotary", torch.zeros(10))


def runner(model, *buffers):
    return SimpleNamespace(
        model=model,
        token_to_kv_pool=SimpleNamespace(k_buffer=list(buffers[:1]), v_buffer=list(buffers[1:])),
    )


@pytest.fixture
def table():
    return nn.Parameter(torch.zeros(16, 4))


def test_the_targets_sums(table):
    model = Model(table)
    model.w_kc = torch.zeros(6).view(2, 3)  # derived, no parameter
    model.w_vc = model.w_kc.t()  # a view of the same storage
    model.head = table  # tied
    found = memory.target(runner(model, torch.zeros(9, 2, 2), torch.zeros(9, 2, 2)))
    assert found == {
        "weights": 4 * (16 * 4 + 8 * 4 + 6),
        "other": 4 * 10,
        "kv": 2 * 4 * 36,
        "rows": 9,
    }


def test_a_draft_on_the_targets_group_takes_its_table_for_nothing(table):
    target, draft = (
        runner(Model(table)),
        runner(Model(table, rows=2), torch.zeros(9, 1), torch.zeros(9, 1)),
    )
    draft.model.rotary = target.model.rotary  # shared like SGLang's rotary tables
    assert memory.draft(draft, target) == {
        "weights": 4 * 2 * 4,
        "copied": 0,
        "other": 0,
        "kv": 2 * 4 * 9,
        "rows": 9,
    }


def test_a_copy_of_the_table_counts_whole_with_what_a_view_keeps_alive(table):
    whole = torch.zeros(32, 4)
    copy = nn.Parameter(whole[:16], requires_grad=False)
    setattr(copy, memory.COPY, True)
    found = memory.draft(runner(Model(copy, rows=2)), runner(Model(table)))
    assert (found["weights"], found["copied"], found["other"], found["rows"]) == (
        4 * 2 * 4,
        4 * 32 * 4,
        4 * 10,
        0,
    )


def test_mla_keeps_one_buffer(table):
    both = SimpleNamespace(
        model=Model(table), token_to_kv_pool=SimpleNamespace(kv_buffer=[torch.zeros(5, 1, 6)])
    )
    assert (memory.target(both)["kv"], memory.target(both)["rows"]) == (4 * 30, 5)


def test_a_cpu_has_no_device_to_ask():
    assert memory.device() is None or torch.cuda.is_available()


def attested(tiny, arms, stretch=1.0, rows=4097):
    """A start that holds what is predicted, each draft's weights ``stretch`` times as much on its
    last rank.
    """
    target, draft = (
        model_shape.read(getattr(tiny.pair, side), f"pair.{side}") for side in ("target", "draft")
    )

    def entry(rank):
        needs = {name: predicted.predict(tiny, target, draft, Arm.parse(name)) for name in arms}
        own = [
            {
                "arm": name,
                "memory": {
                    "weights": int(need.draft * (stretch if rank else 1)),
                    "copied": need.embedding,
                    "other": 7,
                    "kv": rows * need.draft_kv,
                    "rows": rows,
                },
            }
            for name, need in needs.items()
            if name != "none"
        ]
        first = needs[arms[0]]
        return {
            "rank": rank,
            "memory": {"weights": first.target, "other": 9, "kv": rows * first.kv, "rows": rows},
            "placements": own,
        }

    return Start(
        start=0,
        experiment="draft_tp",
        arms=arms,
        time=TIME,
        seconds=1,
        command=(),
        environment={},
        server="x",
        attestation=(entry(0), entry(1)),
    )


@pytest.fixture
def run(tmp_path):
    def with_log(*starts, chosen=profile.load("cpu-tiny")):
        with RunLog(tmp_path / "runs.jsonl") as log:
            for start in starts:
                log.append(start)
        return lab.Run(chosen, tmp_path)

    return with_log


def test_predicted_beside_measured(run):
    tiny = profile.load("cpu-tiny")
    found = run(
        attested(tiny, ("none",)),
        attested(tiny, ("shared", "own-1", "shared#2", "own-1+steps=2"), stretch=1.1),
    )
    rows = memory_check.table(found).set_index(["arm", "part"])
    assert list(rows.index) == [
        ("none", "target weights"),
        ("none", "target KV pool"),
        *(
            ("shared", part)
            for part in (
                "target weights",
                "target KV pool",
                "draft weights",
                "draft KV pool",
                "what the draft adds",
            )
        ),
        *(
            ("own-1", part)
            for part in (*memory_check.TARGET, *memory_check.OWN, "what the draft adds")
        ),
    ]
    assert rows.loc[("own-1", "draft weights"), "off (%)"] == pytest.approx(-100 / 11, abs=0.01)
    assert rows.loc[("own-1", "draft KV pool"), "predicted (MiB)"] == pytest.approx(
        4097 * 1024 / MIB
    )
    stretched = [
        (arm, part)
        for arm in ("shared", "own-1")
        for part in ("draft weights", "what the draft adds")
    ]
    assert rows.drop(index=stretched)["off (%)"].abs().max() == 0
    assert "more than the 5 % allowed for" in memory_check.sentence(found)


def test_a_pool_smaller_than_asked_for_shows(run):
    found = run(attested(profile.load("cpu-tiny"), ("shared",), rows=2049))
    rows = memory_check.table(found).set_index("part")
    assert rows.loc["target KV pool", "off (%)"] == pytest.approx(100 * (4097 / 2049 - 1))


def test_without_a_limit_the_pool_is_what_there_was(run):
    tiny = profile.load("cpu-tiny")
    free = tiny.model_copy(update={"server": tiny.server.model_copy(update={"flags": {}})})
    found = run(attested(free, ("shared",), rows=777), chosen=free)
    assert memory_check.table(found)[
        "off (%)"
    ].abs().max() == 0 and "within 0 %" in memory_check.sentence(found)


def test_what_is_not_known_is_not_compared(run, tmp_path):
    assert memory_check.table(run()).empty and "not compared" in memory_check.sentence(run())
    old = attested(profile.load("cpu-tiny"), ("shared",))
    old = old.model_copy(
        update={"attestation": tuple({**entry, "placements": []} for entry in old.attestation)}
    )
    assert memory_check.table(run(old)).empty
    elsewhere = profile.Profile(
        **PROFILE | {"pair": {"target": "/nowhere/a", "draft": "/nowhere/b"}}
    )
    found = run(attested(profile.load("cpu-tiny"), ("shared",)), chosen=elsewhere)
    assert (
        memory_check.table(found)["measured (MiB)"].notna().all()
        and memory_check.table(found)["predicted (MiB)"].isna().all()
    )
    assert "not compared" in memory_check.sentence(found)
