"""What holds for every test: tiny models run best, and most repeatably, on one thread."""

import torch

torch.set_num_threads(1)
