"""A reader's edit of the model or of the optimizer works in all five files, or is refused; it is never wrong in
silence.

The tables below are edits that students make. Each is a list of replacements of text, made in all five files. What
works trains as plain.py does, and as all stages do, bit for bit. What can't work ends with a line that says where.
"""

import re

import pytest
from launch import ROOT, STAGES, launch, losses, norms

FILES = (*STAGES, "zero_r.py")
# Dimensions of heads are even, for rotations, and still every layer needs padding. Large steps: an update that goes
# wrong is seen in the next loss.
SMALL = (
    "--layers 2 --width 36 --heads 6 --vocab 257 --context 16 --batch 2 --steps 5 --warmup 2 --lr 3e-3 --dtype float32"
).split()


def edited(source, changes):
    """A change is (text, new text), or (name of a class of the model, a whole new class)."""
    for old, new in changes:
        if old in ("Embedding", "Block", "Head"):
            old = re.search(rf"class {old}\(nn.Module\):\n.*?\n\n\n(?=\S)", source, re.DOTALL)[0]
            new = new.lstrip("\n") + "\n\n"
        assert old in source, old
        source = source.replace(old, new)
    return source


def run_all(folder, changes, plain=(), files=FILES, options=()):
    """The runs of the edited files on two ranks, and of an edited copy of plain.py, the last."""
    for file in {*files, STAGES[0]}:
        (folder / file).write_text(edited((ROOT / file).read_text(), changes))
    (folder / "plain.py").write_text(edited((ROOT / "tests/plain.py").read_text(), plain))
    yield from (launch(folder / file, *SMALL, *options, ranks=2) for file in files)
    yield launch(folder / "plain.py", 2, *SMALL, *options)


# Places in the model where an edit goes. What stands here is in all five files.
EMBEDDING = "        self.token = nn.Embedding(cfg.vocab, cfg.width)\n"
EMBEDDED = "return self.token(x) + self.position.weight[: x.shape[1]]\n"
NORM = "        self.attention_norm = nn.LayerNorm(cfg.width)\n"
ENTRY = "        B, T, C = x.shape\n"
HEAD = "        self.logits = nn.Linear(cfg.width, cfg.vocab, bias=False)\n"
LOGITS = "        logits = self.logits(self.norm(x)).float()"
LOSS = "return F.cross_entropy(logits.flatten(0, 1), y.flatten())\n"
BLOCK = "class Block(nn.Module):\n"


def block(init, forward, before=""):
    """A whole Block, from the lines of its two functions."""
    init, forward = ("".join(f"        {line}\n" for line in text.strip().splitlines()) for text in (init, forward))
    return (
        f"{before.strip()}\n\n\n".lstrip()
        + BLOCK
        + f"    def __init__(self, cfg):\n        super().__init__()\n{init}\n"
        + f"    def forward(self, x, y):\n{forward}\n"
    )


def mlp(init, forward):
    """A Block without attention: what mixes tokens is a mean over the earlier ones."""
    mean = "x = x + x.cumsum(1) / torch.arange(1, x.shape[1] + 1, device=x.device)[:, None]\n"
    return block("self.norm = nn.LayerNorm(cfg.width)\n" + init, mean + forward)


ATTENTION = """
self.heads = cfg.heads
self.norm = nn.LayerNorm(cfg.width)
self.qkv = nn.Linear(cfg.width, 3 * cfg.width)
self.attention_proj = nn.Linear(cfg.width, cfg.width)
self.mlp = nn.Sequential(nn.LayerNorm(cfg.width), nn.Linear(cfg.width, 2 * cfg.width), nn.GELU())
self.mlp_proj = nn.Linear(2 * cfg.width, cfg.width)
initialize(self, cfg)
"""
ATTEND = """
B, T, C = x.shape
q, k, v = self.qkv(self.norm(x)).view(B, T, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
%s
heads = F.scaled_dot_product_attention(q, k, v, is_causal=True)
x = x + self.attention_proj(heads.transpose(1, 2).reshape(B, T, -1))
return x + self.mlp_proj(self.mlp(x))
"""
ANGLES = """
size = cfg.width // cfg.heads
turns = 1e4 ** (-torch.arange(0, size, 2) / size)
angles = torch.outer(torch.arange(cfg.context), turns)
"""

# ---- What trains as in plain PyTorch -------------------------------------------------------------------------

WORKS = {
    "architecture": {
        "RMSNorm": [("nn.LayerNorm(cfg.width)", "nn.RMSNorm(cfg.width)")],
        "a norm written out": [
            ("nn.LayerNorm(cfg.width)", "Norm(cfg.width)"),
            (
                "class Embedding(nn.Module):\n",
                "class Norm(nn.Module):\n    def __init__(self, size):\n        super().__init__()\n"
                "        self.weight = nn.Parameter(torch.ones(size))\n\n    def forward(self, x):\n"
                "        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6) * self.weight\n\n\n"
                "class Embedding(nn.Module):\n",
            ),
        ],
        "SwiGLU": [
            (
                "Block",
                mlp(
                    "self.gate = nn.Linear(cfg.width, 50, bias=False)\nself.up = nn.Linear(cfg.width, 50, bias=False)\n"
                    "self.down_proj = nn.Linear(50, cfg.width, bias=False)\ninitialize(self, cfg)",
                    "h = self.norm(x)\nreturn x + self.down_proj(F.silu(self.gate(h)) * self.up(h))",
                ),
            )
        ],
        "RoPE, a real buffer": [
            (
                "Block",
                block(
                    ATTENTION + ANGLES + 'self.register_buffer("cos", angles.cos())\n'
                    'self.register_buffer("sin", angles.sin(), persistent=False)',
                    ATTEND % "q, k = self.rotate(q), self.rotate(k)",
                ).replace(
                    "    def forward",
                    "    def rotate(self, x):\n        a, b = x[..., ::2], x[..., 1::2]\n"
                    "        cos, sin = self.cos[: x.shape[2]], self.sin[: x.shape[2]]\n"
                    "        return torch.stack((a * cos - b * sin, a * sin + b * cos), -1).flatten(-2)\n\n"
                    "    def forward",
                ),
            )
        ],
        "RoPE, a complex buffer": [
            (
                "Block",
                block(
                    ATTENTION + ANGLES + 'self.register_buffer("turn", torch.polar(torch.ones_like(angles), angles))',
                    ATTEND % "q, k = self.rotate(q), self.rotate(k)",
                ).replace(
                    "    def forward",
                    "    def rotate(self, x):\n"
                    "        z = torch.view_as_complex(x.float().reshape(*x.shape[:-1], -1, 2))\n"
                    "        z = z * self.turn[: x.shape[2]]\n"
                    "        return torch.view_as_real(z).flatten(-2).to(x.dtype)\n\n    def forward",
                ),
            )
        ],
        "RoPE, computed in each call": [
            (
                "Block",
                block(
                    ATTENTION,
                    ATTEND
                    % "turns = 1e4 ** (-torch.arange(0, C // self.heads, 2, device=x.device) / (C // self.heads))\n"
                    "angles = torch.outer(torch.arange(T, device=x.device), turns).repeat(1, 2)\n"
                    "half = lambda z: torch.cat([-z.chunk(2, -1)[1], z.chunk(2, -1)[0]], -1)\n"
                    "q, k = (z * angles.cos() + half(z) * angles.sin() for z in (q, k))",
                ),
            )
        ],
        "a causal mask": [
            (
                "Block",
                block(
                    ATTENTION
                    + 'self.register_buffer("mask", torch.triu(torch.ones(cfg.context, cfg.context), 1).bool())',
                    ATTEND.replace(
                        "F.scaled_dot_product_attention(q, k, v, is_causal=True)",
                        "((q @ k.transpose(-2, -1)) / math.sqrt(q.shape[-1]))"
                        ".masked_fill(self.mask[:T, :T], -math.inf).softmax(-1) @ v",
                    )
                    % "",
                ),
            )
        ],
        "ALiBi, a list of slopes": [
            (
                "Block",
                block(
                    ATTENTION + "self.slopes = [2.0**-i for i in range(cfg.heads)]",
                    ATTEND.replace("is_causal=True", "attn_mask=bias")
                    % "distance = torch.arange(T, device=x.device)[:, None] - torch.arange(T, device=x.device)\n"
                    "slopes = torch.tensor(self.slopes, device=x.device)[:, None, None]\n"
                    "bias = (-slopes * distance).masked_fill(distance < 0, -math.inf)",
                ),
            )
        ],
        "grouped queries": [
            (
                "Block",
                block(
                    ATTENTION.replace("3 * cfg.width)", "cfg.width + 2 * 2 * (cfg.width // cfg.heads))"),
                    ATTEND.replace(
                        "q, k, v = self.qkv(self.norm(x)).view(B, T, 3, self.heads, -1).permute(2, 0, 3, 1, 4)",
                        "q, k, v = self.qkv(self.norm(x)).view(B, T, -1, C // self.heads).transpose(1, 2)"
                        ".split([self.heads, 2, 2], 1)",
                    ).replace("is_causal=True", "is_causal=True, enable_gqa=True")
                    % "",
                ),
            )
        ],
        "nn.MultiheadAttention": [
            (
                "Block",
                block(
                    "self.norm = nn.LayerNorm(cfg.width)\n"
                    "self.attention = nn.MultiheadAttention(cfg.width, cfg.heads, batch_first=True)",
                    "mask = nn.Transformer.generate_square_subsequent_mask(x.shape[1], dtype=x.dtype)\n"
                    "h = self.norm(x)\n"
                    "return x + self.attention(h, h, h, attn_mask=mask, need_weights=False, is_causal=True)[0]",
                ),
            )
        ],
        "nn.TransformerEncoderLayer": [
            (
                "Block",
                block(
                    "self.layer = nn.TransformerEncoderLayer(cfg.width, cfg.heads, 60, dropout=0.0, batch_first=True,"
                    " norm_first=True)",
                    "mask = nn.Transformer.generate_square_subsequent_mask(x.shape[1], dtype=x.dtype)\n"
                    "return self.layer(x, src_mask=mask, is_causal=True)",
                ),
            )
        ],
        "LSTM": [
            (
                "Block",
                block(
                    "self.norm = nn.LayerNorm(cfg.width)\nself.lstm = nn.LSTM(cfg.width, cfg.width, batch_first=True)",
                    "return x + self.lstm(self.norm(x))[0]",
                ),
            )
        ],
        "a convolution": [
            (
                "Block",
                block(
                    "self.norm = nn.LayerNorm(cfg.width)\nself.conv = nn.Conv1d(cfg.width, cfg.width, 3, groups=4)",
                    "h = F.pad(self.norm(x).transpose(1, 2), (2, 0))\nreturn x + F.gelu(self.conv(h)).transpose(1, 2)",
                ),
            )
        ],
        "experts, some of them unused": [
            (
                "Block",
                mlp(
                    "self.router = nn.Linear(cfg.width, 8)\n"
                    "self.experts = nn.ModuleList(nn.Linear(cfg.width, cfg.width) for _ in range(8))\n"
                    "nn.init.normal_(self.router.weight)",  # else the last bit of a logit may decide
                    "h = self.norm(x)\nweight, chosen = self.router(h).softmax(-1).max(-1)\nout = torch.zeros_like(x)\n"
                    "for i, expert in enumerate(self.experts):\n    where = chosen == i\n"
                    "    if i < 6 and where.any():\n"
                    "        out[where] = weight[where].unsqueeze(-1) * expert(h[where])\nreturn x + out",
                ),
            )
        ],
        "a parameter that is never used": [
            (NORM, NORM + "        self.spare = nn.Parameter(torch.ones(3))\n"),
        ],
        "parallel attention and MLP": [("mlp_norm(x)", "mlp_norm(x0)"), (ENTRY, ENTRY + "        x0 = x\n")],
        "an odd block differs": [
            ("F.gelu(", "self.act("),
            (NORM, NORM + "        self.act = nn.GELU() if sum(map(ord, str(cfg.seed))) else nn.ReLU()\n"),
        ],
        "0-d and 3-d parameters": [
            (
                NORM,
                NORM + "        self.gain = nn.Parameter(torch.tensor(1.5))\n"
                "        self.mix = nn.Parameter(torch.ones(2, 3, 6) / 2)\n",
            ),
            ("F.gelu(", "self.gain * self.mix.sum(0).flatten().mean() * F.gelu("),
        ],
        "ParameterDict and ParameterList": [
            (
                "Block",
                mlp(
                    'self.w = nn.ParameterDict({"a": nn.Parameter(torch.full((cfg.width, cfg.width), 0.02))})\n'
                    "self.l = nn.ParameterList([torch.zeros(cfg.width) for _ in range(2)])",
                    'return x + self.norm(x) @ self.w["a"] + self.l[0] * self.l[1] + self.l[1]',
                ),
            )
        ],
        "fourier positions instead of learned ones": [
            (
                "        self.position = nn.Embedding(cfg.context, cfg.width)\n",
                "        turns = 1e4 ** (-torch.arange(cfg.width) / cfg.width)\n"
                "        angles = torch.outer(torch.arange(cfg.context), turns)\n"
                '        self.register_buffer("position", angles.sin())\n',
            ),
            ("self.position.weight[", "self.position["),
        ],
    },
    "details": {
        "ReLU": [("F.gelu(", "F.relu(")],
        "ReLU in place": [("F.gelu(self", "nn.ReLU(inplace=True)(self")],
        "an activation of one's own": [
            ("F.gelu(", "Step.apply("),
            (
                BLOCK,
                "class Step(torch.autograd.Function):\n    @staticmethod\n    def forward(ctx, x):\n"
                "        ctx.save_for_backward(x)\n        return x.relu().square()\n\n    @staticmethod\n"
                "    def backward(ctx, dout):\n        return 2 * ctx.saved_tensors[0].relu() * dout\n\n\n" + BLOCK,
            ),
        ],
        "no biases": [("3 * cfg.width)", "3 * cfg.width, bias=False)")],
        "a bias in the head": [("cfg.vocab, bias=False)", "cfg.vocab)")],
        "another init": [("std=0.02)", "std=0.05)"), ("nn.init.zeros_(weight)", "nn.init.constant_(weight, 0.01)")],
        "PyTorch's init": [("        initialize(self, cfg)\n", "")],
        "an orthogonal init": [("nn.init.normal_(weight, std=0.02)", "nn.init.orthogonal_(weight, 0.1)")],
        "weights of 4 numbers in place": [
            (EMBEDDING, EMBEDDING + "        with torch.no_grad():\n            self.token.weight[:4] *= 0.1\n")
        ],
        "soft-capped logits": [(LOGITS, LOGITS + "\n        logits = 5 * torch.tanh(logits / 5)")],
        "label smoothing": [("y.flatten())\n", "y.flatten(), label_smoothing=0.1)\n")],
        "z-loss": [(LOSS, LOSS.replace("y.flatten())", "y.flatten()) + 1e-2 * logits.logsumexp(-1).square().mean()"))],
        "a loss of the last half": [
            (LOSS, LOSS.replace("logits.", "logits[:, 8:].").replace("y.flatten", "y[:, 8:].flatten"))
        ],
        "a loss without a mean": [("y.flatten())\n", 'y.flatten(), reduction="sum") / y.numel()\n')],
        "scaled embeddings": [
            (EMBEDDED, EMBEDDED.replace("\n", " * 3\n").replace("self.token(x)", "3 * self.token(x)"))
        ],
        "a norm after the embedding": [
            (EMBEDDING, EMBEDDING + "        self.norm = nn.LayerNorm(cfg.width)\n"),
            (EMBEDDED, "return self.norm(self.token(x) + self.position.weight[: x.shape[1]])\n"),
        ],
        "padding_idx": [("nn.Embedding(cfg.vocab, cfg.width)", "nn.Embedding(cfg.vocab, cfg.width, padding_idx=32)")],
        "a block reads y": [(ENTRY, ENTRY + "        x = x * (1 + (y % 3 == 0).unsqueeze(-1).to(x.dtype) / 8)\n")],
        "a constant of Python": [(NORM, NORM + "        self.damping = 0.5\n"), ("F.gelu(", "self.damping * F.gelu(")],
        "a constant made in forward": [(ENTRY, ENTRY + "        x = x * torch.tensor(1.25, device=x.device)\n")],
        "detach within the block": [("F.gelu(self.mlp_up(", "F.gelu(self.mlp_up(0.5 * x.detach() + ")],
    },
    "sharing within a layer": {
        "one norm for both": [
            ("        self.mlp_norm = nn.LayerNorm(cfg.width)\n", "        self.mlp_norm = self.attention_norm\n")
        ],
        "one weight for two": [
            (
                "        initialize(self, cfg)\n\n    def forward(self, x, y):  # x (B, T, C) -> (B, T, C)",
                "        self.mlp_norm.weight = self.attention_norm.weight\n        initialize(self, cfg)\n\n"
                "    def forward(self, x, y):  # x (B, T, C) -> (B, T, C)",
            ),
        ],
        "a module twice in a call": [("self.mlp_norm(x)", "self.mlp_norm(self.mlp_norm(x))")],
        "a weight transposed": [
            (
                "Block",
                mlp(
                    "self.w = nn.Parameter(torch.randn(cfg.width, 50) / 50)",
                    "return x + F.gelu(self.norm(x) @ self.w) @ self.w.T",
                ),
            ),
        ],
        "weight_norm": [
            (
                "nn.Linear(cfg.width, 3 * cfg.width)",
                "nn.utils.parametrizations.weight_norm(nn.Linear(cfg.width, 3 * cfg.width))",
            )
        ],
        "a parametrization": [
            (
                "Block",
                mlp(
                    "self.w = nn.Linear(cfg.width, cfg.width)\nnn.utils.parametrize.register_parametrization("
                    'self.w, "weight", nn.Softmax(1))\n',
                    "return x + self.w(self.norm(x))",
                ),
            )
        ],
    },
    "buffers and constants": {
        "a random buffer": [
            (NORM, NORM + '        self.register_buffer("gain", 1 + torch.rand(cfg.width))\n'),
            ("F.gelu(self.mlp_up(", "F.gelu(self.mlp_up(self.gain * "),
        ],
        "a buffer of integers": [
            (NORM, NORM + '        self.register_buffer("order", torch.randperm(cfg.width))\n'),
            ("F.gelu(self.mlp_up(self.mlp_norm(x)", "F.gelu(self.mlp_up(self.mlp_norm(x)[..., self.order]"),
        ],
        "a buffer shared by all blocks": [
            (BLOCK, "GAIN = torch.linspace(0.5, 1.5, 36)\n\n\n" + BLOCK),
            (NORM, NORM + '        self.register_buffer("gain", GAIN)\n'),
            ("F.gelu(self.mlp_up(", "F.gelu(self.mlp_up(self.gain * "),
        ],
        "a mask made in the first call": [
            (NORM, NORM + "        self.gain = None\n"),
            (
                ENTRY,
                ENTRY + "        if self.gain is None:\n"
                "            self.gain = torch.linspace(0.5, 1.5, C, device=x.device)\n        x = x * self.gain\n",
            ),
        ],
        "a global cache": [
            (BLOCK, "CACHE = {}\n\n\n" + BLOCK),
            (
                ENTRY,
                ENTRY + "        if T not in CACHE:\n"
                "            CACHE[T] = torch.linspace(0.5, 1.5, C, device=x.device)\n        x = x * CACHE[T]\n",
            ),
        ],
        "a global tensor": [
            (BLOCK, "GAIN = torch.linspace(0.5, 1.5, 36)\n\n\n" + BLOCK),
            (ENTRY, ENTRY + "        x = x * GAIN\n"),
        ],
        "numpy in __init__": [
            (
                NORM,
                NORM + '        import numpy\n\n        self.register_buffer("gain", '
                "torch.from_numpy(numpy.linspace(0.5, 1.5, cfg.width, dtype=numpy.float32)))\n",
            ),
            ("F.gelu(self.mlp_up(", "F.gelu(self.mlp_up(self.gain * "),
        ],
    },
    "shapes and views": {
        "an output that is not contiguous": [
            ("F.gelu(", "F.gelu("),
            (
                "        return x + self.",
                "        x = x.transpose(1, 2).contiguous().transpose(1, 2)\n        return x + self.",
            ),
            (
                EMBEDDED,
                EMBEDDED.replace("\n", "").replace("return ", "return (")
                + ").transpose(0, 1).contiguous().transpose(0, 1)\n",
            ),
        ],
        "a detached part of the embedding": [(EMBEDDED, EMBEDDED.replace("self.token(x)", "self.token(x).detach()"))],
        "labels that are ignored": [(LOSS, LOSS.replace("y.flatten()", "y.masked_fill(y == 32, -100).flatten()"))],
        "BatchNorm without running statistics": [
            (
                "Block",
                block(
                    "self.norm = nn.BatchNorm1d(cfg.width, track_running_stats=False)\n"
                    "self.up = nn.Linear(cfg.width, cfg.width)",
                    "return x + self.up(self.norm(x.transpose(1, 2)).transpose(1, 2))",
                ),
            ),
        ],
    },
}

ADAM = "torch.optim.Adam("
# Edits of the five files and of plain.py.
OPTIMIZER = {
    "AdamW": [(ADAM, "torch.optim.AdamW(weight_decay=0.5, params=")],
    "betas and eps": [(ADAM, "torch.optim.Adam(betas=(0.8, 0.9), eps=1e-3, params=")],
    "amsgrad": [(ADAM, "torch.optim.Adam(amsgrad=True, params=")],
    "maximize": [(ADAM, "torch.optim.Adam(maximize=True, params=")],
    "not fused": [(ADAM, "torch.optim.Adam(foreach=None, params="), (", fused=True)", ")")],
    "SGD fused": [(ADAM, "torch.optim.SGD(momentum=0.9, params=")],
    "SGD": [(ADAM, "torch.optim.SGD(momentum=0.9, params="), (", fused=True)", ")")],
    "RMSprop": [(ADAM, "torch.optim.RMSprop("), (", fused=True)", ")")],
    "Adagrad": [(ADAM, "torch.optim.Adagrad("), (", fused=True)", ")")],
    "NAdam": [(ADAM, "torch.optim.NAdam("), (", fused=True)", ")")],
    "a schedule": [("min(1, (step + 1) / max(1, cfg.warmup))", "(1 - step / cfg.steps)")],
}

# ---- What is refused -----------------------------------------------------------------------------------------

DAMPED = ("F.gelu(", "self.damping * F.gelu(")
GLOBAL = "SHARED = {}\n\n\n"
SCALE = "        self.scale = %s\n"
SCALED = (ENTRY, ENTRY + "        x = x * self.scale\n")
TOKEN = (EMBEDDING, EMBEDDING + '        SHARED["token"] = self.token\n')
BLOCKS = '        layers.append(Layer(f"block {i}", Block, cfg, comm, device))\n'
MADE = '    layers.append(Layer("head", Head, cfg, comm, device))\n    return layers\n'

REFUSED = {
    "weights of two layers": {
        "a shared module": [
            (BLOCK, "SHARED = nn.LayerNorm(36)\n\n\n" + BLOCK),
            ("mlp_norm = nn.LayerNorm(cfg.width)", "mlp_norm = SHARED"),
        ],
        "a shared parameter": [
            (BLOCK, "SHARED = nn.Parameter(torch.ones(36))\n\n\n" + BLOCK),
            (NORM, NORM + SCALE % "SHARED"),
            SCALED,
        ],
        "a parameter in a list": [
            (NORM, NORM + SCALE % "[nn.Parameter(torch.ones(36))]"),
            (ENTRY, ENTRY + "        x = x * self.scale[0]\n"),
        ],
        "a global parameter": [
            (BLOCK, "SHARED = nn.Parameter(torch.ones(36))\n\n\n" + BLOCK),
            (ENTRY, ENTRY + "        x = x * SHARED\n"),
        ],
        "a global list of parameters": [
            (BLOCK, "SHARED = [nn.Parameter(torch.ones(36))]\n\n\n" + BLOCK),
            (ENTRY, ENTRY + "        x = x * SHARED[0]\n"),
        ],
        "a global module": [
            (BLOCK, "SHARED = nn.LayerNorm(36)\n\n\n" + BLOCK),
            ("self.mlp_norm(x)", "SHARED(self.mlp_norm(x))"),
        ],
        "a parameter in a closure": [
            (NORM, NORM + "        scale = nn.Parameter(torch.ones(cfg.width))\n" + SCALE % "lambda x: x * scale"),
            (ENTRY, ENTRY + "        x = self.scale(x)\n"),
        ],
        "a module in a plain list": [
            (NORM, NORM + SCALE % "[nn.LayerNorm(cfg.width)]"),
            (ENTRY, ENTRY + "        x = self.scale[0](x)\n"),
        ],
        "the head's weight is the embedding's": [
            ("class Embedding(nn.Module):\n", GLOBAL + "class Embedding(nn.Module):\n"),
            TOKEN,
            (HEAD, HEAD + '        self.logits.weight = SHARED["token"].weight\n'),
        ],
        "the head's weight is the first embedding's": [
            ("class Embedding(nn.Module):\n", GLOBAL + "class Embedding(nn.Module):\n"),
            (EMBEDDING, EMBEDDING + '        SHARED.setdefault("token", self.token)\n'),
            (HEAD, HEAD + '        self.logits.weight = SHARED["token"].weight\n'),
        ],
        "the head's data is the embedding's": [
            ("class Embedding(nn.Module):\n", GLOBAL + "class Embedding(nn.Module):\n"),
            TOKEN,
            (
                "        self.logits = nn.Linear(cfg.width, cfg.vocab, bias=False)\n        initialize(self, cfg)\n",
                HEAD + '        initialize(self, cfg)\n        self.logits.weight.data = SHARED["token"].weight.data\n',
            ),
        ],
        "the head calls the embedding's weight": [
            ("class Embedding(nn.Module):\n", GLOBAL + "class Embedding(nn.Module):\n"),
            TOKEN,
            (LOGITS, LOGITS.replace("self.logits(self.norm(x))", 'F.linear(self.norm(x), SHARED["token"].weight)')),
        ],
        "blocks share through a cache": [
            (
                BLOCK,
                "import functools\n\n\n@functools.cache\ndef norm(size):\n    return nn.LayerNorm(size)\n\n\n" + BLOCK,
            ),
            ("mlp_norm = nn.LayerNorm(cfg.width)", "mlp_norm = norm(cfg.width)"),
        ],
        "a layer used twice": [(BLOCKS, BLOCKS + "        layers.append(layers[-1])\n")],
        "one module for all blocks": [
            (
                MADE,
                MADE.replace(
                    "    return", "    for layer in layers[2:-1]:\n        layer.module = layers[1].module\n    return"
                ),
            )
        ],
    },
    "values of two layers": {
        "a skip connection around layers": [
            ("class Embedding(nn.Module):\n", GLOBAL + "class Embedding(nn.Module):\n"),
            (EMBEDDED, EMBEDDED.replace("return ", 'SHARED["x"] = ') + '        return SHARED["x"]\n'),
            (ENTRY, ENTRY + '        x = x + 0.5 * SHARED["x"]\n'),
        ],
        "an auxiliary loss in a list": [
            ("class Embedding(nn.Module):\n", "LOSSES = []\n\n\nclass Embedding(nn.Module):\n"),
            (ENTRY, ENTRY + "        LOSSES.append(0.1 * x.square().mean())\n"),
            (
                LOSS,
                "loss = F.cross_entropy(logits.flatten(0, 1), y.flatten()) + sum(LOSSES)\n"
                "        LOSSES.clear()\n        return loss\n",
            ),
        ],
        "an auxiliary loss as an attribute": [
            ("class Embedding(nn.Module):\n", "LOSSES = {}\n\n\nclass Embedding(nn.Module):\n"),
            (ENTRY, ENTRY + "        LOSSES[id(self)] = 0.1 * x.square().mean()\n"),
            (LOSS, LOSS.replace("y.flatten())", "y.flatten()) + sum(LOSSES.values())")),
        ],
    },
    "tensors that are no buffers": {
        "an attribute": [(NORM, NORM + SCALE % "torch.tensor(0.5)"), SCALED],
        "a list": [(NORM, NORM + SCALE % "[torch.tensor(0.5)]"), (ENTRY, ENTRY + "        x = x * self.scale[0]\n")],
        "a dict": [
            (NORM, NORM + SCALE % '{"a": torch.tensor(0.5)}'),
            (ENTRY, ENTRY + '        x = x * self.scale["a"]\n'),
        ],
        "a closure": [
            (NORM, NORM + "        scale = torch.tensor(0.5)\n" + SCALE % "lambda x: x * scale"),
            (ENTRY, ENTRY + "        x = self.scale(x)\n"),
        ],
        "a cache filled in __init__": [
            (BLOCK, GLOBAL + BLOCK),
            (NORM, NORM + '        SHARED.setdefault("scale", torch.tensor(0.5))\n'),
            (ENTRY, ENTRY + '        x = x * SHARED["scale"]\n'),
        ],
        "a function with a cache, called in __init__": [
            (
                BLOCK,
                "import functools\n\n\n@functools.cache\ndef gain(size):\n"
                "    return torch.linspace(0.5, 1.5, size)\n\n\n" + BLOCK,
            ),
            (NORM, NORM + '        self.register_buffer("scale", gain(cfg.width))\n'),
            SCALED,
        ],
        "a shape": [
            (NORM, NORM + SCALE % "torch.tensor(0.5)"),
            (ENTRY, ENTRY + "        x = x * len(self.scale.shape) + x\n"),
        ],
        "item() in __init__": [
            (NORM, NORM + SCALE % "torch.linspace(0.5, 0.7, 3)[1].item()"),
            SCALED,
        ],
        "tolist() in __init__": [(NORM, NORM + SCALE % "torch.linspace(0.5, 0.7, 3).tolist()[1]"), SCALED],
        "if of a tensor in __init__": [
            (NORM, NORM + "        if torch.ones(3).sum() > 2:\n    " + SCALE % "2.0"),
            SCALED,
        ],
        "scale of a weight": [
            (
                "        self.mlp_norm = nn",
                SCALE % "float(self.qkv.weight.abs().mean())" + "        self.mlp_norm = nn",
            ),
            SCALED,
        ],
    },
    "counts in Python": {
        "blocks count themselves": [
            (BLOCK, "COUNT = []\n\n\n" + BLOCK),
            (NORM, NORM + "        COUNT.append(0)\n" + SCALE % "1 / len(COUNT)"),
            SCALED,
        ],
        "even blocks differ": [
            (BLOCK, "COUNT = []\n\n\n" + BLOCK),
            (NORM, NORM + "        COUNT.append(0)\n" + SCALE % "1 + len(COUNT) % 2"),
            SCALED,
        ],
        "calls are counted": [
            (NORM, NORM + SCALE % "1.0"),
            (ENTRY, ENTRY + "        self.scale *= 1.01\n        x = x * self.scale\n"),
        ],
        "a schedule of calls": [
            (NORM, NORM + SCALE % "0"),
            (ENTRY, ENTRY + "        self.scale += 1\n        x = x * (1 if self.scale < 8 else 1.5)\n"),
        ],
        "depends on gradients being on": [(ENTRY, ENTRY + "        x = x * (1.5 if torch.is_grad_enabled() else 1)\n")],
        "depends on the input's requires_grad": [(ENTRY, ENTRY + "        x = x * (1.5 if x.requires_grad else 1)\n")],
    },
    "other on each rank": {
        "an init by random": [
            (
                HEAD + "        initialize(self, cfg)\n",
                HEAD + "        initialize(self, cfg)\n"
                "        with torch.no_grad():\n            self.logits.weight[0, 0] = random.random()\n",
            )
        ],
        "an init by numpy": [
            (
                HEAD + "        initialize(self, cfg)\n",
                HEAD + "        initialize(self, cfg)\n"
                "        import numpy\n\n        draw = numpy.random.default_rng()\n"
                "        self.logits.weight.data.copy_(torch.tensor(draw.normal(0, 0.02, (cfg.vocab, cfg.width))))\n",
            )
        ],
        "an init by the time": [(EMBEDDING, EMBEDDING + "        torch.manual_seed(time.time_ns())\n")],
        "an init by the rank": [(EMBEDDING, EMBEDDING + "        torch.manual_seed(dist.get_rank())\n")],
        "an order by random": [
            (
                NORM.replace("attention", "mlp"),
                NORM.replace("attention", "mlp")
                + "        self.gain = nn.Parameter(torch.tensor(random.sample(range(36), 36)) / 36)\n",
            ),
            ("F.gelu(self.mlp_up(", "F.gelu(self.mlp_up(self.gain * "),
        ],
        "a buffer by random": [
            (NORM, NORM + '        self.register_buffer("damping", torch.full((), random.random()))\n'),
            DAMPED,
        ],
        "a number by random": [(NORM, NORM + "        self.damping = random.random()\n"), DAMPED],
        "a number by the rank": [(NORM, NORM + "        self.damping = 1 / (1 + dist.get_rank())\n"), DAMPED],
        "the rank in forward": [("F.gelu(self", "(1 + dist.get_rank()) * F.gelu(self")],
    },
    "state that forward changes": {
        "spectral_norm": [
            (
                "nn.Linear(cfg.width, 3 * cfg.width)",
                "nn.utils.parametrizations.spectral_norm(nn.Linear(cfg.width, 3 * cfg.width))",
            )
        ],
        "BatchNorm": [
            (
                "Block",
                block(
                    "self.norm = nn.BatchNorm1d(cfg.width)\nself.up = nn.Linear(cfg.width, cfg.width)",
                    "return x + self.up(self.norm(x.transpose(1, 2)).transpose(1, 2))",
                ),
            ),
        ],
        "a counter": [
            (NORM, NORM + '        self.register_buffer("calls", torch.zeros(()))\n'),
            (ENTRY, ENTRY + "        self.calls += 1\n        x = x * (1 + self.calls / 100)\n"),
        ],
        "a counter that is replaced": [
            (NORM, NORM + '        self.register_buffer("calls", torch.zeros(()))\n'),
            (ENTRY, ENTRY + "        self.calls = self.calls + 1\n        x = x * (1 + self.calls / 100)\n"),
        ],
        "a running mean": [
            (NORM, NORM + '        self.register_buffer("mean", torch.zeros(cfg.width))\n'),
            (ENTRY, ENTRY + "        self.mean.lerp_(x.detach().mean((0, 1)), 0.1)\n        x = x - self.mean\n"),
        ],
        "a running mean in the embedding": [
            (EMBEDDING, EMBEDDING + '        self.register_buffer("mean", torch.zeros(cfg.width))\n'),
            (
                EMBEDDED,
                "x = self.token(x) + self.position.weight[: x.shape[1]]\n"
                "        self.mean.lerp_(x.detach().mean((0, 1)), 0.1)\n        return x - self.mean\n",
            ),
        ],
        "a generator of one's own": [
            (NORM, NORM + "        self.random = torch.Generator()\n"),
            (ENTRY, ENTRY + "        x = x * (torch.rand(x.shape, generator=self.random) > 0.1)\n"),
        ],
        "weights changed in forward": [
            (ENTRY, ENTRY + "        with torch.no_grad():\n            self.qkv.weight.clamp_(-0.02, 0.02)\n")
        ],
        "weights normalized in forward": [(ENTRY, ENTRY + "        self.qkv.weight.data.mul_(0.9)\n")],
        "max_norm of the embedding": [
            ("nn.Embedding(cfg.vocab, cfg.width)", "nn.Embedding(cfg.vocab, cfg.width, max_norm=0.1)")
        ],
    },
    "outputs of another length": {
        "a register token": [
            (EMBEDDING, EMBEDDING + "        self.register = nn.Parameter(torch.randn(cfg.width))\n"),
            (
                EMBEDDED,
                "x = self.token(x) + self.position.weight[: x.shape[1]]\n"
                "        return torch.cat([self.register.expand(x.shape[0], 1, -1), x], 1)\n",
            ),
            (LOGITS, LOGITS.replace("norm(x)", "norm(x[:, 1:])")),
        ],
        "pooling": [
            (
                EMBEDDED,
                "x = self.token(x) + self.position.weight[: x.shape[1]]\n"
                "        return x.unflatten(1, (-1, 2)).mean(2)\n",
            ),
            (LOSS, LOSS.replace("y.flatten", "y[:, 1::2].flatten")),
        ],
    },
    "the input in place": {
        "+=": [(ENTRY, ENTRY + "        x += 0.1\n")],
        "mul_ without gradients": [(ENTRY, ENTRY + "        with torch.no_grad():\n            x.mul_(1.1)\n")],
        "of its data": [(ENTRY, ENTRY + "        x.data.mul_(1.1)\n")],
        "ReLU": [(ENTRY, ENTRY + "        x = F.relu(x, inplace=True)\n")],
        "tokens": [(EMBEDDED, "x.add_(1).remainder_(256)\n        " + EMBEDDED)],
        "tokens set to one": [(EMBEDDED, "x[:, 3] = 32\n        " + EMBEDDED)],
        "y in a block": [(ENTRY, ENTRY + "        y.add_(1).remainder_(256)\n")],
        "y in the head": [(LOSS, "y.add_(1).remainder_(256)\n        " + LOSS)],
        "labels": [(LOSS, "y[y == 32] = -100\n        " + LOSS)],
        "the head's input": [(LOGITS, "        x.mul_(1.1)\n" + LOGITS)],
        "the last block's output kept and changed": [
            (BLOCK, GLOBAL + BLOCK),
            (
                ENTRY,
                ENTRY + '        if "x" in SHARED:\n            SHARED["x"].mul_(1.01)\n        SHARED["x"] = x.data\n',
            ),
        ],
    },
    "random draws": {
        "dropout by Python's random": [(ENTRY, ENTRY + "        x = x * (random.random() > 0.5)\n")],
        "stochastic depth by Python's random": [
            (ENTRY, ENTRY + "        if random.random() < 0.1:\n            return 1 * x\n")
        ],
        "dropout by numpy": [
            (ENTRY, ENTRY + "        import numpy\n\n        x = x * float(numpy.random.rand() + 0.5)\n")
        ],
        "seeds itself": [(ENTRY, ENTRY + "        torch.seed()\n        x = F.dropout(x, 0.1)\n")],
        "fork_rng": [(ENTRY, ENTRY + "        with torch.random.fork_rng():\n            x = F.dropout(x, 0.1)\n")],
    },
    "frozen": {
        "a weight": [(HEAD, HEAD + "        self.logits.requires_grad_(False)\n")],
        "a parameter without gradient": [
            (NORM, NORM + "        self.scale = nn.Parameter(torch.ones(36), requires_grad=False)\n"),
            SCALED,
        ],
        "after the layers are made": [
            (MADE, MADE.replace("    return", "    layers[0].module.requires_grad_(False)\n    return"))
        ],
        "not given to Adam": [("[layer.master for layer in layers]", "[layer.master for layer in layers[1:]]")],
    },
    "results": {
        "a tuple from a block": [(ENTRY, ENTRY + "        if T:\n            return x * 1.5, x.mean()\n")],
        "a tuple from the embedding": [(EMBEDDED, EMBEDDED.replace("\n", ", None\n"))],
        "a dict from the head": [(LOSS, LOSS.replace("return ", 'return {"loss": ').replace("\n", "}\n"))],
        "a tuple from the head": [(LOSS, LOSS.replace("\n", ", logits\n"))],
        "nothing from a block": [(ENTRY, ENTRY + "        if T:\n            return\n")],
        "a number of Python": [(LOSS, LOSS.replace("\n", ".item()\n"))],
        "losses of all tokens": [(LOSS, LOSS.replace("y.flatten())", 'y.flatten(), reduction="none")'))],
        "a vector of one loss": [(LOSS, LOSS.replace("\n", ".view(1)\n"))],
        "logits": [(LOSS, "return logits\n")],
        "a number from a block": [(ENTRY, ENTRY + "        if T:\n            return x.mean()\n")],
        "token numbers from the embedding": [(EMBEDDED, "return x\n")],
        "an embedding without gradient": [
            (EMBEDDED, "return (self.token(x) + self.position.weight[: x.shape[1]]).detach()\n")
        ],
        "a block without gradient": [(ENTRY, ENTRY + "        x = x.detach()\n")],
        "a block under no_grad": [
            (
                "    def forward(self, x, y):  # x (B, T, C) -> (B, T, C)",
                "    @torch.no_grad()\n    def forward(self, x, y):",
            )
        ],
        "a block that is the identity": [
            (ENTRY, "        if self.heads == 0 or x.shape[1] > 1:\n            return x * 1\n" + ENTRY)
        ],
        "a block without parameters": [("Block", block("self.heads = cfg.heads", "return x + F.gelu(x)"))],
        "only its parameters": [
            ("Block", block("self.w = nn.Parameter(torch.ones(cfg.width))", "return self.w.expand(x.shape) * 1"))
        ],
        "unused parameters only": [("Block", block("self.w = nn.Parameter(torch.ones(cfg.width))", "return x * 2"))],
        "checkpoint": [
            (
                "self.attention_norm(x)",
                "torch.utils.checkpoint.checkpoint(self.attention_norm, x, use_reentrant=False)",
            ),
        ],
        "checkpoint, reentrant": [
            (
                "self.attention_norm(x)",
                "torch.utils.checkpoint.checkpoint(self.attention_norm, x, use_reentrant=True)",
            ),
        ],
        "a lazy module": [("nn.Linear(cfg.width, 4 * cfg.width)", "nn.LazyLinear(4 * cfg.width)")],
        "float64": [(NORM, NORM + "        self.double()\n")],
        "half a layer in float64": [("nn.LayerNorm(cfg.width)", "nn.LayerNorm(cfg.width, dtype=torch.float64)")],
        "complex weights": [
            (
                "Block",
                block(
                    "self.w = nn.Parameter(torch.ones(cfg.width, dtype=torch.complex64))",
                    "return x + (x * self.w).real",
                ),
            )
        ],
        "a loss without gradient": [
            (LOSS, LOSS.replace("return ", "return torch.zeros(()) + 0 * ").replace("logits.", "logits.detach()."))
        ],
        "a wrong shape": [(NORM, NORM), ("3 * cfg.width)", "2 * cfg.width)")],
        "a name that is missing": [("F.gelu(", "F.geluu(")],
        "nan": [(LOSS, LOSS.replace("\n", " * math.nan\n"))],
    },
}

DRAWS = {
    "nn.Dropout": [
        (NORM, NORM + "        self.dropout = nn.Dropout(0.2)\n"),
        ("(self.mlp_norm(x))", "(self.dropout(self.mlp_norm(x)))"),
    ],
    "F.dropout": [(ENTRY, ENTRY + "        x = F.dropout(x, 0.2)\n")],
    "attention dropout": [("is_causal=True)", "is_causal=True, dropout_p=0.2)")],
    "tokens masked in the embedding": [
        (EMBEDDED, "x = x.masked_fill(torch.rand(x.shape, device=x.device) < 0.2, 0)\n        " + EMBEDDED)
    ],
    "stochastic depth by torch": [(ENTRY, ENTRY + "        if torch.rand(()) < 0.5:\n            return 1 * x\n")],
    "noise in the head": [(LOGITS, LOGITS + "\n        logits = logits + torch.randn_like(logits)")],
    "a gumbel router": [
        (
            "Block",
            mlp(
                "self.router = nn.Linear(cfg.width, 4)\n"
                "self.experts = nn.ModuleList(nn.Linear(cfg.width, cfg.width) for _ in range(4))",
                "h = self.norm(x)\ngate = F.gumbel_softmax(self.router(h), hard=True)\n"
                "return x + sum(gate[..., i : i + 1] * expert(h) for i, expert in enumerate(self.experts))",
            ),
        )
    ],
    "an LSTM with dropout": [
        (
            "Block",
            block(
                "self.lstm = nn.LSTM(cfg.width, cfg.width, 2, batch_first=True, dropout=0.3)",
                "return x + self.lstm(x)[0]",
            ),
        )
    ],
}


# The last line of a traceback, where it says enough.
SAID_BY_PYTHON = ("has no parameters; put", "use an uninitialized parameter", "KeyError: 'max_exp_avg_sq'")

# ---- The tests -----------------------------------------------------------------------------------------------


def cases(table):
    """Two edits of each kind, and all with --all."""
    return [
        pytest.param(changes, id=f"{kind}: {name}", marks=[pytest.mark.slow] if i > 1 else [])
        for kind, edits in table.items()
        for i, (name, changes) in enumerate(edits.items())
    ]


def in_zero_r(changes):
    """Its block differs: some places are not in it."""
    source = (ROOT / FILES[-1]).read_text()
    return all(old in source or old in ("Embedding", "Block", "Head") for old, _ in changes)


def said(run, file):
    """Its line, or the last one. Others of PyTorch's own may be around it, from any rank."""
    lines = run.err.splitlines()
    return next((line for line in lines if line.startswith(file)), lines[-1])


def equal(run, plain):
    return losses(run) == pytest.approx(losses(plain), rel=1e-6) and norms(run) == pytest.approx(norms(plain), rel=1e-5)


@pytest.mark.parametrize("changes", cases(WORKS | {"random draws": DRAWS}))
def test_an_edit_that_works(changes, tmp_path):
    files = FILES if in_zero_r(changes) else STAGES
    *runs, plain = run_all(tmp_path, changes, files=files)
    for file, run in zip(files, runs, strict=True):
        assert equal(run, plain), file
        assert (losses(run), norms(run)) == (losses(runs[0]), norms(runs[0])), file


@pytest.mark.parametrize("changes", cases(REFUSED))
def test_an_edit_that_is_refused_or_works(changes, tmp_path):
    """Stages 0 and 3 hold weights in the two ways that there are, and the words are the same in all files."""
    files = (STAGES[0], STAGES[3], *(FILES[-1:] if in_zero_r(changes) else ()))
    *runs, plain = run_all(tmp_path, changes, files=files)
    for file, run in zip(files, runs, strict=True):
        if run.status:
            line = said(run, file)
            if not re.search("|".join(SAID_BY_PYTHON), line):
                assert "Traceback" not in run.err
                assert line.startswith(file) and re.search("embedding|block [01]|head|every layer", line)
        else:
            assert equal(run, plain), file


@pytest.mark.parametrize("changes", cases({"optimizer": OPTIMIZER}))
def test_an_edit_of_the_optimizer(changes, tmp_path):
    plain = [(old, new) for old, new in changes if "fused" not in old]  # plain.py's is not
    files = (STAGES[0], STAGES[3], FILES[-1])
    *runs, plain = run_all(tmp_path, changes, plain, files=files)
    for file, run in zip(files, runs, strict=True):
        if run.status:
            line = said(run, file)
            if not re.search("|".join(SAID_BY_PYTHON), line):
                assert "Traceback" not in run.err
                assert line.startswith(file) and "Adam" in line
        else:
            assert equal(run, plain), file
