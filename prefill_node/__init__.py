"""The prefill worker: a scheduler that admits prefill, and the sending side of the hand-off."""
