"""Active labelling: which picture is worth a label next?

    python examples/active_labelling.py

Handwritten digits of scikit-learn. What makes digits differ is learned from five of them. The other
five have one label in all, and hundreds of pictures wait. The classifier asks for the one that
tells it most, until it is right nine times in ten. Labels in random order are the comparison.
"""

import numpy as np
from sklearn.datasets import load_digits

import ibaml

x, y = load_digits(return_X_y=True)
rng = np.random.default_rng(0)
known = np.isin(y, [0, 2, 4, 6, 8])
prior = ibaml.FewShotClassifier().meta_fit(x[known], y[known]).prior_
x, y = x[~known], np.array([f"digit {d}" for d in y[~known]])
order = rng.permutation(len(y))
pool, test = order[:400], order[400:]


def labels_needed(choose, goal=0.9):
    """How many labels until ``goal`` of the test pictures are right."""
    shop, left = ibaml.Classifier(prior), list(pool)
    first = left.pop(0)
    shop.add(x[[first]], [y[first]])
    while len(left) > 300:
        answers = shop.answer(x[test])
        right = np.mean([a == b for a, b in zip(answers.best, y[test], strict=True)])
        if right >= goal:
            return len(shop.labels), right
        number = left.pop(choose(shop, x[left]))
        shop.add(x[[number]], [y[number]])  # a person would be asked here
    return len(shop.labels), right


asked, right = labels_needed(lambda shop, waiting: shop.suggest(waiting, count=1)[0])
print(f"asking:       {asked} labels until {right:.0%} are right")
chance = [labels_needed(lambda shop, waiting: rng.integers(len(waiting)))[0] for _ in range(5)]
print(f"random order: {np.mean(chance):.0f} labels ({min(chance)} to {max(chance)} in five tries)")
