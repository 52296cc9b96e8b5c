"""Command line of the operator, and the kubectl plugin."""
