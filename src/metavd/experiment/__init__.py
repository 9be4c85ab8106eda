"""One experiment from its specification to its stored result."""
