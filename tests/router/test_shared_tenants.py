"""SharedTenants: who was forgotten is known to all routers, and after all of them were started again."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from common.errors import ConfigError, InvalidRequest, Unavailable
from router.shared_tenants import SharedTenants
from wire.settings import MOST_SETTINGS, NO_SETTINGS, Settings, TenantGeneration


def test_each_forget_is_a_later_generation_and_remembers_the_older_ones() -> None:
    tenants = SharedTenants(None)
    assert tenants.generation("a") == 0
    first, second = tenants.forget("a"), tenants.forget("a")
    assert 0 < first.revision < second.revision == tenants.generation("a")
    assert (first.forgotten, second.forgotten) == ([0], [0, first.revision])
    assert tenants.generation("b") == 0
    for _ in range(40):
        last = tenants.forget("a")
    assert len(last.forgotten) == 16
    assert last.forgotten == sorted(last.forgotten)
    assert last.forgotten[-1] < last.revision


def test_the_file_outlives_everybody(tmp_path: Path) -> None:
    path = tmp_path / "tenants"
    said = SharedTenants(path).forget("a")
    again = SharedTenants(path)
    assert again.generation("a") == said.revision
    assert again.settings.tenants == {"a": said}, "the directory and the workers hear of it again"
    assert again.forget("a").forgotten == [0, said.revision]
    assert path.stat().st_mode & 0o077 == 0


def test_processes_share_the_file(tmp_path: Path) -> None:
    path = tmp_path / "tenants"
    one, other = SharedTenants(path), SharedTenants(path)
    one.forget("a")
    other.forget("b")
    other.take(Settings(tenants={"c": TenantGeneration(7, [0])}))
    assert SharedTenants(path).settings.tenants.keys() == {"a", "b", "c"}


def test_another_router_says_what_holds() -> None:
    one, other = SharedTenants(None), SharedTenants(None)
    said = one.forget("a")
    other.take(one.settings)
    assert other.generation("a") == said.revision
    other.take(Settings(tenants={"a": TenantGeneration(3, [0])}))
    assert other.generation("a") == said.revision, "an older word changes nothing"


def test_a_file_that_cannot_be_used(tmp_path: Path) -> None:
    path = tmp_path / "tenants"
    path.write_text("[]")
    with pytest.raises(ConfigError, match="tenant_generations"):
        SharedTenants(path)
    missing = SharedTenants(tmp_path / "no" / "tenants")
    with pytest.raises(Unavailable):
        missing.forget("a")
    assert missing.generation("a") == 0


def test_no_more_are_forgotten_than_are_remembered() -> None:
    tenants = SharedTenants(None)
    flood = {f"t{number}": TenantGeneration(1, [0]) for number in range(MOST_SETTINGS)}
    tenants.take(Settings(tenants=flood))
    with pytest.raises(InvalidRequest):
        tenants.forget("one more")
    assert tenants.forget("t5").revision > 1


def test_an_operator_hears_whether_the_directory_knows() -> None:
    async def run() -> None:
        tenants = SharedTenants(None)
        tenants.forget("a")
        assert not await tenants.told("a", 0.01)
        waiting = asyncio.create_task(tenants.told("a", 30.0))
        await asyncio.sleep(0)
        tenants.take(NO_SETTINGS)
        await asyncio.sleep(0)
        assert not waiting.done()
        tenants.take(tenants.settings)
        assert await waiting

    asyncio.run(run())
