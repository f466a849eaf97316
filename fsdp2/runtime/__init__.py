"""When things happen: units and their states, the hooks around modules, the order of a step."""
