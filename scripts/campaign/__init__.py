"""The parts of scripts/faults.py."""
