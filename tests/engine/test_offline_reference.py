"""The server's histogram of correct drafts equals the offline reference's: what finds a wiring fault that accept length hides."""
import pytest
from serving import ask, histogram, serving

from workbench import reference


@pytest.mark.engine
@pytest.mark.parametrize(("arm", "tp"), [("shared", 1), ("shared", 2), ("own-1", 2)])
def test_histogram_of_32_heldout_prompts(arm, tp, tiny, heldout, decoded, logfolder):
    with serving(tiny.model_copy(update={"tp": tp}), arm, logfolder) as up:
        answers = ask(up, heldout[:32])
    assert [a.output_ids for a in answers] == [d.output_ids for d in decoded]
    assert [a.histogram + (0,) * (4 - len(a.histogram)) for a in answers] == [d.histogram for d in decoded]
    assert histogram(answers) == reference.total_histogram(decoded)


def test_aux_layers_off_by_one_change_the_histogram(tiny, heldout, decoded):
    trained = reference.Draft.load(tiny.pair.draft).layer_ids
    wrong = reference.decode(tiny.pair.target, tiny.pair.draft, [p["input_ids"] for p in heldout[:32]], 64, 3, [i - 1 for i in trained])
    assert reference.total_histogram(wrong) != reference.total_histogram(decoded)
    assert [w.output_ids for w in wrong] == [d.output_ids for d in decoded]       # tokens hide it: verification repairs every draft
