import torch

# The tests' products are tiny: threads cost more than they give.
torch.set_num_threads(1)
