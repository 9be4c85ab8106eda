"""The mathematics: pure functions on dictionaries of tensors. No files, no argv, no method names."""
