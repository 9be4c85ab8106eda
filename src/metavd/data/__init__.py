"""From files to clients: source (arrays) -> partition (who has what) -> cohort (what a round sees)."""
