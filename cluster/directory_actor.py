"""The directory of workers as a named Ray actor of one application.

The first router replica creates it; workers look it up by name. The actor is not detached: its owner is the
router replica that created it, so it ends with the application. The alternative was a Serve deployment of
its own. It would outlive that replica, but a restart of the directory loses nothing (workers announce again,
routers keep their last view), and it would be one more deployment to configure.

Ray carries only the address, once per start, and what operators ask. Messages to the directory go to its
mailbox.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar, cast

import ray
from ray.exceptions import GetTimeoutError, RayActorError

from cluster.node import node_interface
from cluster.reaper import Reaper
from cluster.role_keeper import RolePlan
from cluster.roles import Roles, RoleTable, RoleWish
from cluster.start_notes import StartNote, StartNotes
from common.descriptors import allow_descriptors
from common.errors import Unavailable
from common.ports import Ports
from common.secrets import members_secret
from router.directory.server import DirectoryHost
from wire.records import Role

NAMESPACE = "baton"
_ANSWER_S = 10.0
_RETRY_S = 0.1

T = TypeVar("T")


@dataclass(frozen=True)
class DirectorySockets:
    """What the directory's mailbox is bound to. `interface` may be `auto`: the actor may run on another node
    than the router that creates it."""

    interface: str
    ports: str  # a PortText
    secret_file: Path | None


class DirectoryActor:
    """Hosts the directory in a process of its own, and keeps the key that the router replicas share."""

    def __init__(
        self,
        app_name: str,
        sockets: DirectorySockets,
        lease_s: float,
        resume_key: str | None,
        plans: Mapping[str, RolePlan],
    ) -> None:
        """Ray restarts the actor with the same arguments, so key and plans outlive its process. What an
        operator has said about roles, routers and workers tell the next one."""
        allow_descriptors()
        self._roles = Roles(plans)
        interface = node_interface(sockets.interface)
        self._host = DirectoryHost(
            interface,
            members_secret(sockets.secret_file, interface),
            lease_s,
            ports=Ports(sockets.ports, "ports.mailboxes"),
            is_new=False,
            on_lost=Reaper(app_name).end,
            assign_roles=self._roles.assign,
        )
        self._resume_key = resume_key
        self._start_notes = StartNotes()

    def address(self) -> str:
        """Mailbox address of this incarnation."""
        return self._host.address

    def worker_count(self) -> int:
        """How many workers have joined."""
        return self._host.worker_count()

    def admins(self) -> list[str]:
        """URLs of the routers' admin listeners."""
        return self._host.admins()

    def resume_key(self) -> str | None:
        """Signs the event ids of routers whose options have neither a key nor a cluster secret."""
        return self._resume_key

    def follow_plans(self, plans: Mapping[str, RolePlan]) -> None:
        """The plans of a router that starts: of the configuration that was deployed last."""
        self._roles.follow(plans)

    def first_role(self, worker: str) -> Role | None:
        """The role of a worker that starts; None: not known yet."""
        return self._roles.first(worker)

    def roles(self) -> RoleTable:
        """Who has which role."""
        return self._roles.table()

    def set_roles(self, wish: RoleWish) -> str:
        """What an operator wants. Returns why not, or ""."""
        return self._roles.set(wish)

    def add_start_note(self, worker: str, text: str) -> None:
        """What a worker that starts says."""
        self._start_notes.add(worker, text)

    def start_notes(self, after: int) -> list[StartNote]:
        """What workers that start have said after the note of this number."""
        return self._start_notes.after(after)


def patiently(ask: Callable[[], T], timeout_s: float) -> T:
    """What `ask` returns, asked again while it raises Unavailable: the directory ends with the router that
    created it, and another router creates it again. Raises Unavailable after `timeout_s`."""
    deadline = time.monotonic() + timeout_s
    while True:
        try:
            return ask()
        except Unavailable:
            if time.monotonic() >= deadline:
                raise
            time.sleep(_RETRY_S)  # Ray has no event for "an actor of this name exists now"


class DirectoryFinder:
    """Finds the application's directory, wherever it is now."""

    def __init__(self, app_name: str) -> None:
        self._app_name = app_name
        self._name = f"directory:{app_name}"
        self._handles: list[Any] = []  # Ray ends an actor when the handle of its creator is dropped

    def ensure(
        self, sockets: DirectorySockets, lease_s: float, resume_key: str | None, plans: Mapping[str, RolePlan]
    ) -> str:
        """The directory's address; the actor is created when there is none. For router replicas.

        A new actor keeps `resume_key` for replicas that start later, and assigns roles by the `plans`.
        """
        try:
            return self.find()
        except Unavailable:
            actor = (
                ray.remote(DirectoryActor)
                .options(
                    name=self._name, namespace=NAMESPACE, get_if_exists=True, num_cpus=0, max_restarts=-1
                )
                .remote(self._app_name, sockets, lease_s, resume_key, plans)
            )
            self._handles.append(actor)
            return self.find()

    def resume_key(self) -> str | None:
        """The key that the actor keeps. Raises Unavailable when it does not answer."""
        return cast("str | None", self._ask("resume_key"))

    def admins(self) -> list[str]:
        """URLs of the routers' admin listeners. Raises Unavailable when the directory does not answer."""
        return cast("list[str]", self._ask("admins"))

    def worker_count(self) -> int:
        """How many workers have joined. Raises Unavailable when the directory does not answer."""
        return cast("int", self._ask("worker_count"))

    def follow_plans(self, plans: Mapping[str, RolePlan]) -> None:
        """Tell a directory that was there before what was deployed now. Raises Unavailable when it does not
        answer."""
        self._ask("follow_plans", plans)

    def first_role(self, worker: str, timeout_s: float) -> Role:
        """The role of a worker that starts. Raises Unavailable when the directory does not answer, or
        does not know within `timeout_s` that roles are dynamic."""

        def ask() -> Role:
            role = self._ask("first_role", worker)
            if role is None:
                raise Unavailable(f"the directory actor {self._name} has no plan for dynamic roles")
            return cast("Role", role)

        return patiently(ask, timeout_s)

    def roles(self) -> RoleTable:
        """Who has which role. Raises Unavailable when the directory does not answer."""
        return cast("RoleTable", self._ask("roles"))

    def set_roles(self, wish: RoleWish) -> str:
        """Ask for roles. Returns why not, or "". Raises Unavailable when the directory does not answer."""
        return cast("str", self._ask("set_roles", wish))

    def add_start_note(self, worker: str, text: str) -> None:
        """What a worker that starts says. Not waited for, and lost if there is no directory now: nothing
        depends on it."""
        with contextlib.suppress(ValueError):
            self._actor().add_start_note.remote(worker, text)

    def start_notes(self, after: int) -> list[StartNote]:
        """What workers that start have said after the note of this number. Raises Unavailable when the
        directory does not answer."""
        return cast("list[StartNote]", self._ask("start_notes", after))

    def find(self) -> str:
        """The directory's address, asked anew. Raises Unavailable when there is none (yet)."""
        return cast("str", self._ask("address"))

    def wait(self, timeout_s: float) -> str:
        """The directory's address once it is there. Raises Unavailable after `timeout_s`."""
        return patiently(self.find, timeout_s)

    def _ask(self, method: str, *arguments: Any) -> Any:
        try:
            return ray.get(getattr(self._actor(), method).remote(*arguments), timeout=_ANSWER_S)
        except (ValueError, RayActorError, GetTimeoutError) as error:
            raise Unavailable(f"the directory actor {self._name} does not answer: {error}") from error

    def _actor(self) -> Any:
        """Raises ValueError when there is none."""
        return ray.get_actor(self._name, namespace=NAMESPACE)
