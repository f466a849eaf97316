"""Step 1: a plain training loop on one device.

python examples/tutorial/step1.py
"""

import sys

import torch

from tiny_lm import TinyLM, batch_of, loss_of

STEPS = int(sys.argv[1]) if len(sys.argv) > 1 else 20

device = torch.device("cuda" if torch.cuda.is_available() else "cpu")

model = TinyLM().to(device)
torch.manual_seed(0)
model.init_weights()

optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
for step in range(1, STEPS + 1):
    tokens = batch_of(step).to(device)
    loss = loss_of(model(tokens[:, :-1]), tokens)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    print(f"step {step}: loss {loss.item():.5f}")
