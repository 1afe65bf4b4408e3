"""With the directory: who is a member."""

from __future__ import annotations

from wire.messages.base import Message
from wire.numbers import Natural, Quantity
from wire.records import Role, WorkerRecord
from wire.settings import NO_SETTINGS, Settings


class Join(Message, frozen=True, tag="join"):
    """A worker process asks for its incarnation, again and again until it has one. `nonce` is the process's
    own, drawn at its start. An older process of the same id is replaced at once."""

    worker: str
    nonce: Natural


class Joined(Message, frozen=True, tag="joined"):
    """The process is the worker of that id, as this incarnation. A repeated Join gets the same."""

    worker: str
    nonce: Natural
    incarnation: Natural
    lease_s: Quantity


class Replaced(Message, frozen=True, tag="replaced"):
    """A newer process is the worker of that id, or this one has withdrawn: it ends its rooms and itself."""

    worker: str
    nonce: Natural


class Announce(Message, frozen=True, tag="announce", omit_defaults=True):
    """A worker renews its lease, with its current load. `nonce` is that of its Join. `settings` are all that
    it knows."""

    record: WorkerRecord
    nonce: Natural = 0  # 0: it has not joined, but chosen an incarnation itself
    settings: Settings = NO_SETTINGS


class Announced(Message, frozen=True, tag="announced", omit_defaults=True):
    """The lease holds for `lease_s` seconds from the last Announce. `settings` are all that the directory
    knows; when they change, it says so unasked. `waiting` is what all routers say in `Watch.waiting`."""

    worker: str
    incarnation: Natural
    lease_s: Quantity
    settings: Settings = NO_SETTINGS
    waiting: Quantity = 0.0


class AnnounceRefused(Message, frozen=True, tag="announce_refused"):
    """This record cannot join: the parts of a ConfigError (common/errors.py)."""

    worker: str
    incarnation: Natural
    key: str
    problem: str
    remedy: str


class Withdraw(Message, frozen=True, tag="withdraw"):
    """A worker leaves on purpose."""

    worker: str
    incarnation: Natural


class Watch(Message, frozen=True, tag="watch", omit_defaults=True):
    """A router asks for every View of the next few seconds, and to be listed in them. It repeats the message
    to renew both, with a greater `number` each time. `seen` are the highest incarnations that it has seen, by
    worker id. `admin` is the URL of its admin listener; "": it has none. `settings` are all that it knows.
    `waiting` are rooms that wait there because decode is full, by worker id: the part of each."""

    number: Natural = 0
    seen: dict[str, Natural] = {}
    admin: str = ""
    settings: Settings = NO_SETTINGS
    waiting: dict[str, Quantity] = {}


class View(Message, frozen=True, tag="view", omit_defaults=True):
    """All records whose lease holds. `watch` is the greatest number of a Watch that the directory has from
    this router; `version` grows with every change of membership or draining. A View is newer than another if
    (`watch`, `version`) is greater, also when the directory has been started again between them.

    `routers` are the mailboxes of all who watch, `admins` the URLs of their admin listeners. `settings` are
    all that the directory knows.
    """

    watch: Natural
    version: Natural
    records: list[WorkerRecord]
    routers: list[str] = []
    admins: list[str] = []
    settings: Settings = NO_SETTINGS


class SetRole(Message, frozen=True, tag="set_role"):
    """Directory -> worker: take this role. Repeated until RoleSet. A worker with the other role drains, and
    joins again under its id as a new incarnation with new addresses (worker/switch.py)."""

    role: Role


class RoleSet(Message, frozen=True, tag="role_set", omit_defaults=True):
    """Worker -> directory: it has that role, or is about to take it. With a `problem` it is not, because of
    that."""

    worker: str
    role: Role
    problem: str = ""
