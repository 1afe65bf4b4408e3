"""What `baton serve` does once its configuration is known."""

from __future__ import annotations

import sys

from cluster.app import application
from cluster.config import ServeConfig
from cluster.local import DeployFailed, LocalOptions, LocalServe, stop_first
from cluster.start_display import StartDisplay
from common.stop_signal import StopSignal

_READY_TIMEOUT_S = 1800.0  # large models load slowly
_WATCH_S = 5.0  # between two looks at whether Ray still runs


def serve_until_stopped(options: LocalOptions, config: ServeConfig) -> int:
    """Start Ray and Serve, or connect to a Ray, and drain and end them at SIGINT or SIGTERM. Returns the exit
    code."""
    served = ", ".join(sorted({one.model_name for one in config.served}))
    address = options.ray_address
    where = "a Ray of its own" if address is None else f"Ray at {address}"
    display = StartDisplay()
    display.say(f"starting {served} on {where}")
    stop_first()
    with LocalServe(options) as local:
        stop = StopSignal()
        display.say("Ray and Serve run; the replicas are starting")
        try:
            local.deploy(application(config), _READY_TIMEOUT_S, stop, display)
        except DeployFailed as failure:
            print(f"baton: {failure}", file=sys.stderr)
            return 1
        if not stop.wait(0.0):
            display.say(f"ready: {options.url}/v1  (model {served}; Ctrl-C to stop)")
            while not stop.wait(_WATCH_S):
                if not local.ray_answers():
                    print("baton: Ray has ended", file=sys.stderr)
                    return 1
        display.say("draining and shutting down")
    print("stopped", flush=True)
    return 0
