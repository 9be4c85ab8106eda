"""Networks by name, one file each, and any network as the `Model` that methods train.

A network of one's own is a function with a decorator, as in every file here; a package that names such a module as an
entry point of the group `metavd.models` makes it known to the command line (`model=NAME`).
"""

from .catalogue import REGISTRY, Network, check, model_for, module_for, names, network

__all__ = ["REGISTRY", "Network", "check", "model_for", "module_for", "names", "network"]
