"""Messages between router and workers, between workers, and with the directory.

Every message about a room is idempotent: it is keyed (room, epoch, kind), its sender repeats it until a
`Receipt` (or the thing asked for) comes back, and its receiver answers a repeat like the first. A room is
one choice of one request; its epoch grows each time the router starts it again, and a message of an older
epoch is stale (docs/decisions/0015).

base         what every message has; the receipt
rooms        router and worker: rooms that start, their tokens, how they end
caches       router and worker: reports on what the worker holds, and what it is to forget
transfer     worker and worker: KV of a room, and pages of a prompt that the other one has
directory    members and the directory
routers      router and router
any_message  their union, which the codec knows
"""
