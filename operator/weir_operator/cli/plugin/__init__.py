"""`kubectl infd`: what the resources do and why, in a cluster or in local mode; and the few changes one makes by hand."""

from __future__ import annotations

import logging
import sys


def main() -> None:
    """Console script `kubectl-infd`; kubectl finds it as `kubectl infd`."""
    logging.disable(logging.WARNING)  # the client's own words on a kubeconfig that is not there, beside our one line
    try:
        from weir_operator.cli.plugin.commands import app  # takes long to import: in here, where a Ctrl-C is caught

        app(prog_name="kubectl-infd")
    except KeyboardInterrupt:
        sys.exit(130)


def complete() -> None:
    """Console script `kubectl_complete-infd`, which kubectl runs with the words so far where the user presses TAB."""
    from weir_operator.cli.plugin.completion import print_completions

    logging.disable(logging.WARNING)
    print_completions(sys.argv[1:])
