"""Pure: windows and state in, moves and reasons out."""
