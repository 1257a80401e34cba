"""The import stand-ins: SGLang imports with nothing else, what is used raises by its name, and
their signatures are SGLang's.
"""

import ast
import importlib.util
import inspect
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from workbench.engine.cpu import attention, cache, paths, tree
from workbench.engine.cpu.backend import keep_intel_amx

STAND_INS = Path(paths.__file__).parent / "stand_ins"
SGLANG = Path(importlib.util.find_spec("sglang").origin).parent


def python(code: str, *folders: str) -> str:
    """What a fresh Python prints with those folders in front of its path."""
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(folders),
        "SGLANG_USE_CPU_ENGINE": "1",
        "TORCHDYNAMO_DISABLE": "1",
    }
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def error_of(statement: str, *folders: str) -> str:
    code = (
        f"try:\n    {statement}\nexcept Exception as error:\n    print(f'{{type(error).__name__}}:"
        " {error}')"
    )
    return python(code, *folders).strip()


def fake(folder: Path, package: str) -> str:
    (folder / package).mkdir(parents=True)
    (folder / package / "__init__.py").write_text("")
    return str(folder)


NATIVE = """
import sys, torch
import sglang.srt.entrypoints.http_server, sglang.launch_server
from sglang.srt.utils import common
from sglang.srt.distributed.device_communicators import custom_all_reduce_ops
from sglang.srt.mem_cache import embedding_cache_controller
from sglang.srt.layers.attention.intel_amx_backend import IntelAMXAttnBackend
from sglang.srt.speculative import eagle_worker_v2
print(
    common.cpu_has_amx_support(),
    common._is_intel_amx_backend_available(),
    hasattr(torch.ops.sgl_kernel, "convert_weight_packed"),
    hasattr(torch.ops.sgl_kernel, "extend_attention_cpu"),
    custom_all_reduce_ops.IS_CUSTOM_AR_AVAILABLE,
    embedding_cache_controller.transfer_embedding_ranges_direct,
    "jsonschema" in sys.modules,
    "rfc3987_syntax.syntax_helpers" in sys.modules,
)
from workbench.engine.cpu.backend import last_loc_in_torch
table = torch.tensor([[5, 6, 7], [8, 9, 4]], dtype=torch.int32)
print(last_loc_in_torch(None, table, torch.tensor([1, 0, 1]), torch.tensor([2, 3, 0])).tolist())
"""


def test_sglang_imports_with_the_stand_ins_and_takes_its_native_paths(imported):
    ran = imported.run(NATIVE)
    assert ran.status == 0, ran.err
    said = ["False False False True False None True False", "[9, 7, -1]"]
    assert ran.out.splitlines()[-2:] == said


def test_what_sgl_kernel_has_not_is_missing_by_name():
    sgl_kernel = str(STAND_INS / "sgl_kernel")
    assert error_of("from sgl_kernel import convert_weight_packed", sgl_kernel).startswith(
        "ImportError: cannot import name 'convert_weight_packed' from 'sgl_kernel'"
    )
    assert (
        error_of("import sgl_kernel.allreduce", sgl_kernel)
        == "ModuleNotFoundError: No module named 'sgl_kernel.allreduce'"
    )
    assert error_of(
        "import torch, sgl_kernel; torch.ops.sgl_kernel.rmsnorm_cpu", sgl_kernel
    ).startswith("AttributeError")


KERNEL = (
    "import triton, triton.language as tl\n@triton.jit(do_not_specialize=['n'])\ndef double(x, n:"
    " tl.constexpr): pass\n"
)


def test_triton_kernels_can_be_defined_and_not_launched():
    code = (
        KERNEL + "from triton.language.extra import"
        " libdevice\n@triton.autotune(configs=[triton.Config({'B': 1}, num_warps=4)],"
        " key=['n'])\n@triton.heuristics({'B': lambda arguments: 1})\n@triton.jit\ndef tuned(x,"
        " n): tl.load(x)\nclass Derived(triton.runtime.jit.KernelInterface):"
        " pass\nprint(tl.constexpr(7).value, triton.cdiv(7, 2), [triton.next_power_of_2(n) for n"
        " in (1, 2, 3, 8, 9)])\nfor use in (lambda: double[(1,)](None, 1), lambda: tuned(None,"
        " 1), lambda: tl.load(0), Derived,\n            lambda: libdevice.tanh(1), lambda:"
        " tl.math.exp(1)):\n    try: use()\n    except RuntimeError as error: print(error)\n"
    )
    assert python(code, str(STAND_INS / "triton")).splitlines() == [
        "7 4 [1, 2, 4, 8, 16]",
        "the triton kernel __main__.double has no CPU stand-in",
        "the triton kernel __main__.tuned has no CPU stand-in",
        "triton.language.load has no CPU stand-in",
        "triton.runtime.jit.KernelInterface has no CPU stand-in",
        "triton.language.extra.libdevice.tanh has no CPU stand-in",
        "triton.language.math.exp has no CPU stand-in",
    ]


def test_probes_of_a_stand_in_find_nothing():
    triton = str(STAND_INS / "triton")
    assert error_of("import triton.knobs", triton).startswith("ModuleNotFoundError")
    assert (
        python(
            "import inspect, triton; print(inspect.unwrap(triton.jit(len)).__name__,"
            " hasattr(triton, 'knobs'))",
            triton,
        )
        == "the triton kernel builtins.len False\n"
    )


def test_torchvision_can_be_imported_and_not_used():
    torchvision = str(STAND_INS / "torchvision")
    imports = (
        "from torchvision.transforms import InterpolationMode; from torchvision.io import"
        " decode_image as use"
    )
    raised = error_of(imports + "; by_mode = {InterpolationMode.BICUBIC: 1}; use(b'')", torchvision)
    assert raised == "RuntimeError: torchvision.io.decode_image has no CPU stand-in"


def test_python_path_stands_in_for_what_is_not_installed(tmp_path, monkeypatch):
    real = fake(tmp_path, "triton")
    names = lambda: [Path(folder).relative_to(STAND_INS).name for folder in paths.python_path()]
    elsewhere = [
        entry
        for entry in sys.path
        if not (Path(entry) / "triton").exists() and not (Path(entry) / "torchvision").exists()
    ]
    monkeypatch.setattr(sys, "path", elsewhere)
    assert names() == ["sgl_kernel", "rfc3987_syntax", "triton", "torchvision"]
    monkeypatch.setattr(sys, "path", [*paths.python_path(), *elsewhere])
    assert names() == [
        "sgl_kernel",
        "rfc3987_syntax",
        "triton",
        "torchvision",
    ], "a stand-in is no real package"
    monkeypatch.setattr(sys, "path", [*paths.python_path(), *elsewhere, real])
    assert names() == ["sgl_kernel", "rfc3987_syntax", "torchvision"]


def test_each_folder_holds_one_package():
    assert {
        folder.name: [p.name for p in folder.iterdir()]
        for folder in STAND_INS.iterdir()
        if folder.is_dir()
    } == {name: [name] for name in ("sgl_kernel", "rfc3987_syntax", "triton", "torchvision")}


def test_python_path_imports_no_torch():
    code = (
        "import sys; from workbench.engine.cpu.paths import python_path; python_path();"
        " print('torch' in sys.modules)"
    )
    assert python(code) == "False\n"


@pytest.mark.parametrize(
    "device, backend, changes",
    [
        ("cpu", "intel_amx", {}),
        ("cpu", "other", {"attention_backend": "torch_native"}),
        ("xpu", "intel_amx", {"attention_backend": "torch_native"}),
    ],
)
def test_only_intel_amx_on_the_cpu_is_kept(device, backend, changes):
    view = SimpleNamespace(device=device, attention_backend=backend)
    assert keep_intel_amx(lambda _: {"attention_backend": "torch_native"}, view) == changes


# ---------------------------------------------------------------- the contract with SGLang's own
# source

SERVED = {
    name: function
    for module in (attention, cache, tree)
    for name, function in vars(module).items()
    if name.endswith("_cpu")
}
NOT_SERVED = {"sgl_kernel.mamba"}  # linear attention: its models are not served


@pytest.fixture(scope="module")
def sources() -> list[tuple[Path, ast.Module]]:
    """SGLang's modules that name sgl_kernel and the CPU, parsed."""
    texts = {
        path: path.read_text()
        for part in ("srt", "kernels")
        for path in (SGLANG / part).rglob("*.py")
    }
    return [
        (path, ast.parse(text))
        for path, text in texts.items()
        if "sgl_kernel" in text and "_cpu" in text
    ]


def for_cpu_alone(module: ast.AST):
    """Imports from sgl_kernel in the body of an ``if _is_cpu`` or ``elif is_cpu()`` without a
    further condition.
    """
    for branch in ast.walk(module):
        if isinstance(branch, ast.If) and ast.unparse(branch.test) in ("_is_cpu", "is_cpu()"):
            yield from (
                s
                for s in branch.body
                if isinstance(s, ast.ImportFrom) and s.module.startswith("sgl_kernel")
            )


def test_every_function_that_sglang_imports_for_the_cpu_is_served(sources):
    imports = [
        statement
        for _, module in sources
        for statement in for_cpu_alone(module)
        if statement.module not in NOT_SERVED
    ]
    wanted = {alias.name for statement in imports for alias in statement.names}
    assert len(wanted) >= 9 and wanted <= set(SERVED)


def test_every_call_of_sglang_fits_the_signature(sources):
    """Also those through other names: ``import ... as``, and the attributes in which
    intel_amx_backend keeps its functions.
    """
    fitted = set()
    for path, module in sources:
        imports = [
            s
            for s in ast.walk(module)
            if isinstance(s, ast.ImportFrom) and s.module == "sgl_kernel"
        ]
        alias = {
            name.asname or name.name: name.name for statement in imports for name in statement.names
        }
        if path.name == "intel_amx_backend.py":
            alias |= {
                "self.decode_attention_fwd": "decode_attention_cpu",
                "self.extend_attention_fwd": "extend_attention_cpu",
                "self.build_draft_decode_metadata": "build_draft_decode_metadata_cpu",
            }
        for call in (node for node in ast.walk(module) if isinstance(node, ast.Call)):
            name = alias.get(ast.unparse(call.func))
            if name in SERVED:
                inspect.signature(SERVED[name]).bind(
                    *call.args, **{keyword.arg: keyword.value for keyword in call.keywords}
                )
                fitted.add(name)
    assert fitted == set(SERVED)
