"""``python -m ibaml``"""

from ibaml.cli import app

app()
