"""Which error says that data cannot be used?"""


class DataError(ValueError):
    """Data cannot be used; the message says why, and the remedy."""
