"""What does a meta-gradient cost, in time and memory, as K and L grow? Figure 2.

`sweep` says what is measured, `measure` how, `result` holds the costs and their files, `findings`
puts them into words, `picture` draws them, `command` runs it with torch and numpy alone; `fig2`
compares it with the paper's claims.
"""
