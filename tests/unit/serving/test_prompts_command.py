"""workbench prompts: chats, ShareGPT and texts as token ids of the target, and what is no such
file.
"""

import json
from pathlib import Path
from types import SimpleNamespace

import kimi_folders
import pytest
from transformers import AutoTokenizer

from workbench import cli
from workbench.experiment import profile, prompt_source
from workbench.experiment.errors import BadInput
from workbench.experiment.profile_sections import ROOT
from workbench.predict import preflight
from workbench.serving import tokenizing

TARGET = ROOT / "fixtures/tiny/target"
TEMPLATE = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
CHATS = [
    {"messages": [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "One?"}]},
    {"messages": [{"role": "user", "content": [{"type": "text", "text": "Two?"}]}]},
    {
        "messages": [
            {"role": "user", "content": "Three?"},
            {"role": "assistant", "content": "Four."},
            {"role": "user", "content": "Five?"},
            {"role": "assistant", "content": "Six."},
        ]
    },
]
SHARED = [
    {"conversations": [{"from": "human", "value": "One?"}, {"from": "gpt", "value": "Two."}]},
    {"conversations": [{"from": "human", "value": "Three?"}]},
]


@pytest.fixture(autouse=True)
def in_this_process(request, monkeypatch):
    """The child's work without its import of transformers, four seconds; the first test and the one
    of a folder's own code start a real one.
    """
    if request.function in (
        test_chats_go_through_the_template_up_to_their_last_question,
        test_a_tokenizer_of_own_code_is_run_only_where_it_is_trusted,
    ):
        return

    def run(command, input, **_):
        answer = json.dumps(tokenizing._answer(json.loads(input)))
        return SimpleNamespace(stdout=answer, stderr="")

    monkeypatch.setattr(tokenizing, "subprocess", SimpleNamespace(run=run))


def lines(entries: list) -> str:
    return "\n".join(json.dumps(entry) for entry in entries)


def made(tmp_path: Path, text: str | bytes, *words: str, name: str = "source") -> list[dict]:
    source, out = tmp_path / name, tmp_path / "out.json"
    source.write_bytes(text if isinstance(text, bytes) else text.encode())
    command = ["prompts", str(source), "--target", str(TARGET), "--out", str(out), *words]
    assert cli.main(command) == 0
    return json.loads(out.read_text())


@pytest.fixture()
def template(tmp_path) -> list[str]:
    file = tmp_path / "chat.jinja"
    file.write_text(TEMPLATE)
    return ["--chat-template", str(file)]


def test_chats_go_through_the_template_up_to_their_last_question(tmp_path, template, capsys):
    found = made(tmp_path, "\ufeff" + lines([*CHATS, CHATS[0]]), *template)
    tokenizer = AutoTokenizer.from_pretrained(TARGET)
    tokenizer.chat_template = TEMPLATE
    expected = [
        "<system>Be brief.\n<user>One?\n<assistant>",
        "<user>Two?\n<assistant>",
        "<user>Three?\n<assistant>Four.\n<user>Five?\n<assistant>",
    ]
    ids = [tokenizer(text, add_special_tokens=False)["input_ids"] for text in expected]
    assert [p["input_ids"] for p in found] == ids
    assert "3 prompts of" in (said := capsys.readouterr().out) and "1 were repeats" in said


@pytest.mark.parametrize("form", [lines, json.dumps])
def test_sharegpt_is_read_as_a_list_and_by_lines(form, tmp_path):
    source = tmp_path / "shared"
    source.write_text(form(SHARED))
    assert [s.messages for s in prompt_source.read(source)] == [
        (("user", "One?"),),
        (("user", "Three?"),),
    ]


def test_texts_are_a_prompt_a_paragraph(tmp_path):
    source = tmp_path / "texts"
    source.write_text("The first.\nIts second line.\n\nThe second.\n\n\n\nThe first.\n")
    found = [s.text for s in prompt_source.read(source)]
    assert found == ["The first.\nIts second line.", "The second.", "The first."]


def test_the_file_that_was_made_of_texts_passes_the_check(tmp_path, capsys):
    texts = [f"The number {n} is followed by {n + 1}." for n in range(20)]
    found = made(tmp_path, "\n\n".join([*texts, "long " * 90]), "--max-tokens", "60")
    tokenizer = AutoTokenizer.from_pretrained(TARGET)
    assert [p["input_ids"] for p in found] == [tokenizer(text)["input_ids"] for text in texts]
    assert "1 too long or equal as tokens" in capsys.readouterr().out
    chosen = profile.load("cpu-tiny", {"prompts": str(tmp_path / "out.json")})
    [check] = [c for c in preflight.check(chosen) if c.name == "workload.prompts"]
    assert check.status == "passed" and "20 of" in check.detail


def test_a_split_is_by_content_and_holds_for_another_file(tmp_path):
    texts = [f"Text number {n} of them." for n in range(60)]
    sources = [prompt_source.Source("", text=text) for text in texts]
    kept, rest = prompt_source.split(sources, 0.25, 0)
    assert 5 <= len(kept) <= 25 and len(kept) + len(rest) == 60
    again, _ = prompt_source.split(sources[::-2], 0.25, 0)
    assert {s.text for s in again} == {s.text for s in kept} & {s.text for s in sources[::-2]}
    other, _ = prompt_source.split(sources, 0.25, 1)
    assert {s.text for s in other} != {s.text for s in kept}
    few = made(tmp_path, "\n\n".join(texts), "--held-out", "0.25", "--count", "3")
    tokenizer = AutoTokenizer.from_pretrained(TARGET)
    assert [p["input_ids"] for p in few] == [tokenizer(s.text)["input_ids"] for s in kept[:3]]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "holds no prompts"),
        (b"\xff\xfe\x00h", "is not UTF-8"),
        ('{"messages": [}', "has no JSON object in line 1"),
        (lines(CHATS) + "\n{broken", "has no JSON object in line 4"),
        ("[1, 2", "is no JSON list"),
        ("[1, 2]", "entry 1 is no chat"),
        ('{"messages": "hello"}', "line 1 is no list of turns"),
        ('{"messages": [{"role": "user", "content": 7}]}', "without content in words"),
        ('{"messages": [{"role": "ghost", "content": "boo"}]}', "turn of 'ghost'"),
        ('{"messages": [{"role": "assistant", "content": "boo"}]}', "asks nothing"),
        ('{"conversations": [{"from": "gpt", "value": "boo"}]}', "asks nothing"),
        ('[{"id": "a", "input_ids": [1]}]', "holds token ids already"),
        (lines(CHATS), "its tokenizer has no chat template"),
    ],
)
def test_what_is_no_source_is_named_with_its_line(text, said, tmp_path, capsys):
    source = tmp_path / "source.jsonl"
    source.write_bytes(text if isinstance(text, bytes) else text.encode())
    words = ["prompts", str(source), "--target", str(TARGET), "--out", str(tmp_path / "out.json")]
    assert cli.main(words) == 2
    told = capsys.readouterr().err
    assert said in told and not (tmp_path / "out.json").exists()
    assert "source.jsonl" in told or "chat template" in told


@pytest.mark.parametrize("words", [["--held-out", "0"], ["--held-out", "2"], ["--max-tokens", "1"]])
def test_a_share_or_a_length_that_leaves_nothing_is_refused(words, tmp_path, capsys):
    source = tmp_path / "source"
    source.write_text("some text of several tokens")
    out = ["--out", str(tmp_path / "out.json")]
    assert cli.main(["prompts", str(source), "--target", str(TARGET), *out, *words]) == 2
    assert words[0] in capsys.readouterr().err and not (tmp_path / "out.json").exists()


@pytest.mark.parametrize(
    ("words", "field"),
    [(["--chat-template", "none.jinja"], "--chat-template"), (["--out", "none/x.json"], "--out")],
)
def test_a_file_that_cannot_be_read_or_written_is_one_sentence(words, field, tmp_path, capsys):
    source = tmp_path / "source"
    source.write_text("some text")
    given = [word if word.startswith("--") else str(tmp_path / word) for word in words]
    out = ["--out", str(tmp_path / "out.json")]
    assert cli.main(["prompts", str(source), "--target", str(TARGET), *out, *given]) == 2
    assert capsys.readouterr().err.startswith(f"workbench: {field}: ")


def test_a_tokenizer_of_own_code_is_run_only_where_it_is_trusted(tmp_path, capsys):
    folder, source = kimi_folders.published(tmp_path / "kimi", headers=False), tmp_path / "s"
    source.write_text("text")
    words = ["prompts", str(source), "--target", str(folder), "--out", str(tmp_path / "out.json")]
    assert cli.main(words) == 2
    assert "read that code, then add --trust-remote-code" in capsys.readouterr().err
    assert cli.main([*words, "--trust-remote-code"]) == 2  # it is run, and raises
    assert "code of the model folder ran" in capsys.readouterr().err


def test_a_missing_source_and_a_missing_target(tmp_path):
    with pytest.raises(BadInput, match="cannot be read"):
        prompt_source.read(tmp_path / "none.jsonl")
    source = tmp_path / "s"
    source.write_text("text")
    out = ["--out", str(tmp_path / "out.json")]
    assert cli.main(["prompts", str(source), "--target", str(tmp_path / "no"), *out]) == 2
