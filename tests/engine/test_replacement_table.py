"""Module replacement: by class name, outermost first, in place."""

from __future__ import annotations

from torch import nn

from engine.config import EngineConfig
from engine.replacement_table import ReplacementTable, apply_replacements

CONFIG = EngineConfig("m")


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(2, 2)
        self.act = nn.ReLU()


def model() -> nn.Sequential:
    return nn.Sequential(Block(), nn.Sequential(Block(), nn.Linear(3, 3)))


def test_every_module_of_the_class_is_replaced_and_counted() -> None:
    replaced = model()
    table: ReplacementTable = {"Linear": lambda _module, _config: nn.Identity()}
    assert apply_replacements(replaced, CONFIG, table) == {"Linear": 3}
    assert not any(isinstance(module, nn.Linear) for module in replaced.modules())


def test_what_replaced_an_outer_module_is_not_searched() -> None:
    replaced = model()
    replacement = nn.Sequential(nn.Linear(2, 2))
    table: ReplacementTable = {
        "Block": lambda _module, _config: replacement,
        "Linear": lambda _module, _config: nn.Identity(),
    }
    assert apply_replacements(replaced, CONFIG, table) == {"Block": 2, "Linear": 1}
    assert isinstance(replacement[0], nn.Linear)


def test_none_leaves_a_module_and_goes_on_inside() -> None:
    replaced = model()
    table: ReplacementTable = {
        "Block": lambda _module, _config: None,
        "Linear": lambda module, _config: nn.Identity() if module.in_features == 2 else None,
    }
    assert apply_replacements(replaced, CONFIG, table) == {"Linear": 2}


def test_a_replacement_function_gets_the_configuration() -> None:
    seen: list[EngineConfig] = []

    def keep(_module: nn.Module, config: EngineConfig) -> None:
        seen.append(config)

    apply_replacements(model(), CONFIG, {"ReLU": keep})
    assert seen == [CONFIG, CONFIG]
