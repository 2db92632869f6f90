"""Which pictures does a person look at? matplotlib is imported when one is drawn, not before."""

from ibaml.report.calibration import draw_reliability, draw_selective, reliability_figure
from ibaml.report.comparison import draw_comparison
from ibaml.report.episode import draw_episode
from ibaml.report.fits import Fit, draw_fits

__all__ = [
    "Fit",
    "draw_comparison",
    "draw_episode",
    "draw_fits",
    "draw_reliability",
    "draw_selective",
    "reliability_figure",
]
