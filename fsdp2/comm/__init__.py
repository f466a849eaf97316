"""How bytes travel: streams, transports over process groups, messages between hosts."""
