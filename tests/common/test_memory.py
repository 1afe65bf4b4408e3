"""Free memory, within the limits of control groups. The system's files are those of a folder."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest

from common.errors import ConfigError
from common.memory import available_memory

FREE = 1 << 30
KIB = 1024


def system(root: Path, groups: str, files: Mapping[str, object], meminfo: str = "") -> Path:
    """A host on which `FREE` bytes are free; `files` are in /sys/fs/cgroup."""
    told = {
        "proc/meminfo": meminfo or f"MemTotal: 9999999 kB\nMemAvailable: {FREE // KIB} kB\n",
        "proc/self/cgroup": groups,
        **{f"sys/fs/cgroup/{name}": text for name, text in files.items()},
    }
    for name, text in told.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(f"{text}\n")
    return root


def v2(folder: str, limit: int | str, used: int = 300, cached: int = 0) -> dict[str, object]:
    return {
        f"{folder}memory.max": limit,
        f"{folder}memory.current": used,
        f"{folder}memory.stat": f"anon {used - cached}\nactive_file {cached}\ninactive_file 0",
    }


def v1(folder: str, limit: int, used: int = 300, cached: int = 0) -> dict[str, object]:
    return {
        f"memory/{folder}memory.limit_in_bytes": limit,
        f"memory/{folder}memory.usage_in_bytes": used,
        f"memory/{folder}memory.stat": f"active_file 7\ntotal_active_file 0\ntotal_inactive_file {cached}",
    }


BY_V1 = "5:cpu,cpuacct:/elsewhere\n4:cpuset,memory:/docker/one\n0::/"


@pytest.mark.parametrize(
    ("groups", "files", "left"),
    [
        ("0::/", {}, FREE),
        ("0::/", v2("", "max"), FREE),
        ("0::/", v2("", 2 * FREE), FREE),
        ("0::/", v2("", 1000), 700),
        ("0::/", v2("", 1000, cached=200), 900),
        ("0::/", v2("", 1000, used=1001), 0),
        ("0::/pod/one", v2("pod/one/", "max") | v2("pod/", 1000) | v2("", "max"), 700),
        ("0::/pod/one", v2("pod/one/", 1000) | v2("pod/", 900), 600),
        ("0::/host/sees/it", v2("", 1000), 700),
        ("0::/../../other", v2("", 1000), 700),
        (BY_V1, v1("docker/one/", 1000), 700),
        (BY_V1, v1("docker/one/", 1000, cached=200), 900),
        (BY_V1, v1("", 1000), 700),
        (BY_V1, v1("docker/one/", (1 << 63) - 4096), FREE),
        (BY_V1, v1("elsewhere/", 1000), FREE),
    ],
)
def test_every_limit_above_the_process_counts(
    tmp_path: Path, groups: str, files: dict[str, object], left: int
) -> None:
    assert available_memory(system(tmp_path, groups, files)) == left


def test_a_kernel_without_control_groups(tmp_path: Path) -> None:
    root = system(tmp_path, "", {})
    (root / "proc/self/cgroup").unlink()
    assert available_memory(root) == FREE


def test_a_system_that_does_not_say_what_is_free(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="free memory is unknown"):
        available_memory(system(tmp_path, "0::/", {}, meminfo="MemTotal: 1 kB"))


def test_this_machine_has_some() -> None:
    assert available_memory() > 1 << 20
