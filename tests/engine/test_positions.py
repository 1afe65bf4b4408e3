"""Models with longrope and dynamic: tokens equal generate up to the last position that is served."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
from transformers import LlamaConfig

from common.errors import ConfigError
from engine.config import EngineConfig
from engine.loader import load_model
from tests.support.driver import Driver, open_runner
from tests.support.reference import reference_generate
from tests.support.tiny_configs import COMMON
from tests.support.tiny_models import make_tiny, write_tiny
from worker.build import build_engine
from worker.options import WorkerOptions

LIMIT = 512
OUTPUTS = 24


@pytest.fixture(scope="module")
def longrope(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny("phi3_longrope", tmp_path_factory.mktemp("tiny"), 3)


@pytest.fixture(scope="module")
def dynamic(tmp_path_factory: pytest.TempPathFactory) -> Path:
    config = LlamaConfig(
        **{**COMMON, "max_position_embeddings": LIMIT},
        rope_parameters={"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 4.0},
    )
    directory = tmp_path_factory.mktemp("dynamic")
    write_tiny(config, directory, 3)
    return directory


@pytest.mark.parametrize("kind", ["longrope", "dynamic"])
@pytest.mark.parametrize("length", [7, 100, LIMIT - OUTPUTS])
def test_tokens_equal_generate_up_to_the_limit(
    kind: str, length: int, request: pytest.FixtureRequest
) -> None:
    path: Path = request.getfixturevalue(kind)
    chosen = random.Random(length)
    prompt = [chosen.randrange(256) for _ in range(length)]
    runner, _ = open_runner(path, 16, 40)
    driver = Driver(runner, 40, 16)
    lane = driver.add(prompt)
    driver.generate([lane], OUTPUTS, chunk=60)
    runner.close()
    assert lane.outputs == reference_generate(path, prompt, OUTPUTS)[0]


@pytest.mark.parametrize("kind", ["longrope", "dynamic"])
def test_that_context_is_the_models_longest(kind: str, request: pytest.FixtureRequest) -> None:
    path: Path = request.getfixturevalue(kind)
    assert load_model(EngineConfig(str(path))).spec.max_position == LIMIT
    options = WorkerOptions(model=str(path), max_context_tokens=LIMIT + 1, max_total_tokens=2048)
    with pytest.raises(ConfigError, match="more than the model's 512 positions"):
        build_engine(options, reserves=False)
