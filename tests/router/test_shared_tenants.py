"""SharedTenants: who was forgotten is known to all routers, and after all of them were started again."""

from __future__ import annotations

import asyncio
import fcntl
import threading
from pathlib import Path

import pytest

from common.errors import ConfigError, InvalidRequest, Unavailable
from router.shared_tenants import SharedTenants
from wire.settings import MOST_SETTINGS, NO_SETTINGS, Settings, TenantGeneration


def forget(tenants: SharedTenants, tenant: str) -> TenantGeneration:
    return asyncio.run(tenants.forget(tenant))


async def take(tenants: SharedTenants, **revisions: int) -> None:
    """Until it is in the file."""
    tenants.take(Settings(tenants={name: TenantGeneration(one, [0]) for name, one in revisions.items()}))
    assert tenants._keeper is not None
    await tenants._keeper


def test_each_forget_is_a_later_generation_and_remembers_the_older_ones() -> None:
    tenants = SharedTenants(None)
    assert tenants.generation("a") == 0
    first, second = forget(tenants, "a"), forget(tenants, "a")
    assert 0 < first.revision < second.revision == tenants.generation("a")
    assert (first.forgotten, second.forgotten) == ([0], [0, first.revision])
    assert tenants.generation("b") == 0
    for _ in range(40):
        last = forget(tenants, "a")
    assert len(last.forgotten) == 16
    assert last.forgotten == sorted(last.forgotten)
    assert last.forgotten[-1] < last.revision


def test_the_file_outlives_everybody(tmp_path: Path) -> None:
    path = tmp_path / "tenants"
    said = forget(SharedTenants(path), "a")
    again = SharedTenants(path)
    assert again.generation("a") == said.revision
    assert again.settings.tenants == {"a": said}, "the directory and the workers hear of it again"
    assert forget(again, "a").forgotten == [0, said.revision]
    assert path.stat().st_mode & 0o077 == 0


def test_processes_share_the_file(tmp_path: Path) -> None:
    path = tmp_path / "tenants"
    one, other = SharedTenants(path), SharedTenants(path)
    forget(one, "a")
    forget(other, "b")
    asyncio.run(take(other, c=7))
    assert SharedTenants(path).settings.tenants.keys() == {"a", "b", "c"}
    assert other.settings.tenants.keys() == {"a", "b", "c"}


def test_another_router_says_what_holds() -> None:
    one, other = SharedTenants(None), SharedTenants(None)
    said = forget(one, "a")
    other.take(one.settings)
    assert other.generation("a") == said.revision
    other.take(Settings(tenants={"a": TenantGeneration(3, [0])}))
    assert other.generation("a") == said.revision, "an older word changes nothing"


def test_a_file_that_cannot_be_used(tmp_path: Path) -> None:
    path = tmp_path / "tenants"
    path.write_text("[]")
    with pytest.raises(ConfigError, match="tenant_generations"):
        SharedTenants(path)
    with pytest.raises(ConfigError, match="tenants cannot be written: No such file or directory"):
        SharedTenants(tmp_path / "no" / "tenants")
    (tmp_path / "gone").mkdir()
    gone = SharedTenants(tmp_path / "gone" / "tenants")
    (tmp_path / "gone").rmdir()
    with pytest.raises(Unavailable):
        forget(gone, "a")
    assert gone.generation("a") == 0


def test_a_file_that_breaks_later_stops_nothing(tmp_path: Path) -> None:
    path = tmp_path / "tenants"
    tenants = SharedTenants(path)
    path.write_text("{broken")
    asyncio.run(take(tenants, b=5))
    assert tenants.generation("b") == 5, "what another router says holds all the same"
    with pytest.raises(Unavailable, match="cannot be read"):
        forget(tenants, "a")
    assert tenants.generation("a") == 0
    path.unlink()
    said = forget(tenants, "a")
    assert SharedTenants(path).settings.tenants == {"a": said, "b": TenantGeneration(5, [0])}


def test_a_process_that_is_stopped_with_the_lock_does_not_stop_the_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "tenants"
    tenants = SharedTenants(path)

    async def run() -> None:
        with open(f"{path}.lock", "a") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            monkeypatch.setattr("router.tenant_file._LOCK_S", 0.0)
            with pytest.raises(Unavailable, match="another process has it locked"):
                await tenants.forget("a")
            assert tenants.generation("a") == 0
            monkeypatch.setattr("router.tenant_file._LOCK_S", 30.0)
            taken = asyncio.create_task(take(tenants, b=5))
            said = asyncio.create_task(tenants.forget("a"))
            await asyncio.sleep(0)
            assert tenants.generation("b") == 5
            assert not taken.done()
            assert not said.done()
        await taken
        assert tenants.generation("a") == (await said).revision

    asyncio.run(run())
    assert SharedTenants(path).settings.tenants.keys() == {"a", "b"}


def test_a_disk_that_hangs_does_not_stop_the_router(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    goes_on, path = threading.Event(), tmp_path / "tenants"
    tenants = SharedTenants(path)
    monkeypatch.setattr("os.fsync", lambda _: goes_on.wait())
    monkeypatch.setattr("router.tenant_file._WRITE_S", 0.0)
    with pytest.raises(Unavailable, match="it hangs"):
        forget(tenants, "a")
    with pytest.raises(Unavailable, match="an earlier write has not ended"):
        forget(tenants, "a")
    goes_on.set()
    assert tenants._file is not None
    assert tenants._file._write_under_way is not None
    tenants._file._write_under_way.result(10.0)
    monkeypatch.undo()
    assert forget(tenants, "a").revision == SharedTenants(path).generation("a")


def test_no_more_are_forgotten_than_are_remembered() -> None:
    tenants = SharedTenants(None)
    flood = {f"t{number}": TenantGeneration(1, [0]) for number in range(MOST_SETTINGS)}
    tenants.take(Settings(tenants=flood))
    with pytest.raises(InvalidRequest):
        forget(tenants, "one more")
    assert forget(tenants, "t5").revision > 1


def test_a_file_that_others_have_filled_takes_no_more(tmp_path: Path) -> None:
    path = tmp_path / "tenants"
    one, other = SharedTenants(path), SharedTenants(path)
    flood = {f"t{number}": number + 1 for number in range(MOST_SETTINGS)}
    asyncio.run(take(other, **flood))
    with pytest.raises(InvalidRequest):
        forget(one, "one more")
    assert one.generation("one more") == 0


def test_an_operator_hears_whether_the_directory_knows() -> None:
    async def run() -> None:
        tenants = SharedTenants(None)
        await tenants.forget("a")
        assert not await tenants.told("a", 0.01)
        waiting = asyncio.create_task(tenants.told("a", 30.0))
        await asyncio.sleep(0)
        tenants.take(NO_SETTINGS)
        await asyncio.sleep(0)
        assert not waiting.done()
        tenants.take(tenants.settings)
        assert await waiting

    asyncio.run(run())
