"""Output for people: text for terminals, and pictures."""
