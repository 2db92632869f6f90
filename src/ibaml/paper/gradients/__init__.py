"""How far is a meta-gradient from the true one? Figure 1, and Theorems 1 and 2.

`linear` is the paper's test and its exact answer, `rules` the meta-gradient of one task; `fig1`
computes the curves of Figure 1; `theorems` has the bounds, `terms` what is in them, `bounds` the
study of both.
"""
