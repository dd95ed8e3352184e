"""The one error type that a user may cause: it prints as one line and exits with 2."""


class InputError(ValueError):
    """What the user gave cannot be used.

    The message names where (``file:line`` or the flag), the field, what was found and what would do.
    Following lines, if any, are hints and start with two spaces.
    """
