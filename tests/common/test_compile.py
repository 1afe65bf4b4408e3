from __future__ import annotations

import ctypes
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from common.compile import BuildError, Sources, build


@pytest.fixture
def sources(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Sources:
    """Two units and a header; `sum_two.cpp` needs the flag that its last word brings."""
    monkeypatch.setenv("BATON_CACHE_DIR", str(tmp_path / "cache"))
    header = tmp_path / "one.h"
    header.write_text("int one();\n")
    (tmp_path / "one.cpp").write_text("int one() { return 1; }\n")
    (tmp_path / "sum_two.cpp").write_text('#include "one.h"\nextern "C" int sum() { return one() + TWO; }\n')
    units = sorted(tmp_path.glob("*.cpp"))
    return Sources("sum", units, [header], ["-std=c++17", "-fPIC"], {"two": ["-DTWO=2"]})


def test_callers_at_once_get_one_whole_library(sources: Sources) -> None:
    with ThreadPoolExecutor(4) as pool:
        paths = set(pool.map(build, [sources] * 4))
    (path,) = paths
    assert ctypes.CDLL(str(path)).sum() == 3
    assert sorted(made.name for made in path.parent.iterdir()) == sorted([path.name, "build.lock"])


def test_what_has_changed_is_another_library(sources: Sources) -> None:
    before = build(sources)
    sources.headers[0].write_text("int one();  // changed\n")
    assert build(sources) != before
    assert before.exists()


def test_the_reason_is_in_the_error(sources: Sources, monkeypatch: pytest.MonkeyPatch) -> None:
    sources.units[0].write_text("int one() { return nonsense; }\n")
    with pytest.raises(BuildError, match="nonsense"):
        build(sources)
    monkeypatch.setenv("PATH", "")
    monkeypatch.delenv("CXX", raising=False)
    with pytest.raises(BuildError, match="no C\\+\\+ compiler"):
        build(sources)


def test_a_cache_that_cannot_be_used(
    sources: Sources, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "cache").write_text("a file")
    with pytest.raises(BuildError, match="cannot be used"):
        build(sources)
    monkeypatch.setenv("BATON_CACHE_DIR", str(tmp_path / ("x" * 300)))  # not even to be looked at
    with pytest.raises(BuildError, match="cannot be used"):
        build(sources)


def test_a_user_without_a_home(sources: Sources, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("BATON_CACHE_DIR", "XDG_CACHE_HOME", "HOME"):
        monkeypatch.delenv(name, raising=False)

    def unknown(_: int) -> None:
        raise KeyError

    monkeypatch.setattr("pwd.getpwuid", unknown)
    with pytest.raises(BuildError, match="BATON_CACHE_DIR"):
        build(sources)
