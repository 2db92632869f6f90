"""What does a person look at to judge a run, a classifier or a reproduction? One file of HTML.

`subject` says what a path is, `opened` what is known of a run, `runs`, `classifier` and
`reproduction` which sections a page has (`results`, `tasks`, `learning`, `prior`, `doctor` and
`settings` fill those of runs), `blocks` what a section is made of, `write` makes the file. Drawings
are of `ibaml.report`.
"""

from ibaml.pages.subject import report

__all__ = ["report"]
