"""Attention along columns over the known rows, against a loop over tables, columns and rows."""

import torch
from torch import Tensor

from addnorm.layers.rows import KnownRowAttention, RowContext

TABLES, ROWS, COLUMNS, WIDTH, HEADS = 2, 5, 3, 8, 2


def naive(attention: KnownRowAttention, x: Tensor, known: int) -> Tensor:
    """Every row of every column attends to the known rows of the same column and table."""
    matrices = attention.matrices()
    query, key, value = torch.split(attention.input.bias, WIDTH)
    out = torch.zeros_like(x)
    for table in range(TABLES):
        for column in range(COLUMNS):
            rows = x.view(TABLES, ROWS, COLUMNS, WIDTH)[table, :, column]
            q = rows @ matrices["query"].T + query
            k = rows[:known] @ matrices["key"].T + key
            v = rows[:known] @ matrices["value"].T + value
            mixed = []
            for head in range(HEADS):
                part = slice(head * WIDTH // HEADS, (head + 1) * WIDTH // HEADS)
                scores = q[:, part] @ k[:, part].T / (WIDTH // HEADS) ** 0.5
                mixed.append(scores.softmax(dim=-1) @ v[:, part])
            result = attention.output(torch.cat(mixed, dim=-1))
            out.view(TABLES, ROWS, COLUMNS, WIDTH)[table, :, column] = result
    return out


def make() -> tuple[KnownRowAttention, Tensor]:
    attention = KnownRowAttention(WIDTH, HEADS, HEADS, WIDTH // HEADS, 0).double()
    with torch.no_grad():
        attention.input.bias.normal_()
    return attention, torch.randn(TABLES * ROWS, COLUMNS, WIDTH, dtype=torch.float64)


def test_every_row_attends_to_the_known_rows_of_its_column() -> None:
    attention, x = make()
    for known in (1, 3, ROWS):
        result = attention(x, RowContext(rows=ROWS, known=known))
        assert torch.allclose(result, naive(attention, x, known), atol=1e-12)


def test_without_known_rows_the_mixed_values_are_zero() -> None:
    attention, x = make()
    result = attention(x, RowContext(rows=ROWS, known=0))
    assert torch.equal(result, attention.output.bias.expand_as(result))


def test_cached_keys_and_values_give_the_same() -> None:
    attention, x = make()
    whole = attention(x, RowContext(rows=ROWS, known=3)).view(TABLES, ROWS, COLUMNS, WIDTH)
    split = x.view(TABLES, ROWS, COLUMNS, WIDTH)
    known, unknown = (part.flatten(0, 1) for part in (split[:, :3], split[:, 3:]))
    cache: dict[int, tuple[Tensor, Tensor]] = {}
    first = attention(known, RowContext(rows=3, known=3, row_cache=cache))
    later = attention(unknown, RowContext(rows=2, known=3, row_cache=cache))
    assert torch.allclose(first.view(TABLES, 3, COLUMNS, WIDTH), whole[:, :3], atol=1e-12)
    assert torch.allclose(later.view(TABLES, 2, COLUMNS, WIDTH), whole[:, 3:], atol=1e-12)
