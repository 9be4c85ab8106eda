"""One of everything that can be added to metavd from outside; docs/extend.md shows these files."""
