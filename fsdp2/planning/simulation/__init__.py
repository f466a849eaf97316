"""The time of a replayed step on given hardware."""
