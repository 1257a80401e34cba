"""SGLang's own choice of the static share, beside ours (workbench/predict/static_fraction.py).

Its functions are called in a process of their own, with a machine and arguments put in their place:
nothing of them is repeated here.
"""

import json
from types import SimpleNamespace

import pytest

from workbench.experiment import profile
from workbench.predict import static_fraction

pytestmark = pytest.mark.engine
KIMI = "KimiK25ForConditionalGeneration"
GIB = 1 << 30
CASES = [
    (capacity, flags, tp, architecture, vision)
    for capacity in (15, 24, 40, 80, 95, 140, 180)
    for flags, tp, architecture, vision in (
        ({}, 2, "LlamaForCausalLM", {}),
        ({"chunked-prefill-size": 2048, "cuda-graph-max-bs-decode": 32}, 8, KIMI, {"x": 1}),
        ({"disable-cuda-graph": True}, 8, KIMI, {"num_hidden_layers": 32, "hidden_size": 1280}),
        ({"cuda-graph-backend-prefill": "disabled", "max-total-tokens": 4096}, 4, KIMI, {"x": 1}),
        ({"chunked-prefill-size": -1, "moe-a2a-backend": "deepep"}, 8, "DeepseekV3ForCausalLM", {}),
    )
]
PROGRAM = """
import json
from types import SimpleNamespace as Values
from sglang.srt.arg_groups import memory_hook
from sglang.srt.arg_groups.model_overrides import qwen3_vl
from sglang.srt.configs.kimi_k25 import KimiK25VisionConfig
from sglang.srt.configs.model_config import is_multimodal_model
from sglang.srt.mem_cache.kv_cache_configurator import mm_runtime_reservation_gb

memory_hook.resolving_view = memory_hook.resolved_view = lambda arguments: arguments
memory_hook.declare_resolution = lambda arguments, _, **values: vars(arguments).update(values)
memory_hook.post_capture_kv_sizing_planned = memory_hook.attn_dp_enabled_of = lambda _: False
qwen3_vl.expand_multimodal_decode_graph_to_running_limit = lambda *_: None
memory_hook.get_platform = lambda: Values(is_xpu=False)

def phase(backend, most):
    return Values(backend="disabled" if backend else "full", max_bs=most, bs=None)

answers = []
for capacity, flags, tp, architecture, vision in json.loads(ASKED):
    off = flags.get("disable-cuda-graph", False)
    tower = KimiK25VisionConfig(**vision) if vision else None
    model = Values(is_multimodal=is_multimodal_model([architecture]),
                   hf_config=Values(vision_config=tower))
    memory_hook.get_device_memory_capacity = lambda _: capacity / (1 << 20)
    memory_hook.model_config_of = lambda _: model
    memory_hook.use_mla_backend = lambda _: architecture != "LlamaForCausalLM"
    arguments = Values(
        device="cuda", tp_size=tp, pp_size=1, mem_fraction_static=None, max_running_requests=None,
        chunked_prefill_size=flags.get("chunked-prefill-size"), max_prefill_tokens=16384,
        max_total_tokens=flags.get("max-total-tokens"), speculative_algorithm=None,
        speculative_num_draft_tokens=None, disable_cuda_graph_padding=False, model_path="a-model",
        cuda_graph_config=Values(
            decode=phase(off, flags["cuda-graph-max-bs-decode"]),
            prefill=phase(off or flags.get("cuda-graph-backend-prefill") == "disabled", None)),
        _cuda_graph_config_locked=set(), language_only=False, language_model_only=False,
        disaggregation_mode="null", moe_a2a_backend=flags.get("moe-a2a-backend", "none"),
        enable_symm_mem=False)
    memory_hook.handle_gpu_memory_settings(arguments)
    withheld = mm_runtime_reservation_gb(
        is_multimodal=model.is_multimodal, mm_feature_transport="cpu")
    answers.append([arguments.mem_fraction_static, arguments.chunked_prefill_size, withheld])
print(json.dumps(answers))
"""


def test_the_share_is_the_one_that_sglang_chooses(imported):
    chosen = profile.load("h200-x2")
    ours, asked = [], []
    for capacity, flags, tp, architecture, vision in CASES:
        most = {"cuda-graph-max-bs-decode": flags.get("cuda-graph-max-bs-decode", 4)}
        given = chosen.model_copy(
            update={
                "tp": tp,
                "server": chosen.server.model_copy(update={"flags": flags | most}),
            }
        )
        target = SimpleNamespace(
            architecture=architecture,
            vision=vision,
            mla=architecture != "LlamaForCausalLM" or None,
        )
        ours.append(
            [
                static_fraction.static_fraction(given, target, capacity * GIB),
                flags.get(
                    "chunked-prefill-size", static_fraction.prefill_tokens(given, capacity * GIB)
                ),
                static_fraction.withheld(given, target) / GIB,
            ]
        )
        asked.append((capacity * GIB, flags | most, tp, architecture, vision))
    ran = imported.run(f"ASKED = {json.dumps(asked)!r}\n{PROGRAM}")
    assert ran.status == 0, ran.err
    theirs = json.loads(ran.out.splitlines()[-1])
    assert len(theirs) == len(CASES) == 35
    for case, mine, its in zip(CASES, ours, theirs):
        assert mine == pytest.approx(its, abs=1e-12), case
