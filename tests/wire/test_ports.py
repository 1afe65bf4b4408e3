"""Ranges of ports: sockets stay in them, and a process is not taken for its predecessor at the same port."""

from __future__ import annotations

import time
from collections.abc import Callable

import pytest

from common.errors import ConfigError
from common.ports import Ports
from kvcache.config import KVEventsConfig
from kvcache.publisher import EventPublisher
from tests.support.members import SECRET, curve_of
from wire.addresses import parse_address
from wire.mailbox import Mailbox
from wire.messages.directory import Watch
from wire.messages.rooms import Abort

WAIT_S = 10.0


def until(done: Callable[[], bool]) -> None:
    deadline = time.monotonic() + WAIT_S
    while not done():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def port_of(address: str) -> int:
    return int(parse_address(address).endpoint.rpartition(":")[2])


def at_port(port: int, secret: str | None) -> Mailbox:
    """A mailbox there. ZeroMQ frees the port of a closed one a little later."""
    deadline = time.monotonic() + WAIT_S
    while True:
        try:
            return Mailbox(curve=curve_of(secret), ports=Ports(str(port), "ports.mailboxes"))
        except ConfigError:
            assert time.monotonic() < deadline
            time.sleep(0.05)


@pytest.mark.parametrize("secret", [None, SECRET])
def test_a_message_for_the_predecessor_is_refused_by_its_successor(secret: str | None) -> None:
    with Mailbox(curve=curve_of(secret)) as sender:
        with Mailbox(curve=curve_of(secret)) as first:
            before = first.address
            sender.send(before, Abort(1, 0))
            assert [mail.message for mail in first.wait(WAIT_S)] == [Abort(1, 0)]
        with at_port(port_of(before), secret) as successor:
            assert successor.address != before
            sender.send(before, Abort(2, 0))  # over the connection that was there, or a new one
            if secret is None:
                until(lambda: successor.rejected_messages > 0)
            sender.send(successor.address, Abort(3, 0))
            assert [mail.message for mail in successor.wait(WAIT_S)] == [Abort(3, 0)]
            assert successor.take() == []


def test_who_knows_no_key_reaches_whoever_is_there() -> None:
    """As `baton tree tcp://host:port` does, which a user types."""
    with Mailbox() as sender, Mailbox() as here:
        sender.send(parse_address(here.address).endpoint, Watch(1))
        assert [mail.message for mail in here.wait(WAIT_S)] == [Watch(1)]


def test_a_process_that_leaves_through_another_mailbox_has_the_same_key() -> None:
    with Mailbox() as one, Mailbox(key=one.key) as another:
        assert parse_address(another.address).key == parse_address(one.address).key
        assert another.address != one.address


def test_mailboxes_and_events_stay_in_their_ranges() -> None:
    mailboxes, events = Ports("28100-28199", "ports.mailboxes"), Ports("28200-28299", "ports.events")
    with (
        Mailbox(ports=mailboxes) as mailbox,
        EventPublisher(KVEventsConfig(enable=True, ports=events)) as publisher,
    ):
        assert port_of(mailbox.address) in mailboxes.choice
        streams = publisher.public, publisher.private
        ports = {port_of(address) for one in streams for address in (one.address, one.replay_address)}
        assert len(ports) == 4
        assert ports <= set(events.choice)


def test_events_without_a_second_port_leave_nothing_open() -> None:
    with Mailbox() as taken:
        port = port_of(taken.address)
    config = KVEventsConfig(enable=True, ports=Ports(str(port), "ports.events"))
    with pytest.raises(ConfigError, match=r"ports\.events.*no port of") as raised:
        EventPublisher(config)  # its second socket finds the port taken by the first
    assert raised.value.key == "ports.events"
    at_port(port, None).close()
