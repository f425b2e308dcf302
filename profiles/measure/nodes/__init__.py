"""Nodes measured as a cluster: each starts worker ranks (`launchers`); their `links`."""
