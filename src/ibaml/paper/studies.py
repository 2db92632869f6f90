"""Which figures, tables and theorems of the paper can be reproduced?

To add a study, name it here; see `Study` for what it needs.
"""

from ibaml.paper.complexity import fig2
from ibaml.paper.gradients import bounds, fig1
from ibaml.paper.study import Study
from ibaml.paper.trained import fig3, table1

STUDIES: dict[str, Study] = {
    study.name: study for study in (fig1.STUDY, fig2.STUDY, table1.STUDY, fig3.STUDY, bounds.STUDY)
}
