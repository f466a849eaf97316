"""A traced step, replayed through the runtime: what it gathers, reduces, holds and sends."""
