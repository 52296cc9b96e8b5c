"""Command line of the server, and the entry point of the engine child."""
