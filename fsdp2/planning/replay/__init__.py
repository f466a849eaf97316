"""Replays a traced step through the runtime: its gathers, reductions, memory and traffic."""
