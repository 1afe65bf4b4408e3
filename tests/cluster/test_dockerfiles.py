"""deploy/docker/: the stages, the user and the health check of each image, and what pip installs in it."""

from __future__ import annotations

import io
import json
import re
import shlex
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest
from dockerfile_parse import DockerfileParser
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

from cluster.cli import parser_for
from cluster.config import OBJECT_STORE_BYTES

ROOT = Path(__file__).parents[2]
DOCKER = ROOT / "deploy" / "docker"
IMAGES = ("cpu", "cuda")
PROJECT: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def instructions(image: str) -> list[tuple[str, str]]:
    """Instructions and their values, continued lines joined, without comments."""
    parser = DockerfileParser(fileobj=io.BytesIO((DOCKER / f"{image}.Dockerfile").read_bytes()))
    found = [(entry["instruction"], entry["value"]) for entry in parser.structure]
    return [(name, value) for name, value in found if name != "COMMENT"]


def stages(image: str) -> list[list[tuple[str, str]]]:
    """The instructions of each stage, FROM first."""
    found: list[list[tuple[str, str]]] = []
    for name, value in instructions(image):
        if name == "FROM":
            found.append([])
        if found:
            found[-1].append((name, value))
    return found


def only(stage: list[tuple[str, str]], name: str) -> str:
    (value,) = (value for found, value in stage if found == name)
    return value


def pins(path: Path) -> dict[str, Version]:
    lines = [line for line in path.read_text().splitlines() if line and not line.startswith("#")]
    pairs = [line.split("==") for line in lines]
    return {canonicalize_name(name): Version(version) for name, version in pairs}


def requirements(image: str) -> list[str]:
    """What the image must have: the project's dependencies and the extras that it installs."""
    extras = {"cpu": ("cpu",), "cuda": ("gpu", "cloud")}[image]
    return PROJECT["dependencies"] + [
        line for extra in extras for line in PROJECT["optional-dependencies"][extra]
    ]


@pytest.mark.parametrize("image", IMAGES)
def test_compilers_caches_and_sources_stay_in_the_build_stage(image: str) -> None:
    base, build, final = stages(image)
    assert re.fullmatch(r"[a-z/]+:\d[\w.]*-[\w.-]+ AS base", base[0][1]), "a version, not latest"
    assert build[0][1] == "base AS build"
    assert final[0][1] == "base"
    copied = [value for name, value in final if name == "COPY"]
    assert copied == ["--from=build /opt/baton /opt/baton", "deploy /opt/baton/deploy"]


@pytest.mark.parametrize("image", IMAGES)
def test_the_user_is_not_root_and_owns_the_model_cache(image: str) -> None:
    *_, final = stages(image)
    assert only(final, "USER") == "1000"
    assert "useradd --uid 1000 --create-home baton" in only(final, "RUN")
    assert "--owner=baton /models " in only(final, "RUN")
    assert only(final, "VOLUME") == "/models"


@pytest.mark.parametrize("image", IMAGES)
def test_the_health_check_asks_a_route_of_the_router(image: str) -> None:
    *_, final = stages(image)
    check = only(final, "HEALTHCHECK")
    command = json.loads(check.partition("CMD ")[2])
    assert "wget" in stages(image)[0][1][1], "the base installs it"
    port, path = re.fullmatch(r"http://127\.0\.0\.1:(\d+)(/.*)", command[-1]).groups()  # type: ignore[union-attr]
    assert f'("GET", "{path}")' in (ROOT / "router" / "api" / "app.py").read_text()
    assert port == only(final, "EXPOSE")


@pytest.mark.parametrize("image", IMAGES)
def test_the_command_is_one_that_baton_knows(image: str) -> None:
    *_, final = stages(image)
    program, *arguments = json.loads(only(final, "CMD"))
    assert program == "baton"
    parsed = parser_for(arguments).parse_args(arguments)
    assert (ROOT / Path(parsed.target).relative_to("/opt/baton")).is_file()
    assert parsed.host == "0.0.0.0", "a port that is published is not on the container's loopback"


@pytest.mark.parametrize("image", IMAGES)
def test_the_command_in_the_first_lines_gives_ray_its_shared_memory(image: str) -> None:
    lines = (DOCKER / f"{image}.Dockerfile").read_text().partition("FROM ")[0]
    _, run = " ".join(lines.replace("\\\n#", "").split()).split("docker run ")
    (size,) = re.findall(r"--shm-size=(\d+)m ", run.partition("baton serve")[0])
    assert int(size) << 20 > OBJECT_STORE_BYTES


@pytest.mark.parametrize("image", IMAGES)
def test_the_kernels_are_compiled_into_the_image(image: str) -> None:
    base, build, _ = stages(image)
    commands = [value for name, value in build if name == "RUN"]
    built = ("engine.cpu", "kvcache.native", "router.index.native")
    assert commands[-1] == " && ".join(f"python -m {package}.build" for package in built)
    assert "BATON_CACHE_DIR=/opt/baton/cache" in only(base, "ENV")


def test_the_cuda_image_has_every_requirement() -> None:
    ours, shared = pins(DOCKER / "cuda.lock"), pins(ROOT / "requirements.lock")
    for line in requirements("cuda"):
        wanted = Requirement(line)
        assert ours[canonicalize_name(wanted.name)] in wanted.specifier, wanted.name
    differ = {name for name in ours.keys() & shared.keys() if ours[name] != shared[name]}
    assert differ <= {"python-dateutil"}, "the versions that the tests run with (boto3 needs an older one)"


def test_what_pip_reads_is_in_the_repository() -> None:
    for image in IMAGES:
        for command in pip_installs(image):
            for flag in ("--constraint", "--requirement"):
                if flag in command:
                    name = command[command.index(flag) + 1]
                    assert (ROOT / name).is_file() or (DOCKER / name).is_file()


@pytest.mark.e2e
@pytest.mark.parametrize(("image", "python"), [("cpu", "3.11"), ("cuda", "3.12")])
def test_pip_finds_what_the_image_installs(image: str, python: str, tmp_path: Path) -> None:
    wanted = tmp_path / "wanted.txt"
    wanted.write_text("\n".join(requirements(image)))
    constraints = tmp_path / "constraints.txt"
    lock = ROOT / "requirements.lock" if image == "cpu" else DOCKER / "cuda.lock"
    text = lock.read_text()
    # Three `=`: on PyPI that is the build with CUDA, and a local index may have one without.
    constraints.write_text(text if image == "cpu" else text.replace("torch==", "torch==="))
    tags = [f"manylinux_2_{minor}" for minor in range(39, 4, -1)] + ["manylinux2014", "manylinux2010"]
    platforms = [f"--platform={tag}_x86_64" for tag in tags]
    target = [f"--python-version={python}", f"--target={tmp_path}", "--only-binary=:all:", *platforms]
    files = [f"--constraint={constraints}", f"--requirement={wanted}", f"--report={tmp_path / 'report'}"]
    pip = [sys.executable, "-m", "pip", "install", "--dry-run", "--ignore-installed", "--quiet", "--quiet"]
    resolved = subprocess.run(
        [*pip, *target, *files],
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    assert resolved.returncode == 0, resolved.stderr
    found = json.loads((tmp_path / "report").read_text())["install"]
    names = {canonicalize_name(one["metadata"]["name"]) for one in found}
    if image == "cuda":
        assert names == pins(lock).keys(), "pip installs the lock without dependencies"
    else:
        assert names - {"setuptools"} <= pins(lock).keys(), "the lock misses what the image would get"


def pip_installs(image: str) -> list[list[str]]:
    """The arguments of each `pip install`."""
    commands = [value for name, value in instructions(image) if name == "RUN"]
    words = [shlex.split(part) for value in commands for part in value.split("&&")]
    return [line[2:] for line in words if line[:2] == ["pip", "install"]]
