"""The measuring loop without SGLang: a fake server that says what a real one would, to see how arms
are reached and what is attested.
"""

from __future__ import annotations

from contextlib import contextmanager, nullcontext
from pathlib import Path
from types import SimpleNamespace

import pytest
from simulated_runs import profile

from workbench.experiment import plans
from workbench.experiment.arms import Arm
from workbench.experiment.errors import Hung, ServerFailed
from workbench.experiment.plans import Task
from workbench.experiment.runlog import Block, Failure, Finding, Request, Start
from workbench.experiment.schedule import Planned
from workbench.run import lab, measuring
from workbench.serving import attestation, pool

TP = 2


class Servers:
    """Stands for SGLang, its servers and the client: one server at a time, whose active arm is
    ``arm``.
    """

    def __init__(self, monkeypatch, said=None, counts=None):
        self.calls: list[tuple] = []
        self.changes = {"said": said or {}, "counts": counts or {}}
        self.rounds, self.arms, self.live = 0, {}, 0
        monkeypatch.setattr(measuring.servers, "serve", self.serve)
        monkeypatch.setattr(measuring.servers, "imported_once", nullcontext)
        monkeypatch.setattr(
            measuring.servers, "describe", lambda launch: {"command": ("fake",), "environment": {}}
        )
        monkeypatch.setattr(pool.client, "send", self.send)
        monkeypatch.setattr(pool.client, "switch", self.switch)
        monkeypatch.setattr(pool.client, "server_info", lambda url: {"draft_tp": self.account(url)})
        monkeypatch.setattr(lab.preflight, "check", lambda *_: [])

    @contextmanager
    def serve(self, chosen, arms, logfile, concurrency=0, locks=()):
        self.calls.append(("start", *(arm.name for arm in arms)))
        self.profile, self.live, url = chosen, self.live + 1, f"fake {len(self.calls)}"
        self.arms[url] = arms[0]
        assert self.live <= chosen.server.at_once
        try:
            yield SimpleNamespace(
                arms=arms,
                seconds=1.0,
                url=url,
                unattested=(),
                attestation=({"rank": 0}, {"rank": 1}),
                log=logfile,
                alive=lambda: True,
                launch=SimpleNamespace(server="fake"),
            )
        finally:
            self.live -= 1

    def switch(self, url, name, timeout_s):
        self.calls.append(("switch", name))
        self.arms[url] = Arm.parse(name)
        return self.account(url)

    def send(self, url, prompts, **_):
        arm = self.arms[url]
        self.calls.append(("send", arm.name))
        self.rounds += 10 * len(prompts)
        width = self.profile.speculation.of(arm).draft_tokens - 1
        counts = (
            {"verify_ct": 10, "proposed": 10 * width, "correct": 10, "histogram": (0, 10)}
            if arm.speculates
            else {}
        )
        return [
            Request(prompt=p["id"], prompt_tokens=2, completion_tokens=21, sent=0, end=1, **counts)
            for p in prompts
        ]

    def account(self, url):
        arm = self.arms[url]
        asked = self.profile.speculation.of(arm)
        ranks = range(TP)
        active = [
            (
                {
                    "arm": arm.name,
                    "steps": asked.steps,
                    "draft_tokens": asked.draft_tokens,
                    "topk": asked.topk,
                    "agreement": asked.agreement,
                    "timing": asked.timing,
                    "group_ranks": [r] if arm.group else list(ranks),
                }
                if arm.speculates
                else {"arm": "none"}
            )
            for r in ranks
        ]
        active[-1] |= self.changes["said"]
        rounds = (
            dict.fromkeys(("draft", "verify", "draft_extend"), self.rounds)
            if arm.speculates
            else {"decode": self.rounds}
        )
        counts = {
            "rounds": rounds,
            "collectives": {},
            "seconds": {},
            "timed": {},
            "verified": {str(asked.draft_tokens): self.rounds},
        }
        return {
            "server": "fake",
            "arm": arm.name if arm.speculates else "none",
            "active": active,
            "counts": counts | self.changes["counts"],
        }


def task(arm: str, group: int = 0) -> Task:
    return Task(Planned("draft_tp", "measure", arm, 0, 0, (0, 1), 0, group), 1, 32)


@pytest.fixture
def run(tmp_path):
    made = lab.Run(profile(), tmp_path)
    made.__dict__["prompts"] = [{"id": f"p{n}", "input_ids": [n]} for n in range(4)]
    return made


def blocks(run) -> list[Block]:
    return [r for r in run.records if isinstance(r, Block)]


def test_an_arm_is_reached_by_a_switch_where_the_server_holds_it_and_by_a_start_where_not(
    run, monkeypatch
):
    fake = Servers(monkeypatch)
    run.measure(
        [
            task("none"),
            task("shared"),
            task("own-1"),
            task("own-1"),
            task("shared#2"),
            task("none#2"),
            task("own-1", 1),
        ]
    )
    assert fake.calls == [
        ("start", "none", "none#2"),
        ("send", "none"),
        ("start", "shared", "own-1", "shared#2"),
        ("send", "shared"),
        ("switch", "own-1"),
        ("send", "own-1"),
        ("send", "own-1"),
        ("switch", "shared#2"),
        ("send", "shared#2"),
        ("start", "none", "none#2"),
        ("send", "none"),
        ("start", "own-1"),
        ("send", "own-1"),
    ]
    assert [b.arm_in_force for b in blocks(run)] == [
        "none",
        "shared",
        "own-1",
        "own-1",
        "shared#2",
        "none",
        "own-1",
    ]
    assert all(b.attested for b in blocks(run)) and [b.start for b in blocks(run)] == [
        0,
        1,
        1,
        1,
        1,
        2,
        3,
    ]
    assert [r.arms for r in run.records if isinstance(r, Start)][1] == (
        "shared",
        "own-1",
        "shared#2",
    )


def at_once(run, servers: int) -> lab.Run:
    """The run with so many servers up together."""
    found = lab.Run(
        run.profile.model_copy(
            update={"server": run.profile.server.model_copy(update={"at_once": servers})}
        ),
        run.folder,
    )
    found.__dict__["prompts"] = run.prompts
    return found


def test_starts_overlap_where_the_profile_lets_several_servers_be_up(run, monkeypatch):
    fake = Servers(monkeypatch)
    two = at_once(run, 2)
    two.measure([task("none"), task("shared"), task("own-1"), task("none", 1), task("none", 1)])
    assert sorted(fake.calls[:2]) == [("start", "none"), ("start", "shared", "own-1")]
    assert fake.calls[2:] == [
        ("send", "none"),
        ("send", "shared"),
        ("switch", "own-1"),
        ("send", "own-1"),
        ("start", "none"),
        ("send", "none"),
        ("send", "none"),
    ]
    assert [b.start for b in blocks(two)] == [0, 1, 1, 2, 2] and fake.live == 0
    assert [(r.start, r.arms[0]) for r in two.records if isinstance(r, Start)] == [
        (0, "none"),
        (1, "shared"),
        (2, "none"),
    ]


def test_a_start_that_fails_beside_another_leaves_no_server(run, monkeypatch):
    fake = Servers(monkeypatch)
    two = at_once(run, 2)

    def serve(chosen, arms, logfile, concurrency=0, locks=()):
        if arms[0].speculates:
            raise ServerFailed("the server died while starting: why")
        return fake.serve(chosen, arms, logfile)

    monkeypatch.setattr(measuring.servers, "serve", serve)
    with pytest.raises(ServerFailed, match="why"):
        two.measure([task("none"), task("shared")])
    assert fake.live == 0 and [(r.kind, r.what) for r in two.records] == [("failure", "start")]


def test_a_resumed_run_serves_what_the_first_one_did(run, monkeypatch):
    fake, planned = Servers(monkeypatch), [task("shared"), task("own-1"), task("shared#2")]
    monkeypatch.setattr(
        pool.client,
        "switch",
        lambda *_: (_ for _ in ()).throw(ServerFailed("the server did not switch to own-1: why")),
    )
    with pytest.raises(ServerFailed):
        run.measure(planned)
    failure = next(r for r in run.records if isinstance(r, Failure))
    assert (failure.arm, failure.what) == (
        "own-1",
        "block",
    ) and "did not switch to own-1: why" in failure.reason
    monkeypatch.setattr(pool.client, "switch", fake.switch)
    run.measure(planned)
    assert [call for call in fake.calls if call[0] == "start"] == [
        ("start", "shared", "own-1", "shared#2")
    ] * 2
    assert [b.arm for b in blocks(run)] == ["shared", "own-1", "shared#2"]


@pytest.mark.parametrize(
    "fault",
    [
        {"said": {"steps": 2}},
        {"said": {"arm": "shared"}},
        {"said": {"group_ranks": [0, 1]}},
        {"said": {"agreement": "off"}},
        {"counts": {"verified": {"3": 20}}},
        {"counts": {"rounds": {"draft": 5, "verify": 20}}},
    ],
)
def test_a_block_whose_server_does_or_counts_something_else_is_not_attested(
    fault, run, monkeypatch
):
    Servers(monkeypatch, **fault)
    if "counts" in fault:  # over the block, not since the start
        before = {"rounds": {}, "collectives": {}, "seconds": {}, "timed": {}, "verified": {}}
        accounts = iter([before])
        account = Servers.account
        monkeypatch.setattr(
            Servers,
            "account",
            lambda *at: {**account(*at), "counts": next(accounts, None) or account(*at)["counts"]},
        )
    run.measure([task("own-1")])
    assert [b.attested for b in blocks(run)] == [False]


def test_a_plan_of_the_whole_experiment_runs_and_passes_the_placement_check(run, monkeypatch):
    fake = Servers(monkeypatch)
    run.__dict__["prompts"] = [{"id": f"p{n}", "input_ids": [n]} for n in range(40)]
    run.measure(plans.draft_tp(run.profile, 40))
    assert (
        all(b.attested for b in blocks(run))
        and sum(call[0] == "start" for call in fake.calls) == 13
    )
    assert attestation.inactive_on(Arm.parse("own-1"), [], TP, run.profile.speculation)
    assert not list(Path(run.folder).glob("*.log"))


@pytest.mark.parametrize("refused", ["", "/start_profile was refused with HTTP 500: no"])
def test_a_trace_is_taken_around_its_requests_and_a_refusal_costs_the_trace_alone(
    run, monkeypatch, refused
):
    servers = Servers(monkeypatch)
    monkeypatch.setattr(
        pool.client,
        "start_profile",
        lambda url, folder, engine: servers.calls.append(("start_profile", folder.name)) or refused,
    )
    monkeypatch.setattr(
        pool.client, "stop_profile", lambda url: servers.calls.append(("stop_profile",)) or ""
    )
    run.measure(
        [task("own-1"), Task(Planned("draft_tp", "trace", "own-1", None, 0, (0,), 0, 0), 1, 24)]
    )
    stop = [] if refused else [("stop_profile",)]
    assert servers.calls[-2 - len(stop) :] == [("start_profile", "own-1"), ("send", "own-1"), *stop]
    blocks = [r for r in run.records if isinstance(r, Block)]
    assert [b.role for b in blocks] == ["measure", "trace"]
    assert run.verdict.arms["draft_tp"]["own-1"].blocks == 1
    assert [r.value for r in run.records if isinstance(r, Finding)] == (
        [{"why": refused}] if refused else []
    )


# ------------------------------------------------------------------ plans that depend on the log


def warmup(arm: str, group: int = 0) -> Task:
    return Task(Planned("draft_tp", "warmup", arm, None, 0, (3,), 0, group), 1, 32)


def test_a_plan_that_depends_on_the_log_is_asked_until_it_gives_no_more_and_keeps_its_server(
    run, monkeypatch
):
    fake = Servers(monkeypatch)
    whole = [task("shared"), task("own-1"), task("shared"), task("none", 1)]
    run.measure(lambda records: whole[: 1 + 2 * sum(isinstance(r, Block) for r in records)])
    assert [b.arm for b in blocks(run)] == ["shared", "own-1", "shared", "none"] and [
        b.block for b in blocks(run)
    ] == [0, 1, 2, 3]
    # The first part asked for shared alone, whose server cannot hold own-1; what the second part
    # started serves the third.
    assert [call for call in fake.calls if call[0] == "start"] == [
        ("start", "shared"),
        ("start", "shared", "own-1"),
        ("start", "none"),
    ]


def test_a_server_that_a_resumed_run_starts_again_is_warmed_up_and_no_block_is_repeated(
    run, monkeypatch
):
    Servers(monkeypatch)
    planned = [warmup("shared"), warmup("own-1"), task("shared"), task("own-1"), task("shared")]
    monkeypatch.setattr(lab.plans, "left_s", lambda *_: None)
    run.measure(planned[:3])  # as if it had been interrupted there
    run.measure(planned)
    assert [(b.role, b.arm, b.start) for b in blocks(run)] == [
        ("warmup", "shared", 0),
        ("warmup", "own-1", 0),
        ("measure", "shared", 0),
        ("warmup", "shared", 1),
        ("warmup", "own-1", 1),
        ("measure", "own-1", 1),
        ("measure", "shared", 1),
    ]


def optional(arm: str, group: int = 0) -> Task:
    return Task(
        Planned("collectives", "measure", arm, 0, 0, (0, 1), 0, group), 1, 32, optional=True
    )


def test_an_optional_arm_whose_server_fails_is_left_out_with_all_that_server_was_to_hold(
    run, monkeypatch
):
    fake = Servers(monkeypatch)
    serve = fake.serve

    @contextmanager
    def picky(chosen, arms, logfile, concurrency=0, locks=()):
        if arms[0].comm == "gloo-lo":
            raise ServerFailed("the server died while starting: it cannot")
        with serve(chosen, arms, logfile) as up:
            yield up

    monkeypatch.setattr(measuring.servers, "serve", picky)
    run.measure(
        [optional("shared+comm=gloo-lo"), optional("own-1+comm=gloo-lo"), task("shared", 1)]
    )
    failures = [r for r in run.records if isinstance(r, Failure)]
    assert [(f.arm, f.what) for f in failures] == [
        ("shared+comm=gloo-lo", "setting"),
        ("own-1+comm=gloo-lo", "setting"),
    ]
    assert "it cannot" in failures[0].reason and [b.arm for b in blocks(run)] == ["shared"]
    run.measure(
        [optional("shared+comm=gloo-lo"), optional("own-1+comm=gloo-lo"), task("shared", 1)]
    )  # resumed: not tried again
    assert len([r for r in run.records if isinstance(r, Failure)]) == 2


def test_an_optional_arm_whose_server_hangs_at_work_is_left_out_and_its_server_ended(
    run, monkeypatch
):
    fake = Servers(monkeypatch)
    send = fake.send

    def hang(url, prompts, **more):
        if fake.arms[url].comm:
            raise Hung("hung: no token for 60 s in request p0 while the server was up")
        return send(url, prompts, **more)

    monkeypatch.setattr(pool.client, "send", hang)
    run.measure([optional("shared+comm=gloo-lo"), task("shared", 1)])
    assert [b.arm for b in blocks(run)] == ["shared"] and fake.live == 0
    assert [(f.what, f.reason[:4]) for f in run.records if isinstance(f, Failure)] == [
        ("setting", "hung")
    ]


def going_on(run) -> lab.Run:
    found = lab.Run(
        run.profile.model_copy(
            update={"plan": run.profile.plan.model_copy(update={"on_failure": "go_on"})}
        ),
        run.folder,
    )
    found.__dict__["prompts"] = run.prompts
    return found


def failures(run) -> list[tuple[str, str]]:
    return [(r.arm, r.what) for r in run.records if isinstance(r, Failure)]


@pytest.mark.parametrize("policy", ["stop", "go_on"])
def test_an_arm_that_hangs_stops_the_experiment_or_is_left_out_by_the_profiles_policy(
    policy, run, monkeypatch
):
    fake, planned = (
        Servers(monkeypatch),
        [
            task("shared"),
            task("own-1"),
            task("own-1"),
            task("shared"),
        ],
    )
    send, saved = fake.send, []

    def hang(url, prompts, **more):
        if fake.arms[url].placement == "own":
            raise Hung("hung: no token for 60 s in request p0 while the server was up")
        return send(url, prompts, **more)

    monkeypatch.setattr(pool.client, "send", hang)
    monkeypatch.setattr(
        pool.stacks, "save", lambda server, log: saved.append(fake.live) or f"stacks in {log.stem}"
    )
    if policy == "stop":
        with pytest.raises(Hung):
            run.measure(planned)
        assert [b.arm for b in blocks(run)] == ["shared"] and len(fake.calls) == 3
    else:
        going_on(run).measure(planned)
        assert [(b.arm, b.start) for b in blocks(run)] == [
            ("shared", 0),
            ("shared", 1),
        ]  # on a fresh server
        going_on(run).measure(planned)  # resumed: it is not tried again
    assert failures(run) == [("own-1", "hung")] and fake.live == 0
    assert saved == [1]  # while the server was up
    reason = next(r.reason for r in run.records if isinstance(r, Failure))
    assert (
        reason.startswith("hung: no token for 60 s")
        and "(stacks in 000-shared-and-others)" in reason
    )


def test_where_the_run_goes_on_a_server_that_does_not_start_leaves_out_all_its_arms_and_no_other(
    run, monkeypatch
):
    fake = Servers(monkeypatch)

    @contextmanager
    def picky(chosen, arms, logfile, concurrency=0, locks=()):
        if arms[0].speculates:
            raise ServerFailed("the server died while starting: why")
        with fake.serve(chosen, arms, logfile) as up:
            yield up

    monkeypatch.setattr(measuring.servers, "serve", picky)
    planned = [task("none"), task("shared"), task("own-1"), task("none", 1)]
    two = going_on(at_once(run, 2))
    two.measure(planned)
    assert failures(two) == [("shared", "start"), ("own-1", "start")]
    assert [b.arm for b in blocks(two)] == ["none", "none"] and fake.live == 0


def test_where_the_run_goes_on_and_nothing_can_be_measured_it_fails(run, monkeypatch):
    Servers(monkeypatch)

    @contextmanager
    def dies(*_, **__):
        raise ServerFailed("the server died while starting: why")
        yield

    monkeypatch.setattr(measuring.servers, "serve", dies)
    with pytest.raises(ServerFailed, match="why"):
        going_on(run).measure([task("none"), task("shared")])
    assert failures(run) == [("none", "start"), ("shared", "start")]


def test_a_sweep_ends_when_its_seconds_are_spent_and_a_resumed_one_does_not_begin_again(
    tmp_path, monkeypatch
):
    made = lab.Run(profile(plan={"budget_s": 0.5}), tmp_path)
    made.__dict__["prompts"] = [{"id": f"p{n}", "input_ids": [n]} for n in range(4)]
    fake = Servers(monkeypatch)
    pairs = [
        [
            Task(Planned("steps", "search", arm, pair, place, (0, 1), 0, 0), 1, 32)
            for place, arm in enumerate(("shared", "own-1"))
        ]
        for pair in range(3)
    ]
    made.measure(lambda _: [task for pair in pairs for task in pair])
    assert [b.arm for b in blocks(made)] == [
        "shared",
        "own-1",
    ]  # a start of 1 s spent it; the pair under way was finished
    (stopped,) = [r for r in made.records if isinstance(r, Finding)]
    assert (stopped.experiment, stopped.name, stopped.value["blocks_left"]) == (
        "steps",
        "stopped",
        4,
    )
    calls = len(fake.calls)
    made.measure(lambda _: [task for pair in pairs for task in pair])
    assert len(fake.calls) == calls and len(made.records) == 4


def test_progress_says_which_block_of_how_many_and_how_long_is_left(run, monkeypatch, caplog):
    Servers(monkeypatch)
    caplog.set_level("INFO", "workbench")
    run.measure([task("shared"), task("own-1"), task("shared", 1)])
    said = [r.getMessage() for r in caplog.records if "block" in r.getMessage()]
    assert said[0] == "draft_tp: block 1 of 3 on shared"
    assert said[1] == "draft_tp: block 2 of 3 on own-1, about 5 s left"
