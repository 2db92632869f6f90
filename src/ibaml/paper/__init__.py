"""What does the paper claim, and what do we find? Its figures, table, theorems and costs.

`gradients` has Figure 1 and the theorems (how far is a meta-gradient from the true one?), `trained`
Table 1 and Figure 3 (which method is better after training?), `complexity` Figure 2 (what does a
meta-gradient cost?). `studies` lists them, `study` says what a study is, `folder` what it writes.

It uses the library as any user would, and is imported only by the commands that need it.
"""
