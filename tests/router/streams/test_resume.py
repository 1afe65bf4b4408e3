"""Resume tokens: who may go on with which stream."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from common.errors import InvalidRequest
from common.secrets import open_secret
from router.options import RouterOptions
from router.streams.generation import Submission
from router.streams.resume import MOST_CHOICES, ChoicePosition, ResumeTokens
from tests.support.members import OTHER_SECRET, SECRET, write_secret
from wire.request import SamplingParams

NOW = 1_800_000_000.0
FORM = "text_completion"
VERSION = b"abc"
ASKED = Submission(
    request_id="r", model="m", prompts=[[1, 2, 3]], sampling=SamplingParams(max_new_tokens=9, seed=77), n=2,
    first_room=(1 << 62) + 5, stop=("x",), tenant="t",
)  # fmt: skip


def tokens(**options: Any) -> ResumeTokens:
    given = {"resume_key": "k" * 16, "resume_valid_s": 100.0, **options}
    return signer(RouterOptions(model=Path("m"), served_model_name="m", **given))


def signer(options: RouterOptions) -> ResumeTokens:
    return ResumeTokens(options, options.secret())


def refused(event_id: str, submission: Submission = ASKED, form: str = FORM, **options: Any) -> str:
    """Why the id does not fit. It fits as it was made."""
    with pytest.raises(InvalidRequest) as caught:
        tokens(**options).open(event_id, submission, form, NOW)
    assert caught.value.param == "Last-Event-ID"
    return str(caught.value)


def event_id(positions: str = "3.12f5") -> str:
    return f"{tokens().sign(ASKED, FORM, VERSION, NOW)}:{positions}"


def test_any_router_with_the_key_reads_what_another_signed() -> None:
    resumed = tokens().open(event_id(), replace(ASKED, first_room=1, request_id="other"), FORM, NOW + 99)
    assert resumed.positions == [ChoicePosition(3), ChoicePosition(12, finished=True, reasoning_tokens=5)]
    assert (resumed.first_room, resumed.version) == (ASKED.first_room, VERSION)
    assert (resumed.submission.first_room, resumed.submission.sampling) == (1, ASKED.sampling)


def test_what_the_first_router_chose_is_in_the_token() -> None:
    chosen = replace(ASKED, seed_given=False, length_given=False)
    signed = tokens().sign(chosen, FORM, VERSION, NOW)
    again = replace(chosen, sampling=replace(chosen.sampling, seed=1, max_new_tokens=500))
    resumed = tokens().open(f"{signed}:0.0", again, FORM, NOW)
    assert resumed.submission.sampling == chosen.sampling


def test_an_id_is_short() -> None:
    assert len(tokens().sign(ASKED, FORM, VERSION, NOW)) == 60


@pytest.mark.parametrize(
    "change",
    [
        {"prompts": [[1, 2, 4]]}, {"stop": ()}, {"tenant": "other"}, {"cache_salt": "s"}, {"extra_key": "e"},
        {"skip_special_tokens": False}, {"sampling": replace(ASKED.sampling, seed=78)},
        {"sampling": replace(ASKED.sampling, temperature=0.5)}, {"prompts": [[1, 2, 3]] * 2, "n": 1},
    ],
)  # fmt: skip
def test_it_is_good_for_the_request_that_it_was_made_for(change: dict[str, Any]) -> None:
    assert "another request" in refused(event_id(), replace(ASKED, **change))


def test_it_is_good_for_the_same_kind_of_stream_and_model() -> None:
    assert "another request" in refused(event_id(), form="generate")
    assert "another request" in refused(event_id(), replace(ASKED, model="other"))


def test_every_altered_character_of_the_token_is_noticed() -> None:
    good = event_id()
    for place in range(60):
        other = "A" if good[place] != "A" else "B"
        refused(good[:place] + other + good[place + 1 :])


def test_a_foreign_key_and_an_old_id_are_refused(tmp_path: Path) -> None:
    assert "another key" in refused(event_id(), resume_key="K" * 16)
    assert "another key" in refused(event_id(), resume_key=None)
    assert "another key" in refused(event_id(), resume_key=None, cluster_secret_file=write_secret(tmp_path))
    with pytest.raises(InvalidRequest, match="expired"):
        tokens().open(event_id(), ASKED, FORM, NOW + 100)


def test_the_cluster_secret_is_the_key_of_all_routers(tmp_path: Path) -> None:
    file = write_secret(tmp_path)
    one, other = (tokens(resume_key=None, cluster_secret_file=file) for _ in range(2))
    signed = one.sign(ASKED, FORM, VERSION, NOW)
    assert other.open(f"{signed}:0.0", ASKED, FORM, NOW).first_room == ASKED.first_room


def test_ids_of_a_secret_are_good_until_it_is_removed(tmp_path: Path) -> None:
    path = write_secret(tmp_path)
    secret = open_secret(path)
    assert secret is not None
    both = ResumeTokens(RouterOptions(model=Path("m"), served_model_name="m"), secret)
    now = 0.0

    def signed_after(*lines: str) -> str:
        nonlocal now
        write_secret(tmp_path, *lines)
        now += 10.0
        secret.refresh(now)
        return f"{both.sign(ASKED, FORM, VERSION, NOW)}:0.0"

    old = signed_after(SECRET)
    new = signed_after(OTHER_SECRET, SECRET, "")
    assert old != new
    for event_id in (old, new):
        assert both.open(event_id, ASKED, FORM, NOW).first_room == ASKED.first_room
    signed_after(OTHER_SECRET)
    assert both.open(new, ASKED, FORM, NOW).first_room == ASKED.first_room
    with pytest.raises(InvalidRequest, match="another key"):
        both.open(old, ASKED, FORM, NOW)


@pytest.mark.parametrize(
    "positions",
    ["", "1", "1.2.3", "-1.2", "1.2x", "f.1", "1..2", "1.2.", "1_0.2", "123456789.1", "1.2" * 5000, "١.2"],
)
def test_positions_that_are_none_are_refused(positions: str) -> None:
    refused(event_id(positions))


def test_what_is_no_id_at_all_is_refused() -> None:
    for wrong in (":", "1", "x" * 60, "=" * 60 + ":1.1", "x" * 100_000, " " + event_id(), event_id() + "\n"):
        refused(wrong)


def test_the_longest_id_fits() -> None:
    many = replace(ASKED, n=MOST_CHOICES)
    positions = [ChoicePosition(12_345_678, finished=True, reasoning_tokens=12_345_678)] * MOST_CHOICES
    written = b".".join(one.write() for one in positions).decode()
    signed = tokens().sign(many, FORM, VERSION, NOW)
    assert tokens().open(f"{signed}:{written}", many, FORM, NOW).positions == positions
