"""One thread per worker: two workers share two cores, and sums come out the same everywhere."""

import hypothesis
import torch

torch.set_num_threads(1)
hypothesis.settings.register_profile("ibaml", deadline=None, max_examples=25, derandomize=True)
hypothesis.settings.load_profile("ibaml")
