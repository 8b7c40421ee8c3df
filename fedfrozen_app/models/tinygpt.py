"""A small causal language model, the FLITE paper's TinyGPT (arXiv:2607.18343, section 4).

Pre-norm blocks of causal self-attention and a GELU MLP of four times the width, learned
positions, and one matrix that embeds tokens and scores them (tied). Query, key, value and output
projections are separate ``nn.Linear`` modules, so a latent maps six matrices a block (36 in all
for ``tinygpt``) and a freeze of queries and keys takes whole entries. There is no dropout.

With 2,048 tokens and a context of 128 ``tinygpt`` has 11,483,136 parameters, 10,646,784 of them
in its six blocks.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

INIT_STD = 0.02  # as GPT-2 starts


@dataclass(frozen=True)
class Size:
    """Number of blocks, width of the residual stream, attention heads."""

    layers: int
    width: int
    heads: int


SIZES = {"tinygpt": Size(6, 384, 6), "tinygpt-mini": Size(2, 128, 4)}


class Attention(nn.Module):
    """Causal multi-head self-attention, [B, T, width] to [B, T, width]."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.q_proj = nn.Linear(width, width)
        self.k_proj = nn.Linear(width, width)
        self.v_proj = nn.Linear(width, width)
        self.out_proj = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        """Let each position attend to itself and those before it."""
        q, k, v = (self._split(project(x)) for project in (self.q_proj, self.k_proj, self.v_proj))
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        out: Tensor = self.out_proj(mixed.transpose(1, 2).flatten(2))
        return out

    def _split(self, x: Tensor) -> Tensor:
        """[B, T, width] -> [B, heads, T, width / heads]."""
        return x.view(*x.shape[:2], self.heads, -1).transpose(1, 2)


class Mlp(nn.Module):
    """Two linear layers with a GELU between them, [B, T, width] to [B, T, width]."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.fc1 = nn.Linear(width, 4 * width)
        self.fc2 = nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        """Apply the layers to each position by itself."""
        out: Tensor = self.fc2(F.gelu(self.fc1(x)))
        return out


class Block(nn.Module):
    """x + attention(norm(x)), then x + mlp(norm(x))."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(width)
        self.attn = Attention(width, heads)
        self.norm2 = nn.LayerNorm(width)
        self.mlp = Mlp(width)

    def forward(self, x: Tensor) -> Tensor:
        """[B, T, width] -> [B, T, width]."""
        x = x + self.attn(self.norm1(x))
        out: Tensor = x + self.mlp(self.norm2(x))
        return out


class TinyGPT(nn.Module):
    """Next-token logits of token sequences.

    Parameters
    ----------
    size : Size
        Blocks, width and heads.
    vocabulary : int
        Number of tokens.
    context_length : int
        The longest sequence.

    Notes
    -----
    ``head.weight`` [vocabulary, width] scores the next token and its rows embed the tokens read;
    it stands in the state dict once, so nothing is sent twice.
    """

    def __init__(self, size: Size, vocabulary: int, context_length: int) -> None:
        super().__init__()
        self.pos_embed = nn.Parameter(torch.empty(1, context_length, size.width))
        self.blocks = nn.ModuleList(Block(size.width, size.heads) for _ in range(size.layers))
        self.norm = nn.LayerNorm(size.width)
        self.head = nn.Linear(size.width, vocabulary, bias=False)
        if not self.pos_embed.is_meta:
            self._fill()

    def _fill(self) -> None:
        """Draw GPT-2's initial values from the global generator.

        Weights are normal with std 0.02, those that write into the residual stream smaller by
        sqrt(2 layers), as 2 layers of them add up; biases are zero and norms the identity.
        """
        nn.init.normal_(self.pos_embed, std=INIT_STD)
        for name, module in self.named_modules():
            if isinstance(module, nn.Linear):
                writes = name.endswith(("out_proj", "fc2"))
                scale = (2 * len(self.blocks)) ** -0.5 if writes else 1.0
                nn.init.normal_(module.weight, std=INIT_STD * scale)
                if module.bias is not None:
                    nn.init.zeros_(module.bias)

    def forward(self, tokens: Tensor) -> Tensor:
        """Return logits [B, T, vocabulary] of the token after each of ``tokens`` int64 [B, T].

        Raises
        ------
        ValueError
            When T exceeds the context.
        """
        length, longest = tokens.shape[1], self.pos_embed.shape[1]
        if length > longest:
            raise ValueError(
                f"a sequence has {length} tokens and the model's context-length is {longest}; "
                "cut it, or build the model with a longer context"
            )
        x = F.embedding(tokens, self.head.weight) + self.pos_embed[:, :length]
        for block in self.blocks:
            x = block(x)
        logits: Tensor = self.head(self.norm(x))
        return logits
