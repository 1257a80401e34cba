"""The shipped pairs are what their cards say: sizes, configuration, prompts and figures."""

import bisect
import json

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoConfig, AutoTokenizer

from fixtures.training import card, heldout, pairs, text
from workbench.answers.offline_decoder import total_histogram
from workbench.answers.reference_models import Reference, hidden_state_indices
from workbench.experiment.profile_sections import ROOT

PAIRS = {"tiny": 3.0, "tiny-kimi": 2.8}  # the accept length each is promised to reach at 3 steps
SLOW = {
    "tiny-kimi"
}  # experts decode so slowly here that the controls are left to the card's own measurement


@pytest.fixture(scope="module", params=PAIRS)
def recipe(request) -> pairs.Recipe:
    return pairs.RECIPES[request.param]


@pytest.fixture(scope="module")
def figures(recipe) -> dict:
    return json.loads((recipe.folder / "figures.json").read_text())


@pytest.fixture(scope="module")
def prompts(recipe) -> list[dict]:
    return json.loads((recipe.folder / "heldout.json").read_text())


def test_a_pair_is_small_enough_to_travel(recipe, figures):
    assert recipe.folder == ROOT / "fixtures" / recipe.name
    sizes = {
        file: file.stat().st_size
        for part in ("target", "draft")
        for file in (recipe.folder / part).iterdir()
    }
    assert sum(sizes.values()) == figures["bytes"] <= 20e6
    assert max(sizes.values()) < 8e6


def test_card_words_the_figures_and_nothing_else(recipe, figures):
    assert (recipe.folder / "README.md").read_text() == card.render(figures)


def test_training_kept_its_time(figures):
    # two threads for twenty minutes are 2400 s of CPU time, however busy the machine was
    assert figures["training"]["threads"] == 2 and 60 < figures["training"]["cpu_seconds"] < 2400


@pytest.mark.parametrize(
    "recipe",
    # Experts decode slowly; their reference is held against servers in tests/engine.
    ["tiny", pytest.param("tiny-kimi", marks=pytest.mark.long)],
    indirect=True,
)
def test_card_figures_are_what_the_reference_gives(recipe, figures, prompts):
    reference = Reference.load(recipe.folder / "target", recipe.folder / "draft")
    first, gap = figures["first"], heldout.GAP * 0.9  # a tenth for another CPU's rounding
    ids = [prompt["input_ids"] for prompt in prompts[: first["prompts"]]]
    by_steps = {steps: reference.decode(ids, heldout.NEW_TOKENS, steps) for steps in (3, 5)}
    assert first["prompts"] == 32
    assert first["histogram"] == {
        str(steps): list(total_histogram(decoded)) for steps, decoded in by_steps.items()
    }
    for kind in ("target_gap", "draft_gap"):
        assert (
            min(getattr(d, kind) for d in by_steps[5]) == pytest.approx(first[kind], abs=1e-4)
            and first[kind] >= gap
        )
    for name, control in card.broken(reference, recipe).items():
        if "off by one" in name and recipe.name not in SLOW:
            assert (
                list(total_histogram(control.decode(ids, heldout.NEW_TOKENS, 3)))
                == figures["controls"][name]["first_histogram"]
            )
    assert figures["parameters"]["target"] == sum(p.numel() for p in reference.target.parameters())


def test_controls_are_worse_and_no_histogram_hides_a_fault(figures):
    good, unrolled = figures["accept_length"]["3"], figures["controls"]["trained without unrolling"]
    assert good >= PAIRS[figures["name"]] and figures["accept_length"]["5"] > good
    assert unrolled["accept_length"] < good - 0.3
    assert figures["controls"]["all features zeroed"]["accept_length"] < good - 0.8
    for control in figures["controls"].values():
        assert control["first_histogram"] != figures["first"]["histogram"]["3"]
        assert control["accept_length"] < good


def test_target_and_draft_fit_tp_1_2_and_4(recipe):
    target = AutoConfig.from_pretrained(recipe.folder / "target")
    draft = json.loads((recipe.folder / "draft" / "config.json").read_text())
    for size in (
        target.num_attention_heads,
        target.num_key_value_heads,
        draft["num_attention_heads"],
        draft["num_key_value_heads"],
    ):
        assert size % 4 == 0
    for vocabulary in (target.vocab_size, draft["vocab_size"], draft["draft_vocab_size"]):
        assert vocabulary % (64 * 4) == 0
    assert (draft["hidden_size"], draft["vocab_size"]) == (target.hidden_size, target.vocab_size)
    assert target.intermediate_size % 4 == draft["intermediate_size"] % 4 == 0


def test_draft_reads_the_layers_it_was_trained_on(recipe):
    draft = json.loads((recipe.folder / "draft" / "config.json").read_text())
    target = AutoConfig.from_pretrained(recipe.folder / "target")
    ids = tuple(draft["eagle_config"]["eagle_aux_hidden_state_layer_ids"])
    assert ids == recipe.aux_layers
    assert hidden_state_indices(target.architectures[0], ids) == recipe.hidden_layers
    weights = load_file(recipe.folder / "draft" / "model.safetensors")
    assert weights["fc.weight"].shape == (target.hidden_size, len(ids) * target.hidden_size)


def test_draft_vocabulary_maps_into_the_targets(recipe):
    weights = load_file(recipe.folder / "draft" / "model.safetensors")
    config = json.loads((recipe.folder / "draft" / "config.json").read_text())
    ids = weights["d2t"] + torch.arange(config["draft_vocab_size"])
    assert config["draft_vocab_size"] < config["vocab_size"]
    assert weights["lm_head.weight"].shape[0] == config["draft_vocab_size"]
    assert (
        ids.tolist() == sorted(set(ids.tolist())) and 0 <= ids[0] and ids[-1] < config["vocab_size"]
    )
    assert weights["t2d"].nonzero().flatten().tolist() == ids.tolist()


def test_heldout_prompts_are_many_distinct_mixed_and_of_the_tokenizer(recipe, prompts):
    assert len(prompts) >= 200
    assert (
        len({prompt["id"] for prompt in prompts})
        == len({tuple(prompt["input_ids"]) for prompt in prompts})
        == len(prompts)
    )
    assert {prompt["id"].split("-")[0] for prompt in prompts[:32]} == set(text.KINDS)
    assert {len(prompt["input_ids"]) for prompt in prompts[:32]} == set(heldout.LENGTHS)
    tokenizer = AutoTokenizer.from_pretrained(recipe.folder / "target")
    assert tokenizer([prompt["text"] for prompt in prompts])["input_ids"] == [
        prompt["input_ids"] for prompt in prompts
    ]


def test_no_heldout_prompt_begins_a_training_document(prompts):
    documents = sorted(pairs.training_documents())
    for prompt in prompts:
        nearest = bisect.bisect_left(documents, prompt["text"])
        assert nearest == len(documents) or not documents[nearest].startswith(prompt["text"])


def test_text_of_a_seed_is_repeatable_and_of_its_own():
    assert text.documents(7, 30) == text.documents(7, 30)
    assert text.documents(7, 30) != text.documents(8, 30)
