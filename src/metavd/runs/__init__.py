"""One run: its settings, its rounds, its folder."""
