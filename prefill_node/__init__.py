"""The prefill worker: a scheduler that admits prefill, and the sending half of the hand-off."""
