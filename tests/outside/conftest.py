"""The package is installed by a test in a process of its own; imported here it would add to everybody's registries."""

collect_ignore = ["package"]
