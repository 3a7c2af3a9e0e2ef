"""Conversion of KV tensors to blocks and back: bit-exact for every shape; tensors that do not fit are rejected."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kvclient import InvalidArgument
from kvclient.engines.torch_blocks import KV, KVLayout, LayerShape, export_blocks, import_blocks

DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.int8)


def random_kv(layout: KVLayout, tokens: int, rows: int = 1, seed: int = 0) -> list[KV]:
    """A cache of random bytes, including NaNs of every kind."""
    made = torch.Generator().manual_seed(seed)

    def tensor(heads: int, dim: int) -> torch.Tensor:
        size = (rows, heads, tokens, dim * layout.dtype.itemsize)
        return torch.randint(0, 256, size, generator=made, dtype=torch.uint8).view(layout.dtype)

    return [(tensor(s.key_heads, s.key_dim), tensor(s.value_heads, s.value_dim)) for s in layout.layers]


def raw(tensor: torch.Tensor) -> torch.Tensor:
    """Bytes of a cache, because NaNs are not equal to themselves."""
    return tensor.contiguous().view(torch.uint8)


def same(left: list[KV], right: list[KV]) -> bool:
    return all(
        torch.equal(raw(a), raw(b)) for one, other in zip(left, right, strict=True) for a, b in zip(one, other, strict=True)
    )


def cut(layers: list[KV], row: int, start: int, stop: int) -> list[KV]:
    return [(keys[row : row + 1, :, start:stop], values[row : row + 1, :, start:stop]) for keys, values in layers]


shapes = st.builds(LayerShape, *[st.integers(1, 3), st.sampled_from([1, 2, 3, 8])] * 2)
layouts = st.builds(
    KVLayout,
    st.integers(1, 5),
    st.sampled_from(DTYPES),
    st.one_of(
        st.tuples(shapes, st.integers(1, 3)).map(lambda pair: (pair[0],) * pair[1]),
        st.lists(shapes, min_size=1, max_size=3).map(tuple),
    ),
)


@given(layout=layouts, data=st.data())
def test_export_and_import_are_bit_exact(layout: KVLayout, data: st.DataObject) -> None:
    rows = data.draw(st.integers(1, 3))
    tokens = data.draw(st.integers(0, 4 * layout.block_tokens))
    row, first = data.draw(st.integers(0, rows - 1)), data.draw(st.integers(0, tokens))
    layers = random_kv(layout, tokens, rows, seed=data.draw(st.integers(0, 99)))

    blocks = export_blocks(layers, layout, row=row, first_token=first)

    full = (tokens - first) // layout.block_tokens
    assert blocks.shape == (full, layout.block_bytes)
    wanted = data.draw(st.integers(0, full * layout.block_tokens))
    back = import_blocks(blocks, layout, tokens=wanted)
    assert same(back, cut(layers, row, first, first + wanted))
    assert all(tensor.is_contiguous() for pair in back for tensor in pair)
    blocks.fill_(0)  # imported tensors are copies, not views
    assert same(back, cut(layers, row, first, first + wanted))


@given(layout=layouts, blocks=st.integers(1, 4))
def test_layer_block_is_keys_then_values_of_one_layer(layout: KVLayout, blocks: int) -> None:
    layers = random_kv(layout, blocks * layout.block_tokens)
    exported = export_blocks(layers, layout)
    for block in range(blocks):
        part = cut(layers, 0, block * layout.block_tokens, (block + 1) * layout.block_tokens)
        plain = torch.cat([raw(tensor[0]).reshape(-1) for pair in part for tensor in pair])
        assert torch.equal(exported[block], plain)


def test_export_accepts_transposed_caches_and_given_memory() -> None:
    layout = KVLayout(4, torch.float32, (LayerShape(2, 8, 2, 8),) * 2)
    layers = random_kv(layout, 10)
    strided = [
        (k.transpose(1, 2).contiguous().transpose(1, 2), v.transpose(1, 2).contiguous().transpose(1, 2)) for k, v in layers
    ]
    wide = torch.zeros((4, layout.block_bytes + 64), dtype=torch.uint8)
    out = export_blocks(strided, layout, out=wide[1:3, :-64])
    assert torch.equal(out, export_blocks(layers, layout))
    assert not any(part.any() for part in (wide[0], wide[3], wide[:, -64:]))


def test_export_drops_gradients() -> None:
    layout = KVLayout(2, torch.float32, (LayerShape(1, 4, 1, 4),))
    layers = [(torch.randn(1, 1, 4, 4, requires_grad=True), torch.randn(1, 1, 4, 4, requires_grad=True))]
    assert not export_blocks(layers, layout).requires_grad


def test_layout_differs_between_models() -> None:
    gqa, mla = LayerShape(2, 64, 2, 64), LayerShape(1, 512, 1, 64)
    several = [
        KVLayout(16, torch.float32, (gqa,) * 4),
        KVLayout(16, torch.bfloat16, (gqa,) * 4),
        KVLayout(32, torch.float32, (gqa,) * 4),
        KVLayout(16, torch.float32, (gqa,) * 5),
        KVLayout(16, torch.float32, (LayerShape(4, 32, 4, 32),) * 4),  # as many bytes
        KVLayout(16, torch.float32, (mla,) * 4),
        KVLayout(16, torch.float32, (gqa, mla)),
        KVLayout(16, torch.float32, (mla, gqa)),
        KVLayout(16, torch.float32, tuple(LayerShape(1, dim, 1, dim) for dim in range(1, 80))),  # too long to be spelt out
        KVLayout(16, torch.float32, tuple(LayerShape(1, dim, 1, dim) for dim in range(79, 0, -1))),
    ]
    specs = [layout.spec("m") for layout in several] + [several[0].spec("m", extra_layout="rope 7")]
    assert len({spec.namespace for spec in specs}) == len(specs)
    assert (specs[0].layers, specs[0].layer_block_bytes) == (4, 2 * 2 * 16 * 64 * 4)
    assert (specs[6].layers, specs[6].block_bytes) == (1, several[6].block_bytes)


def test_import_of_wrong_sizes_is_rejected() -> None:
    layout = KVLayout(4, torch.float32, (LayerShape(2, 8, 2, 8),) * 2)
    layers = random_kv(layout, 9)
    wrong = {
        "one layer": lambda: export_blocks(layers[:1], layout),
        "another dtype": lambda: export_blocks([(k.half(), v.half()) for k, v in layers], layout),
        "another head": lambda: export_blocks([(k[:, :1], v) for k, v in layers], layout),
        "no batch": lambda: export_blocks([(k[0], v[0]) for k, v in layers], layout),
        "no such row": lambda: export_blocks(layers, layout, row=1),
        "too many": lambda: export_blocks(layers, layout, first_token=4, blocks=2),
        "too little space": lambda: export_blocks(layers, layout, out=layout.allocate(1)),
        "too many tokens": lambda: import_blocks(layout.allocate(1), layout, tokens=5),
        "another size": lambda: import_blocks(layout.allocate(1)[:, :-4], layout),
        "not bytes": lambda: import_blocks(layout.allocate(1).view(torch.float32), layout),
        "not aligned": lambda: import_blocks(torch.zeros(layout.block_bytes + 1, dtype=torch.uint8)[1:].view(1, -1), layout),
        "no devices": lambda: import_blocks(layout.allocate(1), layout, devices=["cpu"]),
        "no layers": lambda: KVLayout(4, torch.float32, ()),
        "two dtypes": lambda: KVLayout.of([(layers[0][0], layers[0][1].half())], 4),
        "two lengths": lambda: KVLayout.of([(layers[0][0], layers[0][1][:, :, :3])], 4),
    }
    for what, call in wrong.items():
        with pytest.raises(InvalidArgument):
            pytest.fail(f"{what}: {call()}")
