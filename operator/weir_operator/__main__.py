"""Entry point of `weir-operator`."""

from weir_operator.cli.app import main

if __name__ == "__main__":
    main()
