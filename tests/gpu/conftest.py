"""Tests on a GPU (`make gpu`). Without one each of them skips, with the reason."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from common.errors import ConfigError
from tests.engine.conftest import drawn as drawn
from worker.device import choose_device

HERE = Path(__file__).parent


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.path.is_relative_to(HERE):
            item.add_marker(pytest.mark.gpu)


@pytest.fixture(scope="session")
def device() -> str:
    """The first GPU."""
    try:
        return str(choose_device("cuda"))
    except ConfigError as error:
        pytest.skip(f"no GPU: {error.problem}")


@pytest.fixture(autouse=True)
def _exact_convolutions(device: str) -> Iterator[None]:
    """float32 convolutions in float32: cuDNN's default is TF32, and the oracle is exact."""
    before = torch.backends.cudnn.allow_tf32
    torch.backends.cudnn.allow_tf32 = False
    yield
    torch.backends.cudnn.allow_tf32 = before
