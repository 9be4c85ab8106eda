"""The benchmark: the engine beside the loops that people write and the frameworks that they use, in one run."""
