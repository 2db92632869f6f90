"""How well can a linear head on fixed features be learned from a few examples, and how sure is it?"""
