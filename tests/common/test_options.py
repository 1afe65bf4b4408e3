"""Options from files, and how a program ends when they cannot work."""

from __future__ import annotations

from pathlib import Path

import pytest
from pydantic import Field

from common.errors import ConfigError
from common.options import Options, exit_on_config_error, parse_options, read_options


class Inner(Options):
    size: int = Field(1, ge=1)


class Outer(Options):
    name: str = "n"
    inner: Inner | None = None


def test_an_unknown_key_is_answered_with_those_of_its_section() -> None:
    for raw, key, known in [
        ({"nam": "x"}, "nam", "inner, name"),
        ({"inner": {"siz": 2}}, "inner.siz", "size"),
    ]:
        with pytest.raises(ConfigError) as caught:
            parse_options(Outer, raw)
        assert (caught.value.key, caught.value.problem) == (key, "unknown key")
        assert caught.value.remedy.endswith(f": {known}")


def test_given_are_those_that_were_set() -> None:
    assert Outer().given() == {}
    assert Outer(inner=Inner(size=3)).given() == {"inner": Inner(size=3)}


@pytest.mark.parametrize(
    ("text", "problem"), [(None, "cannot read"), ("{", "is not JSON"), ("[]", "is not a JSON object")]
)
def test_files_that_are_not_options(tmp_path: Path, text: str | None, problem: str) -> None:
    file = tmp_path / "options.json"
    if text is not None:
        file.write_text(text)
    with pytest.raises(ConfigError, match=problem) as caught:
        read_options(Outer, file)
    assert caught.value.key == "--options"


def test_a_program_ends_with_one_line_and_exit_code_2(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended, exit_on_config_error("program"):
        raise ConfigError("key", "two\nlines", "correct it")
    assert ended.value.code == 2
    assert capsys.readouterr().err == "program: key: two lines; correct it\n"
