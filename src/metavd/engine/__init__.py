"""How clients are run: one after another or all at once, round after round, with checkpoints."""
