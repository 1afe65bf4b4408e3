"""Some of what `make fuzz` sends. Memory and descriptors are compared there alone: it takes a while until all
has been used once."""

from __future__ import annotations

import pytest

from tests.fuzz.findings import Findings
from tests.fuzz.frame_batches import send_all_frames, send_all_peers
from tests.fuzz.http_batches import send_http
from tests.fuzz.target import target


@pytest.mark.slow
def test_a_hundred_hostile_requests_and_ten_peers() -> None:
    findings = Findings()
    with target(findings, has_secret=False) as attacked:
        send_http(attacked, 100, borders=False)
        send_all_peers(attacked, 10)
        attacked.running.settle()
    assert findings.held, findings.line()
    assert findings.http >= 100
    assert findings.peers == 10


@pytest.mark.slow
def test_a_few_hundred_frames_of_a_lying_member() -> None:
    findings = Findings()
    with target(findings, has_secret=True) as attacked:
        send_all_frames(attacked, 200)
        attacked.running.settle()
    assert findings.held, findings.line()
    assert findings.frames >= 5 * 200
