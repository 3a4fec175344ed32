"""The training loop that everything is measured in: a small GPT with AdamW in fp32. Owns model, optimizer
and step; knows nothing of checkpoints but the gate that a peer may put before the optimizer.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional

from benchmarks.settings import Settings

_BYTES_PER_PARAMETER = 12  # fp32 weight, exp_avg and exp_avg_sq
_HEAD = 64
# Elements that a checksum takes at once: its intermediate values are 8 bytes an element.
_PIECE = 2**22


class Gpt(nn.Module):
    def __init__(self, width: int, layers: int, vocabulary: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        self.blocks = nn.ModuleList(
            nn.TransformerEncoderLayer(
                width, width // _HEAD, 4 * width, dropout=0.0, batch_first=True, norm_first=True
            )
            for _ in range(layers)
        )
        self.head = nn.Linear(width, vocabulary, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        hidden = self.embedding(tokens)
        for block in self.blocks:
            hidden = block(hidden)
        logits: Tensor = self.head(hidden)
        return logits


def shape_of(state_bytes: int, layers: int) -> tuple[int, int]:
    """Width and vocabulary with which the state is at least `state_bytes`, and hardly more: the widest
    blocks that fit, the rest in the embedding. So the number of tensors does not depend on the size."""
    parameters = -(-state_bytes // _BYTES_PER_PARAMETER)
    width = _HEAD
    while layers * _block(width + _HEAD) <= parameters:
        width += _HEAD
    rest = parameters - layers * _block(width)
    return width, max(64, -(-rest // (2 * width)))


def _block(width: int) -> int:
    return 12 * width * width + 13 * width


class Workload:
    """Model, optimizer and one step of training, on the device of the settings."""

    def __init__(self, settings: Settings) -> None:
        torch.set_num_threads(settings.threads)
        torch.manual_seed(0)
        self.device = torch.device(settings.device)
        width, vocabulary = shape_of(settings.state_bytes, settings.layers)
        # Made where it stays: filling gigabytes of weights on the host takes longer than many a measurement.
        with self.device:
            net = Gpt(width, settings.layers, vocabulary)
        self.model = self._placed(net)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4, fused=True)
        self._vocabulary, self._length = vocabulary, settings.length
        self.feed(settings.batch)

    def _placed(self, net: Gpt) -> nn.Module:
        """The model that is trained: among ranks, what holds this rank's share of it."""
        return net

    def feed(self, batch: int) -> None:
        """As many sequences a step from now on: how long a step takes."""
        tokens = torch.randint(0, self._vocabulary, (batch, self._length + 1))
        self._tokens = tokens.to(self.device)

    def step(self, gate: Callable[[], None] | None = None) -> None:
        """One iteration. `gate` is called before the optimizer changes what a peer may still be reading."""
        with torch.autocast(self.device.type, torch.bfloat16, enabled=self.device.type == "cuda"):
            logits = self.model(self._tokens[:, :-1])
        loss = functional.cross_entropy(logits.flatten(0, 1).float(), self._tokens[:, 1:].flatten())
        torch.autograd.backward(loss)
        if gate is not None:
            gate()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def sync(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize()

    def leaves(self) -> dict[str, Tensor]:
        """All tensors of the state by name. The optimizer's exist after the first step."""
        found = {f"model.{name}": tensor for name, tensor in self.model.state_dict().items()}
        names: dict[Tensor, str] = {leaf: name for name, leaf in self.model.named_parameters()}
        for parameter, state in self.optimizer.state.items():
            for key, value in state.items():
                if isinstance(value, Tensor):
                    found[f"optimizer.{names[parameter]}.{key}"] = value
        return found

    def num_bytes(self) -> int:
        return sum(leaf.numel() * leaf.element_size() for leaf in self.leaves().values())

    def fingerprint(self) -> dict[str, int]:
        """A checksum of every tensor: two states are equal when their fingerprints are."""
        return {name: checksum(leaf) for name, leaf in self.leaves().items()}


def checksum(leaf: Tensor, first: int = 0) -> int:
    """A checksum of a tensor of 4-byte elements, taken where it lives and by torch alone: each word times a
    number that its place decides, modulo 2**64. `first`: how many elements of the whole come before this part
    of it; the checksums of all parts add up to that of the whole."""
    words = leaf.detach().contiguous().reshape(-1).view(torch.int32)
    total = torch.zeros((), dtype=torch.int64, device=leaf.device)
    for at in range(0, len(words), _PIECE):
        piece = words[at : at + _PIECE].long()
        places = torch.arange(first + at, first + at + len(piece), device=leaf.device)
        total += ((piece + 3) * (2 * places + 1)).sum()
    return int(total)
