"""The decode worker: a scheduler that admits decode, and the receiving side of the hand-off."""
