"""The decode worker: a scheduler that admits decode, and the receiving half of the hand-off."""
