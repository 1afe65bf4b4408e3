"""The process around a scheduler: engine loop, role base class, rooms, outbox, heartbeat, options."""
