"""The swap mechanism: by class name, outermost first, in place."""

from __future__ import annotations

from torch import nn

from engine.config import EngineConfig
from engine.module_replacements import SwapTable, apply_replacements

CONFIG = EngineConfig("m")


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(2, 2)
        self.act = nn.ReLU()


def model() -> nn.Sequential:
    return nn.Sequential(Block(), nn.Sequential(Block(), nn.Linear(3, 3)))


def test_every_module_of_the_class_is_replaced_and_counted() -> None:
    swapped = model()
    table: SwapTable = {"Linear": lambda _module, _config: nn.Identity()}
    assert apply_replacements(swapped, CONFIG, table) == {"Linear": 3}
    assert not any(isinstance(module, nn.Linear) for module in swapped.modules())


def test_what_replaced_an_outer_module_is_not_searched() -> None:
    swapped = model()
    replacement = nn.Sequential(nn.Linear(2, 2))
    table: SwapTable = {
        "Block": lambda _module, _config: replacement,
        "Linear": lambda _module, _config: nn.Identity(),
    }
    assert apply_replacements(swapped, CONFIG, table) == {"Block": 2, "Linear": 1}
    assert isinstance(replacement[0], nn.Linear)


def test_none_leaves_a_module_and_goes_on_inside() -> None:
    swapped = model()
    table: SwapTable = {
        "Block": lambda _module, _config: None,
        "Linear": lambda module, _config: nn.Identity() if module.in_features == 2 else None,
    }
    assert apply_replacements(swapped, CONFIG, table) == {"Linear": 2}


def test_a_swap_sees_the_configuration() -> None:
    seen: list[EngineConfig] = []

    def swap(_module: nn.Module, config: EngineConfig) -> None:
        seen.append(config)

    apply_replacements(model(), CONFIG, {"ReLU": swap})
    assert seen == [CONFIG, CONFIG]
