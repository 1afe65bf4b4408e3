"""NodeUsage: how often each node was used, and by how many tenants, in this epoch and in the one before.

    hit_cur   requests of this epoch that found the node's pages in the cache
    u_cnt_l   tenants that used the node in this epoch, who found or computed it: exact up to 2K, then 2K.
              A private node's is its owner, if anybody. Requests without a tenant count as one more
    hit_pre   as hit_cur, of the epoch before
    u_pre     as u_cnt_l, of the epoch before

One epoch counts for all nodes. What a node holds is of the epoch in which it was used last, and names it: it
rolls when the node is used or read next, so the end of an epoch costs nothing per node.

A node holds one int (`TreeNode.usage`): the four counters, the epoch, and the number of the set of tenants
that used it in that epoch. Nodes with the same tenants share a set, and the sets go with the epoch. With the
int's place on the node that is 48 bytes a node, however many tenants use it. Most sets are of one tenant, and
those are tuples: a frozenset of one takes 216 bytes.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import NamedTuple

from kvcache.tree_node import TreeNode, shared

# Bits of the int, from low to high: 28 for the set, 22 for each count of hits, 15 for each of tenants. Above
# them is the epoch: 2^18 epochs fit into 120 bits, beyond which Python's int would take 4 bytes more.
_HIT_CUR, _HIT_PRE, _U_CNT_L, _U_PRE, _EPOCH = 28, 50, 72, 87, 102
_SETS, _MOST_HITS, _MOST_USERS = (1 << 28) - 1, (1 << 22) - 1, (1 << 15) - 1

_Users = tuple[str, ...] | frozenset[str]


class Usage(NamedTuple):
    """One node's, as it is now."""

    hit_cur: int
    u_cnt_l: int
    hit_pre: int
    u_pre: int


class _Held(NamedTuple):
    """What the int of a node says."""

    epoch: int
    u_pre: int
    u_cnt_l: int
    hit_pre: int
    hit_cur: int
    users: int  # the number of their set


def _packed(held: _Held) -> int:
    epoch, u_pre, u_cnt_l, hit_pre, hit_cur, users = held
    return (
        epoch << _EPOCH
        | u_pre << _U_PRE
        | u_cnt_l << _U_CNT_L
        | hit_pre << _HIT_PRE
        | hit_cur << _HIT_CUR
        | users
    )


def _unpacked(packed: int) -> _Held:
    return _Held(
        packed >> _EPOCH,
        packed >> _U_PRE & _MOST_USERS,
        packed >> _U_CNT_L & _MOST_USERS,
        packed >> _HIT_PRE & _MOST_HITS,
        packed >> _HIT_CUR & _MOST_HITS,
        packed & _SETS,
    )


class NodeUsage:
    """The epoch of one tree, and who has used its nodes in it."""

    def __init__(self, most_users: int) -> None:
        """`most_users`, 2K, are counted exactly."""
        self.epoch = 1  # a node's first one is 0: long ago, as soon as it is used or read
        self.most_users = min(most_users, _MOST_USERS)
        self._sets: list[_Users] = [()]
        self._numbers: dict[_Users, int] = {(): 0}

    def next_epoch(self) -> None:
        """All counters roll."""
        self.epoch += 1
        self._sets = [()]
        self._numbers = {(): 0}

    def used(self, path: Iterable[TreeNode], tenant: str, hits: int = 0) -> None:
        """A request of `tenant` has found these nodes in the cache (`hits` is 1), or has them now."""
        for node in path:
            held = self._rolled(node)
            users = self._sets[held.users]
            is_new = tenant not in users and len(users) < self.most_users
            if hits or is_new:
                self._hold(node, held, held.hit_cur + hits, (*users, tenant) if is_new else users)

    def of(self, node: TreeNode) -> Usage:
        """The counters of a node in this epoch."""
        held = self._rolled(node)
        return Usage(held.hit_cur, held.u_cnt_l, held.hit_pre, held.u_pre)

    def merge(self, copy: TreeNode, kept: TreeNode) -> None:
        """`copy` is about to give way to `kept`, which has the same pages: add its counters."""
        its, now = self._rolled(copy), self._rolled(kept)
        now = now._replace(
            hit_pre=min(its.hit_pre + now.hit_pre, _MOST_HITS),
            u_pre=min(its.u_pre + now.u_pre, self.most_users),
        )
        users = {*self._sets[its.users], *self._sets[now.users]}
        self._hold(kept, now, its.hit_cur + now.hit_cur, users)

    def _rolled(self, node: TreeNode) -> _Held:
        held = _unpacked(node.usage)
        if held.epoch == self.epoch:
            return held
        before = (held.u_cnt_l, held.hit_cur) if held.epoch == self.epoch - 1 else (0, 0)
        return _Held(self.epoch, u_pre=before[0], u_cnt_l=0, hit_pre=before[1], hit_cur=0, users=0)

    def _hold(self, node: TreeNode, held: _Held, hits: int, counted: Collection[str]) -> None:
        if len(counted) > self.most_users:
            counted = sorted(counted)[: self.most_users]
        users: _Users = tuple(counted) if len(counted) <= 1 else frozenset(counted)
        number = self._numbers.get(users)
        if number is None:
            number = self._numbers[users] = len(self._sets)
            self._sets.append(users)
        hits = min(hits, _MOST_HITS)
        shared(node).usage = _packed(held._replace(hit_cur=hits, u_cnt_l=len(users), users=number))
