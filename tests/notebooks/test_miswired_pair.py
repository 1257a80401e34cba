"""The fault of the field report, planted: the server captures hidden states one layer off.
The notebook names wiring as the suspect.
"""

import json
import shutil

import nbformat
import pytest
import yaml
from replaying import replay

from workbench.experiment import profile
from workbench.replay import NOTEBOOKS

pytestmark = pytest.mark.engine


def test_the_notebook_names_wiring_as_the_suspect(tmp_path):
    tiny = profile.load("cpu-tiny")
    shutil.copytree(tiny.pair.draft, tmp_path / "draft")
    config = json.loads((tmp_path / "draft" / "config.json").read_text())
    trained = config["eagle_config"]["eagle_aux_hidden_state_layer_ids"]
    config["eagle_config"]["eagle_aux_hidden_state_layer_ids"] = [layer - 1 for layer in trained]
    (tmp_path / "draft" / "config.json").write_text(json.dumps(config))
    data = tiny.model_dump(mode="json")
    data["pair"] |= {"draft": str(tmp_path / "draft"), "trained_layers": trained}
    data["plan"] |= {
        "arms": ["shared"],
        "starts": 1,
        "pairs": 1,
        "blocks_per_start": 1,
        "parity_prompts": 1,
        "parity_tokens": 8,
    }
    data["name"] = "miswired"
    (tmp_path / "miswired.yaml").write_text(yaml.safe_dump(data))
    skipped = [
        word
        for notebook in NOTEBOOKS
        if notebook.name not in ("04_draft_tp", "08_report")
        for word in ("--skip", notebook.name)
    ]
    done = replay(tmp_path / "run", *skipped, profile=str(tmp_path / "miswired.yaml"))
    assert done.status == 3, done.said[-2000:]  # finished, but not valid
    cells = nbformat.read(tmp_path / "run" / "notebooks" / "04_draft_tp.ipynb", as_version=4).cells
    said = json.dumps([cell.get("outputs") for cell in cells])
    assert "The suspect is wiring" in said and "the layer below each aux layer" in said
    assert "wiring" in {reason["key"] for reason in done.verdict["reasons"]}
