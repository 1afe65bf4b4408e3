"""All messages."""

from __future__ import annotations

from wire.messages.base import Receipt
from wire.messages.caches import CacheCleared, ClearCache, ForgetTenant, Inspect, Inspected, TenantForgotten
from wire.messages.directory import (
    Announce,
    Announced,
    AnnounceRefused,
    Join,
    Joined,
    Replaced,
    RoleSet,
    SetRole,
    View,
    Watch,
    Withdraw,
)
from wire.messages.rooms import (
    Abort,
    Ack,
    Claim,
    Claimed,
    Decode,
    Prefill,
    Rejected,
    Resend,
    Reserved,
    RoomStatus,
    Timeline,
    Tokens,
)
from wire.messages.routers import AssignedLoads, DropResponse, FindResponse, FoundResponse, KeepResponse
from wire.messages.transfer import Fetch, Fetched, FetchRefused, KVDone, KVFailed, KVReady, KVTarget, Release

AnyMessage = (
    Receipt | Prefill | Decode | Abort | Ack | Resend | Claim | Inspect | Inspected | ClearCache
    | CacheCleared | Claimed | Tokens | Timeline | RoomStatus | Reserved | Rejected | KVTarget | KVReady
    | KVDone | KVFailed | Release | Join | Joined | Replaced | Announce | Announced | AnnounceRefused
    | Withdraw | Watch | View | SetRole | RoleSet | AssignedLoads | KeepResponse | FindResponse
    | FoundResponse | DropResponse | Fetch | Fetched | FetchRefused | ForgetTenant | TenantForgotten
)  # fmt: skip
