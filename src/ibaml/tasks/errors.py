"""How data says that it cannot be used."""


class DataError(ValueError):
    """Data that cannot be used; the message names what, and the remedy."""
