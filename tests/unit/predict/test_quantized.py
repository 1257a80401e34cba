"""Quantized model folders: complete or not, how large, how many products, and what cannot serve
them.
"""

import json
from pathlib import Path

import kimi_folders
import pytest
from safetensors.torch import load_file, save_file

from workbench.experiment import profile
from workbench.experiment.profile_sections import ROOT
from workbench.predict import memory, model_shape, preflight, quantized, stage_work

TINY = ROOT / "fixtures/tiny-kimi"
KINDS = {"int4": kimi_folders.INT4, "fp8": kimi_folders.FP8, "awq": kimi_folders.AWQ}
# Scales, packed words and zero points, each the first of its kind in an expert.
PIECES = [
    ("int4", "down_proj.weight_packed"),
    ("int4", "gate_proj.weight_scale"),
    ("int4", "up_proj.weight_shape"),
    ("fp8", "down_proj.weight_scale_inv"),
    ("fp8", "gate_proj.weight"),
    ("awq", "down_proj.qweight"),
    ("awq", "gate_proj.qzeros"),
    ("awq", "up_proj.scales"),
]
EXPERT = "model.layers.1.mlp.experts.0."


@pytest.fixture(scope="module")
def folders(tmp_path_factory) -> dict[str, Path]:
    made = tmp_path_factory.mktemp("quantized")
    return {
        kind: kimi_folders.quantized(TINY / "target", made / kind, quantization)
        for kind, quantization in KINDS.items()
    }


def read(folder: Path) -> model_shape.ModelShape:
    return model_shape.read(folder, "pair.target")


def gpus(target: Path, **flags) -> profile.Profile:
    given = {"target": str(target), "draft": str(TINY / "draft"), "prompts": "random"}
    chosen = profile.load("h200-x2-kimi-mini", given)
    kept = {k: v for k, v in chosen.flags.items() if not k.endswith("load-format")}
    kept["context-length"] = 1024
    server = chosen.server.model_copy(update={"flags": kept | flags, "environment": {}})
    return chosen.model_copy(update={"server": server})


def changed(source: Path, out: Path, change) -> Path:
    out.mkdir()
    (out / "config.json").write_text((source / "config.json").read_text())
    tensors = load_file(source / "model.safetensors")
    change(tensors)
    save_file(tensors, out / "model.safetensors")
    return out


@pytest.mark.parametrize("kind", KINDS)
def test_a_complete_folder_passes_on_gpus_and_is_refused_on_the_cpu_engine(kind, folders):
    checks = preflight.check(gpus(folders[kind]), free_bytes=140 << 30)
    [stored] = [c for c in checks if c.name == "pair.target"]
    assert stored.status == "passed" and KINDS[kind]["quant_method"] in stored.detail
    assert not [c for c in checks if c.status == "refused"]
    cpu = profile.load("cpu-tiny-kimi", {"target": str(folders[kind])})
    [refusal] = [c for c in preflight.check(cpu) if c.status == "refused"]
    assert refusal.name == "pair.target.quantization_config"
    assert "the CPU engine serves unquantized weights in float32 alone" in refusal.detail


@pytest.mark.parametrize(("kind", "piece"), PIECES)
def test_a_piece_that_is_not_there_is_named(kind, piece, folders, tmp_path):
    broken = changed(folders[kind], tmp_path / "x", lambda held: held.pop(EXPERT + piece))
    check = quantized.complete(read(broken), "")
    name = model_shape.canonical(EXPERT + piece)
    assert check.status == "refused" and f"lack {name}" in check.detail


@pytest.mark.parametrize(("kind", "piece"), [p for p in PIECES if "shape" not in p[1]])
def test_a_piece_of_another_shape_is_named(kind, piece, folders, tmp_path):
    def cut(held):
        held[EXPERT + piece] = held[EXPERT + piece][:-1].clone()

    check = quantized.complete(read(changed(folders[kind], tmp_path / "x", cut)), "")
    assert check.status == "refused" and "where config.json implies" in check.detail


@pytest.mark.parametrize(
    "missing", ["model.norm.weight", "model.layers.2.mlp.gate.weight", "lm_head.weight"]
)
def test_a_plain_weight_of_a_quantized_folder_is_missed_too(missing, folders, tmp_path):
    broken = changed(folders["int4"], tmp_path / "x", lambda held: held.pop(missing))
    assert quantized.complete(read(broken), "").status == "refused"


def test_a_format_that_is_not_known_is_not_said_to_be_complete(folders, tmp_path):
    other = changed(folders["int4"], tmp_path / "x", lambda held: None)
    config = json.loads((other / "config.json").read_text())
    config["quantization_config"] |= {"format": "nvfp4-pack-quantized"}
    (other / "config.json").write_text(json.dumps(config))
    check = quantized.complete(read(other), "")
    assert check.status == "warned" and "not checked" in check.detail


@pytest.mark.parametrize("kind", KINDS)
def test_the_configuration_alone_gives_the_size_of_the_files(kind, folders, tmp_path):
    bare = tmp_path / "bare"
    bare.mkdir()
    (bare / "config.json").write_text((folders[kind] / "config.json").read_text())
    stored, implied = (
        memory.weight_bytes(gpus(folder), read(folder), 2) for folder in (folders[kind], bare)
    )
    assert implied == pytest.approx(stored, rel=0.002)


@pytest.mark.parametrize("kind", KINDS)
def test_scales_are_no_products_and_packed_words_are_the_weights_they_hold(kind, folders):
    plain, packed = (
        stage_work.forward(gpus(folder), read(folder), 2, 4, rows=4)
        for folder in (TINY / "target", folders[kind])
    )
    assert packed.products == plain.products
    assert packed.operations == pytest.approx(plain.operations)
    assert packed.bytes < plain.bytes


@pytest.mark.parametrize(
    ("flags", "status", "said"),
    [
        ({"quantization": "fp8"}, "warned", "quantized while it loads"),
        ({"quantization": "compressed-tensors"}, "refused", "that is unquantized"),
        ({"quantization": "awq"}, "refused", "that is unquantized"),
        ({"quantization": "fp8", "speculative-draft-model-quantization": "unquant"}, None, ""),
        ({"quantization": "unquant"}, None, ""),
        ({}, None, ""),
    ],
)
def test_what_a_flag_makes_of_an_unquantized_draft(flags, status, said):
    shape = model_shape.read(TINY / "draft", "pair.draft")
    found = list(quantized.served(gpus(TINY / "target", **flags), shape))
    assert [c.status for c in found] == ([status] if status else [])
    for check in found:
        assert said in check.detail and "speculative-draft-model-quantization" in check.mend
