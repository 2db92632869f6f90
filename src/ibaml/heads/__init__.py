"""What does a linear head on fixed features learn from a few examples, and how sure is it of it?

`prior` says what is believed before, `dual` (Laplace) and `variational` what after, `points` what
that means for a query; `from_data` starts from base classes; `baselines`, `plda` and `one_vs_each`
are what others do. Plain functions on tensors with a leading task dimension.
"""
