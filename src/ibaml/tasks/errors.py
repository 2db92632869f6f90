"""Which error says that data cannot be used, and which warning how they were read?"""


class DataError(ValueError):
    """Data cannot be used; the message says why, and the remedy."""


class DataWarning(UserWarning):
    """Data can be used, and a person should know how: what was left out, what was put together."""
