"""Models and budgets of the paper's Table 8, with which its Table 3 was measured.

The table gives layers, heads, latents (of all heads together: a head has its share), width, learning rate, batch,
weight decay, dropout and epochs, and the positions of the window. Our models have no dropout. The paper leaves open the
width of the feed-forward layers (four times the model's, as in its Table 6), the window (128, as everywhere else in
it), the schedule and its warm-up (linear, as in Table 6, and a tenth of the steps), and the pooling (the mean).
Sinusoidal positions are added to the embeddings ("classic transformer sinusoidal embeddings", A.2); windows have rotary
positions besides, also where the table says absolute.
"""

from typing import NamedTuple

from latte.tasks.base import Budget, Plan


class Row(NamedTuple):
    """A row of the table, and the number of training examples that its epochs are counted in."""

    examples: int
    num_hidden_layers: int
    num_heads: int
    latents: int
    hidden_size: int
    learning_rate: float
    batch_size: int
    weight_decay: float
    epochs: int


TABLE_8 = {
    "listops": Row(96_000, 6, 4, 40, 128, 1e-3, 64, 0.01, 50),
    "text": Row(25_000, 6, 4, 256, 256, 1e-3, 32, 0.05, 32),
    "retrieval": Row(147_086, 6, 4, 40, 128, 1e-4, 32, 0.01, 20),
    "image": Row(45_000, 6, 4, 40, 512, 1e-3, 32, 0.05, 200),
    "pathfinder": Row(160_000, 6, 4, 256, 256, 1e-3, 64, 0.03, 200),
}


def paper_plan(task: str) -> Plan:
    """Latte-R-SWA++, the paper's best, as Table 8 sizes and trains it for a task."""
    row = TABLE_8[task]
    steps = row.epochs * row.examples // row.batch_size
    return Plan(
        preset="latte-r-swa++",
        budget=Budget(
            steps=steps,
            batch_size=row.batch_size,
            learning_rate=row.learning_rate,
            schedule="linear",
            warmup_steps=steps // 10,
            weight_decay=row.weight_decay,
        ),
        model={
            "hidden_size": row.hidden_size,
            "intermediate_size": 4 * row.hidden_size,
            "num_hidden_layers": row.num_hidden_layers,
            "num_heads": row.num_heads,
            "num_latents": row.latents // row.num_heads,
            "positions": "sinusoidal",
            "pooling": "mean",
        },
    )
