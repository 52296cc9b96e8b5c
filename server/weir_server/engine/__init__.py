"""The child process: drain messages, decide, execute one forward, commit, report."""
