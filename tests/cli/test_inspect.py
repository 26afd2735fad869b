"""`forerun inspect`: the model, every effective setting, and where each was set."""

import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from forerun.config import settings
from forerun.models.architecture import Architecture
from tests.cli.running import Run

CONFIG = {
    "model_type": "llama",
    "vocab_size": 100,
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
}


@pytest.fixture(autouse=True)
def asked(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The configurations whose target was loaded."""
    configs: list[Any] = []
    decoder = SimpleNamespace(kernels=SimpleNamespace(name="reference"), context_limit=64, kv_bytes_per_token=128)
    model = SimpleNamespace(
        name="tiny",
        path=Path("tiny"),
        architecture=Architecture.from_config(CONFIG),
        decoder=decoder,
        weight_bytes=12_345_678,
        precision="fp32",
        precision_reason="It was asked for.",
        cache_precision="int8",
        device=torch.device("cpu"),
        chat_template=SimpleNamespace(source="{{ messages }}"),
    )
    monkeypatch.setattr(
        sys.modules["forerun.cli.inspect"], "load_target", lambda config: configs.append(config) or model
    )
    return configs


def test_json_holds_the_model_and_every_setting_with_its_origin(run: Run, asked: list[Any], tmp_path: Path) -> None:
    file = tmp_path / "settings.yaml"
    file.write_text("candidate_num: 5\n")
    result = run("inspect", "tiny", "--json", "--config", str(file), "--threads", "1", env={"FORERUN_MAX_BATCH": "8"})
    assert result.exit_code == 0, result.output
    shown = json.loads(result.stdout)
    assert asked[0].model == "tiny"
    assert shown["model"]["architecture"] == "llama"
    assert shown["model"]["parameters"] > 0
    assert shown["model"]["size"] == 12_345_678
    assert (shown["model"]["cache_precision"], shown["model"]["kv_bytes_per_token"]) == ("int8", 128)
    assert (shown["model"]["precision"], shown["model"]["kernels"], shown["model"]["context"]) == (
        "fp32",
        "reference",
        64,
    )
    assert shown["model"]["chat_template"] == "{{ messages }}"
    assert set(shown["settings"]) == set(settings())
    assert shown["settings"]["speculation.width"] == {"value": 5, "origin": f"{file}: candidate_num"}
    assert shown["settings"]["batching.max_batch"] == {"value": 8, "origin": "environment FORERUN_MAX_BATCH"}
    assert shown["settings"]["threads"] == {"value": 1, "origin": "flag --threads"}
    assert shown["settings"]["cache.prefix"] == {"value": True, "origin": "default"}


def test_people_get_two_tables(run: Run) -> None:
    result = run("inspect", "tiny", "--num-drafts", "5", env={"COLUMNS": "150"})
    assert result.exit_code == 0, result.output
    for text in ("llama", "12 MB", "reference", "speculation.width", "flag --num-drafts", "default"):
        assert text in result.stdout


def test_the_model_may_be_named_by_flag_but_not_twice_differently(run: Run, asked: list[Any]) -> None:
    assert run("inspect", "-m", "tiny").exit_code == 0
    assert run("inspect", "tiny", "-m", "tiny").exit_code == 0
    result = run("inspect", "tiny", "-m", "other")
    assert (result.exit_code, "given twice" in result.stderr) == (2, True)
    assert [config.model for config in asked] == ["tiny", "tiny"]
