"""A server in the foreground, and the printed command in an environment like a production
SGLang's: both answer as the reference does.
"""

import os
import re
import signal
import subprocess
import sys
import time
from importlib.metadata import distribution, distributions
from pathlib import Path

import psutil
import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from serving import TOKENS, ask

from workbench import cli
from workbench.experiment import profile
from workbench.experiment.profile_sections import ROOT
from workbench.serving import client, supervisor
from workbench.serving.launch_command import free_port

pytestmark = pytest.mark.engine
NOTEBOOKS = ("jupyterlab", "ipywidgets", "ipykernel", "papermill", "altair", "nbformat", "pandas")
PROMPTS = 4


def start(command, **how) -> subprocess.Popen:
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True, **how)


def test_serve_answers_and_ends_with_ctrl_c_leaving_nothing(heldout, decoded, tmp_path):
    words = [sys.executable, "-m", "workbench.cli", "serve", "cpu-tiny", "--arm", "own-1"]
    process = start([*words, "--out", str(tmp_path / "serve.log")], cwd=ROOT)
    said, url = [], None
    while url is None and (line := process.stdout.readline()):
        said.append(line)
        url = next(iter(re.findall(r"answers at (\S+)", line)), None)
    assert url, said
    up = type("Up", (), {"url": url})
    answers = ask(up, heldout[:PROMPTS], PROMPTS, TOKENS)
    assert [a.output_ids for a in answers] == [d.output_ids for d in decoded[:PROMPTS]]
    told = client.server_info(url)["draft_tp"]
    assert [rank["placements"][0]["arm"] for rank in told["attestation"]] == ["own-1", "own-1"]
    server = told["server"]
    assert supervisor.processes(server)
    process.send_signal(signal.SIGINT)
    rest, _ = process.communicate(timeout=60)
    assert process.returncode == 0 and "ended, with all of its processes" in rest
    assert not supervisor.processes(server)


@pytest.fixture(scope="module")
def production(tmp_path_factory) -> Path:
    """A venv that holds what SGLang itself asks for, of what is installed here, and this project's
    plugin: none of the notebook packages. Returns its Python.
    """
    folder = tmp_path_factory.mktemp("production")
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", folder / "venv"], check=True)
    python = folder / "venv/bin/python"
    [site] = (folder / "venv/lib").glob("python*/site-packages")
    there = {canonicalize_name(d.metadata["Name"]): d for d in distributions()}
    # Of a published SGLang's packages the ones here are those that the CPU engine uses.
    lines = (ROOT / "requirements-cpu.txt").read_text().splitlines()
    wanted = ["sglang", *(line.split("==")[0] for line in lines if "==" in line)]
    seen = set()
    while wanted:
        name = canonicalize_name(wanted.pop())
        if name in seen or name not in there:
            continue
        seen.add(name)
        for text in there[name].requires or ():
            one = Requirement(text)
            if one.marker is None or one.marker.evaluate({"extra": ""}):
                wanted.append(one.name)
    for name in seen:
        tops = {Path(str(file)).parts[0] for file in there[name].files or ()}
        for file in tops - {"..", "__pycache__"}:
            source, link = Path(there[name].locate_file(file)), site / file
            if source.exists() and not link.exists():
                link.symlink_to(source)
    for name in ("workbench", "pyproject.toml", "README.md", "LICENSE"):
        source = ROOT / name
        (folder / "project").mkdir(exist_ok=True)
        (folder / "project" / name).symlink_to(source)
    for source in ROOT.glob("requirements*"):
        (folder / "project" / source.name).symlink_to(source)
    install = ["-m", "pip", "install", "-q", "--no-deps", "--no-build-isolation"]
    subprocess.run(
        [sys.executable, *install, "--target", site, folder / "project"],
        check=True,
        capture_output=True,
    )
    assert not {canonicalize_name(name) for name in NOTEBOOKS} & seen
    return python


def test_the_printed_command_serves_beside_a_production_sglang(
    production, heldout, decoded, tmp_path, capsys
):
    port = free_port()
    asked = ["command", "cpu-tiny", "--arm", "own-1", "-p", f"server.flags.port={port}"]
    assert cli.main(asked) == 0
    script = capsys.readouterr().out
    assert "Needs SGLang 0.5.23 and this project installed beside it" in script
    installed = next((production.parents[1] / "lib").glob("python*/site-packages"))
    script = script.replace(str(ROOT / "workbench"), str(installed / "workbench"))
    clean = {k: v for k, v in os.environ.items() if not k.startswith("DRAFT_TP")}
    clean["PATH"] = f"{production.parent}:{clean['PATH']}"
    script = re.sub(r"^python ", "exec python ", script, flags=re.M)
    with (tmp_path / "log").open("w") as log:
        process = subprocess.Popen(
            ["bash", "-c", script], cwd=tmp_path, env=clean, stdout=log, stderr=log
        )
    try:
        url, end = f"http://127.0.0.1:{port}", time.monotonic() + 180
        while not supervisor_answers(url):
            assert process.poll() is None and time.monotonic() < end, (tmp_path / "log").read_text()
            time.sleep(0.5)
        answers = ask(type("Up", (), {"url": url}), heldout[:PROMPTS], PROMPTS, TOKENS)
        assert [a.output_ids for a in answers] == [d.output_ids for d in decoded[:PROMPTS]]
        ranks = client.server_info(url)["draft_tp"]["attestation"]
        assert [rank["placements"][0]["group_ranks"] for rank in ranks] == [[0], [1]]
    finally:
        if process.poll() is None:
            for one in psutil.Process(process.pid).children(recursive=True):
                one.kill()
            process.kill()
        process.wait()


def supervisor_answers(url: str) -> bool:
    try:
        return bool(client.server_info(url)["draft_tp"])
    except Exception:
        return False


@pytest.mark.parametrize(
    ("arm", "plugin"), [("own-1", True), ("shared", False), ("none", False), ("own-2", True)]
)
def test_only_a_draft_of_its_own_needs_the_plugin_on_gpus(arm, plugin, capsys):
    words = ["command", "h200-x4", "--arm", arm, "-p", "server.flags.skip-tokenizer-init=null"]
    assert cli.main(words) == 0
    said = capsys.readouterr().out
    assert ("DRAFT_TP_ORDERS" in said) is plugin and "python -m sglang.launch_server" in said
    assert ("no plugin is needed" in said) is not plugin and '"timing": "on"' not in said


def test_lines_of_a_unit_file_keep_their_quotes(capsys):
    assert cli.main(["command", "cpu-tiny", "--arm", "own-1", "--unit"]) == 0
    said = capsys.readouterr().out.splitlines()
    [orders] = [line for line in said if line.startswith('Environment="DRAFT_TP_ORDERS=')]
    assert '\\"arms\\"' in orders and said[-1].startswith("ExecStart=python -m sglang")


@pytest.mark.parametrize("word", ["serve", "command"])
def test_an_unknown_arm_is_one_sentence(word, capsys):
    assert cli.main([word, "cpu-tiny", "--arm", "own"]) == 2
    assert "own" in capsys.readouterr().err


def test_the_plugin_has_no_dependencies():
    assert not [
        text for text in distribution("draft-tp-workbench").requires or () if "extra ==" not in text
    ]


def test_a_profile_is_checked_before_a_server_is_started(capsys, tmp_path):
    words = ["serve", "cpu-tiny", "--arm", "own-3", "--out", str(tmp_path / "log")]
    assert cli.main(words) == 2 and not (tmp_path / "log").exists()
    assert profile.load("cpu-tiny").tp == 2 and "own-3" in capsys.readouterr().err
