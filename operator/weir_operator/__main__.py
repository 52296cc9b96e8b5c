"""Entry point of `weir-operator`."""

import sys


def main() -> None:
    try:
        from weir_operator.cli.app import main as command  # takes long to import: in here, where a Ctrl-C is caught

        command()
    except KeyboardInterrupt:
        sys.exit(130)


if __name__ == "__main__":
    main()
