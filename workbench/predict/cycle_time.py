"""The cost model: from shapes and a machine's measured inputs to the seconds of each stage of a
cycle, for every placement of the draft.

Sources of the formulas, where they are used:
- a stage takes as long as its bytes at the measured bandwidth or its operations at the measured
rate, whichever is longer (roofline: Williams, Waterman and Patterson, Communications of the ACM
52(4), 2009); how bytes become seconds: machine.Machine.read_s; a forward reads each weight once and
multiplies and adds once for each of them and each token (Pope et al., Efficiently Scaling
Transformer Inference, 2022, section 2). Attention's own operations are left out: at the contexts of
a cycle they are few beside the weights'.
- a forward makes one all-reduce for the embedding (vocab_parallel_embedding.py:533
tensor_model_parallel_all_reduce), two a layer (attention output and feed-forward: linear.py:1824
tensor_model_parallel_all_reduce; experts: models/deepseek_v2.py:1293 post_experts_all_reduce) and
one all-gather of logits (logits_processor.py:1036 _logits_gatherer), none in a group of one
(parallel_state.py:692 world_size). Counted on real servers: 3 and 1 for a draft of one layer, 9 and
1 for a target of 4.
- n steps are n - 1 draft forwards (eagle_worker_v2.py:819 speculative_num_steps) and one in
draft-extend (eagle_worker_v2.py:1211 draft_runner).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from workbench.engine import stages as stage_table
from workbench.experiment.arms import Arm
from workbench.experiment.profile import Profile
from workbench.predict import compatibility, memory
from workbench.predict.machine import Machine
from workbench.predict.model_shape import ModelShape
from workbench.predict.stage_work import Work, forward, graphs, stages


@dataclass(frozen=True)
class Cost:
    """Seconds of a stage on the slowest rank. work_s: bytes or operations, whichever take longer;
    launch_s: what launching adds to that.
    """

    bytes_s: float
    operations_s: float
    collective_s: float
    launch_s: float

    @property
    def work_s(self) -> float:
        return max(self.bytes_s, self.operations_s)

    @property
    def total_s(self) -> float:
        return self.work_s + self.collective_s + self.launch_s


@dataclass(frozen=True)
class Prediction:
    """The predicted cycle of an arm (without speculation: its step), by stage. host_s: what the
    host needs for a cycle beside the device's work, as measured elsewhere; 0 where it was not.
    """

    arm: str
    stages: dict[str, Cost]
    host_s: float = 0.0

    @property
    def draft_s(self) -> float:
        """Seconds of a cycle that drafting takes: draft, with the agreement of the ranks, and
        draft-extend.
        """
        return sum(
            self.stages[stage].total_s for stage in stage_table.DRAFTING if stage in self.stages
        )

    @property
    def device_s(self) -> float:
        """Seconds of a cycle in which the device has work."""
        return sum(cost.total_s for cost in self.stages.values())

    @property
    def cycle_s(self) -> float:
        """SGLang prepares the next cycle on the host while the device is at work on this one (its
        overlap scheduler,
        managers/scheduler.py:event_loop_overlap), so the slower of the two sets the pace."""
        return max(self.device_s, self.host_s)


def cost(profile: Profile, work: Work, machine: Machine, kernels: float | None = None) -> Cost:
    """What a stage's work costs on a machine; kernels: how many it launches, where a trace has
    counted them.

    In a graph each kernel costs its measured place in a graph and the stage one replay, no launch.
    Without graphs a GPU is launched to while it works, so launches cost only what they exceed the
    work by; on a CPU every operator is paid.
    Raises: BadInput when something of this was not measured on the machine.
    """
    graph, custom = graphs(profile), not profile.flag("disable-custom-all-reduce", False)
    count = work.kernels if kernels is None else kernels
    done = Cost(
        machine.read_s(work.bytes, work.products),
        work.operations / machine.known("matrix_ops_per_s"),
        sum(
            c.count
            * machine.collective_s(
                c.kind, c.bytes, c.ranks, graph=graph and c.kind != "broadcast", custom=custom
            )
            for c in work.collectives
        ),
        0.0,
    )
    if graph:
        launch = count * machine.known("graph_launch_s") + machine.known("graph_replay_s") * (
            count > 0
        )
    else:
        launch = count * machine.known("launch_s") - (
            done.total_s if profile.engine == "cuda" else 0.0
        )
    return replace(done, launch_s=max(0.0, launch))


def predict(
    profile: Profile,
    target: ModelShape,
    draft: ModelShape | None,
    arm: Arm,
    machine: Machine,
    *,
    context: float = 0.0,
    concurrency: int | None = None,
    kernels: Mapping[str, float] | None = None,
    host_s: float = 0.0,
) -> Prediction:
    """The cycle of an arm. Arguments as for ``stages``, ``cost`` and ``Prediction``; kernels:
    {stage: kernels a cycle} as a trace counted them.

    Raises: BadInput as ``forward`` and ``cost`` do.
    """
    works = stages(profile, target, draft, arm, context=context, concurrency=concurrency)
    costs = {
        name: cost(profile, work, machine, (kernels or {}).get(name))
        for name, work in works.items()
    }
    return Prediction(arm.name, costs, host_s)


def placements(profile: Profile, draft: ModelShape) -> tuple[Arm, ...]:
    """Shared, and own-N for every N that divides the target's ranks and the draft's heads."""
    sizes = [n for n in range(1, profile.tp + 1) if profile.tp % n == 0]
    return (
        Arm("shared"),
        *(
            Arm("own", n)
            for n in sizes
            if compatibility.heads(profile, draft, n, f"own-{n}").status != "refused"
        ),
    )


def by_placement(
    profile: Profile, target: ModelShape, draft: ModelShape, machine: Machine, **how
) -> dict[str, Prediction]:
    """{arm: its predicted cycle} for every placement; how: as for ``predict``."""
    return {
        arm.name: predict(profile, target, draft, arm, machine, **how)
        for arm in placements(profile, draft)
    }


def best(predictions: Mapping[str, Prediction]) -> Prediction:
    """The placement whose drafting takes the least time: weights read on few ranks against
    collectives saved.
    """
    return min(predictions.values(), key=lambda p: p.draft_s)


def verify_s(
    profile: Profile,
    target: ModelShape,
    machine: Machine,
    widths: Sequence[int] = tuple(range(1, 9)),
    **how,
) -> dict[int, float]:
    """{width: seconds of a verify of so many tokens a request}; width 1 is a plain step. how:
    context, concurrency.
    """
    requests, none = how.get("concurrency") or profile.workload.concurrency, Arm("none")
    kv = memory.predict(profile, target, None, none).kv * how.get("context", 0.0) * requests
    return {
        width: (
            cost(
                profile,
                forward(
                    profile,
                    target,
                    profile.tp,
                    width * requests,
                    rows=width * requests,
                    kv_bytes=kv,
                ),
                machine,
            ).total_s
        )
        for width in widths
    }
