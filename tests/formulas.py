"""The paper's formulas once more, for a model whose layers are padded with zeros to a multiple of 16·N.

`config` is a run's record of that name.
"""

BYTES = {"bfloat16": 2, "float16": 2, "float32": 4}


def layer_sizes(config):
    """Parameters of the embedding, the blocks and the head, without padding."""
    C, T, V = config["width"], config["context"], config["vocab"]
    return [(V + T) * C, *[12 * C * C + 13 * C] * config["layers"], 2 * C + V * C]


def padded_sizes(config):
    multiple = 16 * config["world_size"]
    return [-(-size // multiple) * multiple for size in layer_sizes(config)]


def states(stage, config, sizes):
    """Bytes of each kind of state on a rank (figure 1, K = 12). Gradients summed over micro-batches are fp32."""
    psi, N, width = sum(sizes), config["world_size"], BYTES[config["dtype"]]
    grad_width = 4 if config["micro_batches"] > 1 else width
    return {
        "parameters": width * psi / (N if stage >= 3 else 1),
        "gradients": grad_width * psi / (N if stage >= 2 else 1),
        "optimizer": 12 * psi / (N if stage >= 1 else 1),
    }


def elements(stage, config, sizes):
    """Elements a rank sends in a step: (in reduce-scatters, in all-gathers), §7.2 with m micro-batches."""
    psi, m, N = sum(sizes), config["micro_batches"], config["world_size"]
    reduced = psi * (m if stage >= 2 else 1)
    gathered = m * (2 * psi - sizes[-1]) if stage == 3 else psi  # stage 3 gathers the head once for both passes
    return reduced * (N - 1) / N, gathered * (N - 1) / N
