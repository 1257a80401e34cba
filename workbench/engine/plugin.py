"""The SGLang plugin: called in every process of a server, it installs what the orders ask for or
ends the process.
"""

from __future__ import annotations

import logging
import multiprocessing

from workbench.engine import (
    agreement,
    arm_route,
    arm_switch,
    attest,
    counting,
    placement,
    token_ids,
    unsupported,
)
from workbench.engine.hooks import Hook, Refused, install
from workbench.engine.orders import Orders

log = logging.getLogger(__name__)


def register(role: str | None = None) -> None:
    """Entry point of the group sglang.srt.plugins. Does nothing in a server that the workbench did
    not start.

    role: launcher, scheduler or detokenizer; found out when not given. Only a scheduler runs
        models: hooking them elsewhere would import them there, some ten seconds of CPU a process.
    Raises: SystemExit with one sentence when an order cannot be carried out. Any other exception
        SGLang would only log (plugins/__init__.py:136 logger.exception) and serve unpatched.
    """
    try:
        orders = Orders.from_environment()
        if orders is None:
            return
        hooks = _argument_hooks(orders)
        if (role or _role()) == "launcher":
            hooks += (
                unsupported.argument_hooks(orders)
                + arm_route.hooks(orders)
                + token_ids.hooks()
                + (_process_hooks() if orders.cpu else [])
            )
        installed: list[str] = []
        if (role or _role()) == "scheduler":
            counters, switch = counting.counters(orders), arm_switch.Control(orders)
            hooks += (
                unsupported.hooks(orders)
                + placement.hooks(orders)
                + agreement.hooks(orders)
                + counting.hooks(orders, counters)
            )
            hooks += (
                arm_switch.hooks(orders, switch)
                + attest.hooks(orders, counters, switch, installed)
                + (_cpu_hooks() if orders.cpu else [])
            )
        installed += install(hooks)
    except Refused as refusal:
        raise SystemExit(f"draft-tp: {refusal}") from None
    except Exception as error:
        raise SystemExit(
            f"draft-tp: the orders could not be carried out ({type(error).__name__}: {error})"
        ) from error


def _role() -> str:
    """SGLang starts run_scheduler_process and run_detokenizer_process (entrypoints/engine.py) as
    processes; what is left is the launcher.
    """
    target = getattr(multiprocessing.current_process(), "_target", None)
    names = {
        "run_scheduler_process": "scheduler",
        "run_detokenizer_process": "detokenizer",
        None: "launcher",
    }
    name = getattr(target, "__name__", None)
    return names.get(name, "scheduler")  # an unknown process gets every hook rather than none


def _argument_hooks(orders: Orders) -> list[Hook]:
    """Wherever server arguments are resolved, which is in every process."""
    from workbench.engine.cpu.backend import keep_intel_amx, keep_overlap

    groups = "sglang.srt.arg_groups."
    found = (
        [
            Hook(
                groups + "overrides._attention_backend_platform_fallbacks",
                keep_intel_amx,
                ("view",),
            )
        ]
        if orders.cpu
        else []
    )
    return found + (
        [
            Hook(
                groups + "speculative_hook._disable_overlap_schedule_for_cpu",
                keep_overlap,
                ("server_args",),
            )
        ]
        if orders.overlap
        else []
    )


def _process_hooks() -> list[Hook]:
    from workbench.engine.cpu.processes import fork_children

    return [
        Hook(
            "sglang.srt.entrypoints.engine._set_envs_and_config",
            fork_children,
            ("server_args",),
            "after",
        )
    ]


def _cpu_hooks() -> list[Hook]:
    from workbench.engine.cpu import shared
    from workbench.engine.cpu.backend import (
        last_loc_in_torch,
        nothing_to_wait_for,
        spec_extras_in_torch,
    )

    def without_nccl(*args, **kwargs):
        # A CUDA build of torch brings NCCL, and the communicator then wants a GPU
        # (parallel_state.py:2185 use_pynccl).
        return args, {**kwargs, "use_pynccl": False}

    return [
        *shared.hooks(),
        Hook(
            "sglang.srt.mem_cache.allocation.get_last_loc",
            last_loc_in_torch,
            ("req_to_token", "req_pool_indices_tensor", "prefix_lens_tensor"),
        ),
        Hook(
            "sglang.srt.managers.overlap_utils.gather_spec_extras",
            spec_extras_in_torch,
            ("indices", "topk_p_buf", "topk_index_buf", "output_tokens_buf", "hidden_states_buf"),
        ),
        Hook("torch.cuda.synchronize", nothing_to_wait_for, ("device",)),
        Hook(
            "sglang.srt.distributed.parallel_state.init_model_parallel_group",
            without_nccl,
            (
                "group_ranks",
                "local_rank",
                "backend",
                "use_pynccl",
                "use_custom_allreduce",
                "use_message_queue_broadcaster",
                "group_name",
                "use_mscclpp",
                "use_torch_symm_mem_allreduce",
                "recovered_rank",
                "rank_offset",
                "max_world_size",
            ),
            "before",
        ),
    ]
