"""Which figure, table or theorem of the paper?

A study is added by its name here; see `Study` for what it has to offer.
"""

from ibaml.reproduce import bounds, fig1, fig2, fig3, table1
from ibaml.reproduce.folder import Parts, write_page, write_study
from ibaml.reproduce.study import Findings, Progress, Study

STUDIES: dict[str, Study] = {
    study.name: study for study in (fig1.STUDY, fig2.STUDY, table1.STUDY, fig3.STUDY, bounds.STUDY)
}

__all__ = ["STUDIES", "Findings", "Parts", "Progress", "Study", "write_page", "write_study"]
