"""The environments: every version is pinned once, and the lock for GPUs can still be resolved."""

import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import yaml
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from workbench.engine.orders import SGLANG
from workbench.experiment.profile_sections import ROOT

OWN, TEST, GPU = "requirements.txt", "requirements-test.txt", "requirements-gpu.in"
CPU = ("requirements-cpu.txt", "requirements-cpu-nodeps.txt")
LOCK = "requirements-gpu.lock"
PYTHONS = ("3.11", "3.12", "3.13")


def requirements(path: Path) -> list[Requirement]:
    lines = (line.split(" #")[0].strip() for line in path.read_text().splitlines())
    return [Requirement(line) for line in lines if line and not line.startswith("#")]


def pins(name: str) -> dict[str, str]:
    found = {}
    for wanted in requirements(ROOT / name):
        (only,) = wanted.specifier
        assert only.operator == "==" and canonicalize_name(wanted.name) not in found, wanted
        found[canonicalize_name(wanted.name)] = only.version
    return found


def locked(path: Path) -> set[tuple[str, str, str]]:
    """Names, versions and markers, whatever their order and the comments beside them."""
    return {
        (canonicalize_name(one.name), str(one.specifier), str(one.marker or ""))
        for one in requirements(path)
    }


def uv(*words: str) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "uv", "pip", "compile", "--quiet", *words],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr


def test_every_version_is_pinned_once():
    files = [pins(name) for name in (OWN, TEST, *CPU)]
    names = [name for file in files for name in file]
    assert len(names) == len(set(names))
    assert pins(GPU)["sglang"] == pins(CPU[1])["sglang"] == SGLANG  # of the two engines


def test_the_files_are_read_where_a_user_installs_from():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    assert "dependencies" not in project["project"]  # a plugin beside a production SGLang
    assert project["tool"]["setuptools"]["dynamic"]["optional-dependencies"] == {
        "lab": {"file": [OWN]},
        "gpu": {"file": [GPU]},
    }
    conda = yaml.safe_load((ROOT / "environment.yml").read_text())["dependencies"]
    assert next(entry["pip"] for entry in conda if isinstance(entry, dict)) == [
        f"-r {LOCK}",
        "-e .",
    ]


def test_the_named_packages_are_there():
    named = "jupyterlab ipywidgets torch sglang papermill pandas altair pytest".split()
    assert set(named) <= set().union(*map(pins, (OWN, TEST, *CPU)))
    assert set(named) <= {name for name, *_ in locked(ROOT / LOCK)}


def test_the_lock_is_what_its_sources_resolve_to_today(tmp_path):
    """uv keeps the versions that the lock has where they still exist and still fit."""
    again = tmp_path / LOCK
    again.write_text((ROOT / LOCK).read_text())
    uv("--universal", "--python-version", PYTHONS[0], OWN, TEST, GPU, "-o", str(again))
    assert locked(again) == locked(ROOT / LOCK), "run make lock"


@pytest.mark.parametrize("python", PYTHONS)
def test_the_lock_can_be_installed_on_each_python_with_the_oldest_glibc(python, tmp_path):
    out = tmp_path / "out.txt"
    platform = "x86_64-manylinux_2_34"
    uv("--python-version", python, "--python-platform", platform, LOCK, "-o", str(out))
    own = {(name, f"=={version}", "") for name, version in pins(OWN).items()}
    assert own <= locked(out)
