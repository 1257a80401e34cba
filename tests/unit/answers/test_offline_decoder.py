"""The offline reference against a slow, obvious decoder, against hand-counted rounds, and against
faults it must show.
"""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from workbench.answers.offline_decoder import accept_length, decode, diagnose, total_histogram
from workbench.answers.reference_models import (
    Decoded,
    Reference,
    count_rounds,
    hidden_state_indices,
)
from workbench.experiment.errors import BadInput
from workbench.experiment.profile_sections import ROOT

PAIRS = {"tiny": 3.0, "tiny-kimi": 2.8}  # the accept length each is promised to reach at 3 steps
PROMPTS, FEW = 12, 4  # few show a fault as well as many do


def heldout(pair: str, count: int) -> list[list[int]]:
    return [
        prompt["input_ids"]
        for prompt in json.loads((ROOT / "fixtures" / pair / "heldout.json").read_text())[:count]
    ]


@pytest.fixture(scope="module", params=PAIRS)
def pair(request) -> str:
    return request.param


@pytest.fixture(scope="module")
def reference(pair) -> Reference:
    return Reference.load(ROOT / "fixtures" / pair / "target", ROOT / "fixtures" / pair / "draft")


@pytest.fixture(scope="module")
def decoded(pair, reference) -> list[Decoded]:
    return reference.decode(heldout(pair, PROMPTS), 64, 3)


# --- the slow decoder: one sequence, one token, one head at a time, everything recomputed each
# round ---------------------------


def rotated(vector: torch.Tensor, position: int, theta: float) -> torch.Tensor:
    half = len(vector) // 2
    out = vector.clone()
    for i in range(half):
        angle = torch.tensor(position * theta ** (-i / half))
        out[i] = vector[i] * angle.cos() - vector[i + half] * angle.sin()
        out[i + half] = vector[i + half] * angle.cos() + vector[i] * angle.sin()
    return out


def normed(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return weight * x / (x.pow(2).mean() + 1e-5).sqrt()


def draft_token(
    w: dict, config: dict, embedding: torch.Tensor, hidden: torch.Tensor, position: int, kept: list
) -> tuple[torch.Tensor, torch.Tensor]:
    """One token through the draft's layer, appended to ``kept`` (position by position); the hidden
    state and the logits.
    """
    size, theta = config["head_dim"], config["rope_theta"]
    x = torch.cat(
        [
            normed(embedding, w["midlayer.input_layernorm.weight"]),
            normed(hidden, w["midlayer.hidden_norm.weight"]),
        ]
    )
    q, k, v = ((w[f"midlayer.self_attn.{n}_proj.weight"] @ x).split(size) for n in "qkv")
    kept.append(([rotated(head, position, theta) for head in k], v))
    heads = []
    for number, query in enumerate(q):
        group = number * len(k) // len(q)
        query = rotated(query, position, theta)
        weights = torch.stack([query @ keys[group] / size**0.5 for keys, _ in kept]).softmax(0)
        heads.append(sum(weight * values[group] for weight, (_, values) in zip(weights, kept)))
    hidden = hidden + w["midlayer.self_attn.o_proj.weight"] @ torch.cat(heads)
    x = normed(hidden, w["midlayer.post_attention_layernorm.weight"])
    gate, up = w["midlayer.mlp.gate_proj.weight"] @ x, w["midlayer.mlp.up_proj.weight"] @ x
    hidden = hidden + w["midlayer.mlp.down_proj.weight"] @ (gate * gate.sigmoid() * up)
    return hidden, w["lm_head.weight"] @ normed(hidden, w["norm.weight"])


@torch.no_grad()
def slowly(
    reference: Reference, folder: Path, prompt: list[int], max_new_tokens: int, steps: int
) -> tuple[list[int], list[int]]:
    config = json.loads((folder / "config.json").read_text())
    w = {name: tensor.float() for name, tensor in load_file(folder / "model.safetensors").items()}
    table = reference.target.get_input_embeddings().weight

    def target(tokens: list[int]):
        return reference.target(
            input_ids=torch.tensor([tokens]), output_hidden_states=True, use_cache=False
        )

    captured = {"tiny": (2, 3, 5), "tiny-kimi": (2, 3, 4)}[folder.parent.name]
    ids, histogram = list(prompt), [0] * (steps + 1)
    ids.append(target(ids).logits[0, -1].argmax().item())
    while len(ids) < len(prompt) + max_new_tokens:
        states = target(ids[:-1]).hidden_states
        kept, drafts = [], []
        for position in range(len(ids) - 1):
            feature = torch.cat([states[layer][0, position] for layer in captured])
            hidden, logits = draft_token(
                w, config, table[ids[position + 1]], w["fc.weight"] @ feature, position, kept
            )
        for step in range(steps):
            choice = logits.argmax().item()
            drafts.append(choice + int(w["d2t"][choice]))
            hidden, logits = draft_token(
                w, config, table[drafts[-1]], hidden, len(ids) - 1 + step, kept
            )
        verified = target(ids + drafts).logits[0, len(ids) - 1 :].argmax(-1).tolist()
        correct = next((n for n in range(steps) if drafts[n] != verified[n]), steps)
        histogram[correct] += 1
        ids += verified[: correct + 1]
    return ids[len(prompt) :][:max_new_tokens], histogram


def test_slow_decoder_gives_the_same_tokens_and_rounds(pair, reference):
    for prompt, steps in zip(heldout(pair, 2), (3, 2)):
        fast = reference.decode([prompt], 10, steps)[0]
        assert (list(fast.output_ids), list(fast.histogram)) == slowly(
            reference, ROOT / "fixtures" / pair / "draft", prompt, 10, steps
        )


# --- the shipped pairs
# ----------------------------------------------------------------------


def test_accept_length_and_every_round_is_counted(pair, decoded):
    assert accept_length(total_histogram(decoded)) >= PAIRS[pair]
    for one in decoded:
        yielded = 1 + sum((correct + 1) * rounds for correct, rounds in enumerate(one.histogram))
        assert len(one.output_ids) == 64 and 64 <= yielded <= 64 + 3


def test_prompts_decode_alike_alone_and_together(pair, reference, decoded):
    again = reference.decode([heldout(pair, PROMPTS)[n] for n in (7, 2)], 64, 3)
    assert [(d.output_ids, d.histogram) for d in again] == [
        (decoded[n].output_ids, decoded[n].histogram) for n in (7, 2)
    ]


def test_shifted_aux_layers_change_the_histogram_and_no_token(pair, decoded):
    ids, folder = {"tiny": (0, 1, 3), "tiny-kimi": (3, 4, 5)}[pair], ROOT / "fixtures" / pair
    wrong = decode(folder / "target", folder / "draft", heldout(pair, FEW), 64, 3, aux_layers=ids)
    assert [d.output_ids for d in decoded[:FEW]] == [d.output_ids for d in wrong]
    assert total_histogram(decoded[:FEW]) != total_histogram(wrong)


def test_zeroed_features_collapse_the_accept_length(pair, reference, decoded):
    weights = {
        **reference.draft.weights,
        "fc.weight": torch.zeros_like(reference.draft.weights["fc.weight"]),
    }
    blind = replace(reference, draft=replace(reference.draft, weights=weights))
    blinded = accept_length(total_histogram(blind.decode(heldout(pair, FEW), 64, 3)))
    assert blinded < accept_length(total_histogram(decoded[:FEW])) - 0.8


# --- counting and rules, by hand
# ----------------------------------------------------------------------


def test_rounds_counted_by_hand():
    ids = [5, 6, 10, 11, 12, 13, 14, 15]  # two prompt tokens, then six
    wrong = [0, 0]
    chains = [wrong, [11, 12], wrong, wrong, [14, 15], wrong, wrong]
    # 10 comes from the prefill; the chain of position 1 is right twice: 11 12 and the bonus 13;
    # that of position 4 is right twice
    assert count_rounds(ids, 2, 6, chains) == (0, 0, 2)
    assert count_rounds(ids, 2, 5, chains) == (
        0,
        0,
        2,
    )  # cut after 14, the last round counts in full
    assert count_rounds(ids, 2, 4, chains) == (0, 0, 1)  # exactly full after one round
    assert count_rounds(ids, 2, 1, chains) == (0, 0, 0)  # the prefill's token alone: no round
    assert count_rounds(ids, 2, 3, [wrong] * 7) == (2, 0, 0)
    assert count_rounds(ids, 2, 3, [wrong, [11, 0], *[wrong] * 5]) == (0, 1, 0)
    assert count_rounds(ids, 2, 2, [wrong, [0, 12], *[wrong] * 5]) == (
        1,
        0,
        0,
    )  # right after a wrong one counts for nothing


def test_captured_layers_by_sglangs_rules():
    assert hidden_state_indices("LlamaForCausalLM", (1, 2, 4)) == (2, 3, 5)
    assert hidden_state_indices("LlamaForCausalLM", (4, 1, 2)) == (2, 3, 5)
    assert hidden_state_indices("DeepseekV3ForCausalLM", (2, 3, 4)) == (2, 3, 4)
    assert hidden_state_indices("DeepseekV3ForCausalLM", (1, 2, 3)) == (2, 3, 4)
    assert hidden_state_indices("DeepseekV3ForCausalLM", (2, 1, 3)) == (1, 2, 3)


def test_diagnosis_in_words():
    right, shifted = (5, 4, 3, 20), (6, 5, 3, 18)
    known = {"the layers below": shifted, "zeroed features": (30, 2, 0, 0)}
    assert "wired as its config says" in diagnose(right, right, known)
    assert "wired as its config says" in diagnose(
        (5, 4), (5, 4, 0, 0), known
    )  # SGLang leaves trailing zeros out
    assert "wiring: " in diagnose(shifted, right, known) and "the layers below" in diagnose(
        shifted, right, known
    )
    assert "zeroed features" in diagnose((30, 2), right, known)
    unknown = diagnose((1, 1, 1, 29), right, known)
    assert "wiring: " in unknown and "the layers below" not in unknown and "known fault" in unknown
    assert "no verify round" in diagnose((), right, known)


# --- what cannot be decoded
# ----------------------------------------------------------------------


@pytest.fixture
def copied_draft(tmp_path):
    """A copy of tiny's draft with changed weights and configuration."""

    def copy(weights=lambda w: w, **config) -> Path:
        source = ROOT / "fixtures" / "tiny" / "draft"
        save_file(weights(load_file(source / "model.safetensors")), tmp_path / "model.safetensors")
        (tmp_path / "config.json").write_text(
            json.dumps(json.loads((source / "config.json").read_text()) | config)
        )
        return tmp_path

    return copy


@pytest.mark.parametrize(
    "fault, names",
    [
        (
            {"weights": lambda w: w | {"d2t": w["d2t"] + torch.arange(len(w["d2t"]))}},
            "d2t",
        ),  # ids where offsets belong
        (
            {"weights": lambda w: w | {"fc.weight": w["fc.weight"][:, :256].contiguous()}},
            "aux layers",
        ),
        ({"weights": lambda w: {n: t for n, t in w.items() if n != "lm_head.weight"}}, "head"),
        ({"architectures": ["LlamaForCausalLM"]}, "pair.draft"),
        ({"num_hidden_layers": 2}, "pair.draft"),
        ({"hidden_size": 64}, "hidden size"),
        ({"norm_output": True}, "norm_output"),
        (
            {"eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, 2, 5]}},
            "aux layers",
        ),  # the last layer's output is never captured
    ],
)
def test_a_pair_that_cannot_be_decoded_is_refused(copied_draft, fault, names):
    with pytest.raises(BadInput, match=names):
        Reference.load(ROOT / "fixtures" / "tiny" / "target", copied_draft(**fault))


def test_missing_folders_and_empty_prompts_are_refused(tmp_path):
    tiny = ROOT / "fixtures" / "tiny"
    with pytest.raises(BadInput, match="pair.target"):
        Reference.load(tmp_path, tiny / "draft")
    with pytest.raises(BadInput, match="pair.draft"):
        Reference.load(tiny / "target", tmp_path)
    with pytest.raises(BadInput, match="workload"):
        decode(tiny / "target", tiny / "draft", [[0, 5], []], 4, 3)
