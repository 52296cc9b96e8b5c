"""The one exception that either process raises for what the user can put right."""


class UserError(Exception):
    """A user's mistake in one sentence: what was looked for, where, and what to change. Exit status 2, never a traceback."""
