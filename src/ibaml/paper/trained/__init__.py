"""Which method is better after training? Table 1 and Figure 3.

`arms` says which methods are compared and how each is trained, `results` trains and tests them
once, `inside` looks at their meta-gradients, `compared` has the words and rows that both share.
"""
