"""What does a meta-gradient cost, in time and memory, as K and L grow? Figure 2.

`sweep` says what is measured, `measure` how, `result` what was found and its files, `findings` what
it means, `picture` what it looks like, `command` runs it with torch and numpy alone; `fig2` sets it
beside the paper's claims.
"""
