"""What does the paper claim, and what do we find? Its figures, table, theorems and costs.

`gradients` has Figure 1 and the theorems (how far is a meta-gradient from the true one?), `trained`
Table 1 and Figure 3 (which method is better after training?), `complexity` Figure 2 (what does a
meta-gradient cost?). `studies` lists them, `study` says what one is, `folder` what it leaves.

A client of the library like any other: nothing here is imported unless a command asks for it.
"""
