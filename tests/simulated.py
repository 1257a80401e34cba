"""A simulated run for tests of tables, charts and reports: records, verdict, provenance and profile
that fit each other.
"""

from __future__ import annotations

import copy
import math
import random

from workbench.experiment.runlog import Block, Failure, Finding, Line, Request, Start

TIME = "2026-01-01T00:00:00Z"
ABOUT = "Simulated records for tests; no server was started."
SPEED = {"none": 61.0, "shared": 88.0, "shared#2": 88.0, "own-1": 93.0}
CORRECT_SHARES = (14, 17, 23, 46)  # of 100 rounds, those with 0, 1, 2, 3 correct drafts
COLLECTIVES = {
    "none": {"verify": {"all_reduce": 9, "all_gather": 1}},
    "shared": {
        "draft": {"all_reduce": 6, "all_gather": 2},
        "verify": {"all_reduce": 9, "all_gather": 1},
        "draft_extend": {"all_reduce": 3, "all_gather": 1},
    },
    "own-1": {
        "draft": {"broadcast": 1},
        "verify": {"all_reduce": 9, "all_gather": 1},
        "draft_extend": {},
    },
}

PROFILE = {
    "name": "simulated",
    "engine": "cpu",
    "about": ABOUT,
    "tp": 2,
    "pair": {"target": "fixtures/tiny/target", "draft": "fixtures/tiny/draft"},
    "speculation": {
        "algorithm": "EAGLE3",
        "steps": 3,
        "topk": 1,
        "draft_tokens": 4,
        "agreement": "broadcast",
    },
    "server": {"flags": {"dtype": "float32"}, "environment": {}},
    "workload": {
        "prompts": "fixtures/tiny/heldout.json",
        "requests_per_block": 4,
        "concurrency": 1,
        "max_new_tokens": 64,
    },
    "plan": {"arms": ["none", "shared", "own-1"], "pairs": 12, "starts": 3, "seed": 7},
}

PROVENANCE = {
    "time": TIME,
    "versions": {
        "python": "3.11.7",
        "sglang": "0.5.23",
        "torch": "2.13.0+cpu",
        "workbench": "0.1.0",
    },
    "machine": {"cpu": "simulated", "cores": 2, "gpus": []},
    "hashes": {"target": "sha256:" + "ab" * 32, "draft": "sha256:" + "cd" * 32},
    "flags": ["--tp", "2", "--dtype", "float32"],
}

ACCEPT = {
    "positions": [
        {"value": 0.86, "low": 0.838, "high": 0.882},
        {"value": 0.69, "low": 0.663, "high": 0.717},
        {"value": 0.46, "low": 0.431, "high": 0.489},
    ]
}  # with the bonus token an accept length of 3.01

VERDICT = {
    "schema": 1,
    "profile": "simulated",
    "source": "live",
    "engine": "cpu",
    "valid": True,
    "sentence": (
        "own-1 gave 1.057 times the throughput of shared (95 % interval 1.031 to 1.083, 6 starts;"
        " differences from 1.9 % up could be seen): this is a simulated run on the CPU engine,"
        " which proves function and never speed."
    ),
    "reasons": [],
    "arms": {
        "none": {
            "tokens_per_s": 61.2,
            "cycle_ms": 16.34,
            "accept_length": None,
            "accept_rate": None,
            "collectives_per_round": {"verify": 10.0},
            "collectives_by_kind": {"verify": COLLECTIVES["none"]["verify"]},
            "stage_ms": {"verify": 14.9},
            "attested": True,
        },
        "shared": {
            "tokens_per_s": 88.3,
            "cycle_ms": 34.1,
            "accept_length": 3.01,
            "accept_rate": 0.67,
            "accept": ACCEPT,
            "collectives_per_round": {"draft": 8.0, "verify": 10.0, "draft_extend": 4.0},
            "collectives_by_kind": COLLECTIVES["shared"],
            "stage_ms": {"draft": 7.2, "verify": 19.8, "draft_extend": 5.9},
            "attested": True,
        },
        "own-1": {
            "tokens_per_s": 93.3,
            "cycle_ms": 32.26,
            "accept_length": 3.01,
            "accept_rate": 0.67,
            "accept": ACCEPT,
            "collectives_per_round": {"draft": 1.0, "verify": 10.0, "draft_extend": 0.0},
            "collectives_by_kind": COLLECTIVES["own-1"],
            "stage_ms": {"draft": 6.1, "verify": 19.7, "draft_extend": 5.1},
            "attested": True,
        },
    },
    "comparisons": [
        {
            "experiment": "draft_tp",
            "a": "own-1",
            "b": "shared",
            "metric": "tokens_per_s",
            "ratio": 1.057,
            "low": 1.031,
            "high": 1.083,
            "level": 0.95,
            "starts": 6,
            "pairs": 12,
            "method": "paired",
            "resolution": 0.019,
            "valid": True,
            "reasons": [],
            "beside": {
                "ratio": 1.057,
                "low": 1.033,
                "high": 1.079,
                "level": 0.95,
                "method": "t over pairs",
                "n": 12,
            },
        },
        {
            "experiment": "draft_tp",
            "a": "own-1",
            "b": "shared",
            "metric": "cycle_ms",
            "ratio": 0.946,
            "low": 0.923,
            "high": 0.970,
            "level": 0.95,
            "starts": 6,
            "pairs": 12,
            "method": "paired",
            "resolution": 0.019,
            "valid": True,
            "reasons": [],
        },
        {
            "experiment": "baseline",
            "a": "shared",
            "b": "none",
            "metric": "tokens_per_s",
            "ratio": 1.443,
            "low": 1.302,
            "high": 1.599,
            "level": 0.95,
            "starts": 3,
            "pairs": 0,
            "method": "starts",
            "resolution": 0.11,
            "valid": True,
            "reasons": [],
        },
    ],
    "control": {
        "experiment": "draft_tp",
        "arm": "shared",
        "a": "shared",
        "b": "shared",
        "metric": "tokens_per_s",
        "ratio": 1.004,
        "low": 0.981,
        "high": 1.027,
        "level": 0.95,
        "starts": 6,
        "pairs": 12,
        "method": "paired",
        "valid": True,
        "reasons": [],
    },
    "parity": {"none": "identical", "shared": "identical", "own-1": "identical"},
}


def request(arm: str, prompt: int, begun: float, seconds: float, tokens: int = 64) -> Request:
    """One finished request. Answer and accepted drafts follow from the prompt alone, as greedy
    decoding makes them.
    """
    random_ = random.Random(prompt)
    drawn = random_.choices(range(4), CORRECT_SHARES, k=tokens // 3)
    drafts = (
        {}
        if arm == "none"
        else dict(
            verify_ct=len(drawn),
            proposed=3 * len(drawn),
            correct=sum(drawn),
            histogram=tuple(drawn.count(n) for n in range(4)),
        )
    )
    return Request(
        prompt=f"heldout-{prompt:03d}",
        prompt_tokens=32,
        completion_tokens=tokens,
        cached_tokens=0,
        finish="length",
        sent=begun,
        first=begun + 0.05,
        end=begun + seconds,
        output_ids=tuple(random_.randrange(512) for _ in range(tokens)),
        **drafts,
    )


def block(
    number: int,
    arm: str,
    pair: int | None,
    start: int,
    experiment: str = "draft_tp",
    role: str = "measure",
    position: int = 0,
    noise: float = 0.05,
) -> Block:
    """One block of four requests, its speed log-normal around the arm's; noise: standard deviation
    of a pair (or start).
    """
    # What moves a whole pair is three times what moves one block, as it is on real machines.
    together, own = (
        random.Random(seed).gauss(0, noise) for seed in (f"{pair} {start}", f"{number} {arm}")
    )
    each = 64 / (SPEED.get(arm, 90.0) * math.exp(together + own / 3))
    first = 900 if role == "warmup" else 4 * (number % 100 if pair is None else pair)
    requests = tuple(request(arm, first + n, n * each, each) for n in range(4))
    rounds = sum(r.verify_ct or r.completion_tokens for r in requests)
    collectives = COLLECTIVES.get(arm.split("#")[0], {})
    return Block(
        block=number,
        experiment=experiment,
        role=role,
        arm=arm,
        start=start,
        pair=pair,
        position=position,
        seed=7,
        time=TIME,
        seconds=4 * each,
        server=f"server-{start}",
        arm_in_force=arm,
        attested=True,
        requests=requests,
        rounds={stage: rounds for stage in collectives},
        collectives={
            stage: {kind: n * rounds for kind, n in kinds.items()}
            for stage, kinds in collectives.items()
        },
    )


def records(pairs: int = 12) -> list[Line]:
    """Two experiments: own-1 against shared by pairs in one server, with a control; shared against
    none by starts.
    """

    def start(number: int, experiment: str, *arms: str) -> Start:
        return Start(
            start=number,
            experiment=experiment,
            arms=arms,
            time=TIME,
            seconds=14.2,
            server=f"server-{number}",
            command=(
                "python",
                "-m",
                "sglang.launch_server",
                "--tp",
                "2",
                "--served-model-name",
                "tiny pair",
            ),
            environment={"SGLANG_PLUGINS": "draft_tp"},
            attestation=({"rank": 0}, {"rank": 1}),
        )

    log: list[Line] = [
        Finding(experiment="probe", name="draft_tp_option", time=TIME, value=None),
        start(0, "draft_tp", "shared", "own-1"),
    ]
    log.append(block(0, "shared", None, 0, role="warmup"))
    for pair in range(pairs):
        order = (
            ("shared", "own-1", "shared#2") if pair % 2 == 0 else ("shared#2", "own-1", "shared")
        )
        log += [block(3 * pair + n, arm, pair, 0, position=n) for n, arm in enumerate(order)]
    for number, arm in enumerate(("none", "shared", "shared", "none", "none", "shared"), 1):
        log.append(start(number, "baseline", arm))
        log += [block(100 * number + n, arm, None, number, "baseline") for n in range(3)]
    return log


def refused() -> dict:
    """The verdict of the same run with one arm that nobody attested, a control outside its noise
    and unknown numbers.
    """
    verdict = copy.deepcopy(VERDICT)
    cached = {
        "key": "cached_tokens",
        "sentence": (
            "3 measured requests were answered from the prefix cache: flush it between blocks."
        ),
    }
    attested = {
        "key": "not_attested",
        "sentence": "own-1 was not attested on rank 1: look at the first error of its log.",
    }
    verdict |= {
        "valid": False,
        "sentence": "No verdict: own-1 was not attested on every rank.",
        "reasons": [cached],
    }
    verdict["arms"]["own-1"] = {
        "attested": False,
        "tokens_per_s": None,
        "accept_length": float("nan"),
    }
    for comparison in verdict["comparisons"][:2]:
        comparison |= {
            "valid": False,
            "ratio": None,
            "low": None,
            "high": None,
            "reasons": [attested, cached],
        }
    verdict["control"] |= {
        "ratio": 1.2,
        "valid": False,
        "reasons": [{"key": "control", "sentence": "The control differs from itself."}],
    }
    verdict["parity"]["own-1"] = "not checked"
    return verdict


def failure(reason: str = "no token within 60 s") -> Failure:
    return Failure(
        experiment="draft_tp",
        arm="own-1",
        time=TIME,
        what="hung",
        reason=reason,
        log_tail=("rank 1 waits", "in all_gather"),
    )
