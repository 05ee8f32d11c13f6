"""What the user can put right."""


class InputError(ValueError):
    """Something given cannot be used; its text says what to do, one problem per line."""
