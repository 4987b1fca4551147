"""The sparse attention of SparseSR, against values worked out by hand and against dense attention."""

import pytest
import torch

from sr.archs.sparsesr import (
    BicubicUpsample,
    SparseAttention,
    SparseSR,
    from_windows,
    similar_windows,
    to_windows,
    window_attention,
)
from sr.errors import SRError
from sr.resize import imresize


def test_attention_by_hand():
    q = torch.tensor([[[1.0, 0, 1, 0], [0, 1, 0, 1], [1, 1, 0, 0]]])
    k = torch.tensor([[[1.0, 0, 0, 1], [0, 1, 1, 0], [1, 0, 1, 0]]])
    v = torch.arange(1.0, 13).view(1, 3, 4)
    out = window_attention(q, k, v, heads=1)
    torch.testing.assert_close(out[0, 0], torch.tensor([5.711, 6.711, 7.711, 8.711]), atol=5e-4, rtol=0)


def test_identical_tokens_share_attention_equally():
    v = torch.randn(1, 5, 4)
    out = window_attention(torch.randn(1, 3, 4), torch.ones(1, 5, 4), v, heads=2)
    torch.testing.assert_close(out, v.mean(1, keepdim=True).expand(-1, 3, -1))


def test_attention_weights_are_positive_and_sum_to_one():
    # With the identity as values, the result *is* the attention matrix.
    weights = window_attention(torch.randn(2, 6, 6), torch.randn(2, 6, 6), torch.eye(6).expand(2, 6, 6), heads=1)
    assert (weights > 0).all()
    torch.testing.assert_close(weights.sum(-1), torch.ones(2, 6))


def test_heads_attend_separately():
    q, k, v = (torch.randn(2, 5, 6) for _ in range(3))
    parts = [window_attention(q[..., i : i + 2], k[..., i : i + 2], v[..., i : i + 2], 1) for i in (0, 2, 4)]
    torch.testing.assert_close(window_attention(q, k, v, heads=3), torch.cat(parts, -1))


def test_heads_that_do_not_divide_the_width_are_refused():
    with pytest.raises(SRError, match="3 attention heads do not divide"):
        window_attention(torch.randn(1, 4, 8), torch.randn(1, 4, 8), torch.randn(1, 4, 8), heads=3)
    with pytest.raises(SRError, match="3 attention heads do not divide"):
        SparseSR(heads=3, attn_dim=16)


def test_more_windows_than_there_are_neighbours_are_refused():
    with pytest.raises(SRError, match="topk=9"):
        SparseSR(topk=9, radius=1)


def test_windows_there_and_back():
    x = torch.randn(2, 3, 8, 12)
    windows = to_windows(x, 4)
    assert windows.shape == (2, 2, 3, 16, 3)
    torch.testing.assert_close(windows[1, 1, 2, 5], x[1, :, 4 + 1, 8 + 1])  # token 5 of a 4x4 window: row 1, column 1
    torch.testing.assert_close(from_windows(windows, 4), x)


def similar_windows_slowly(query, key, topk, radius):
    """The definition, one window after the other."""
    n, height, width, _ = query.shape
    index = torch.empty(n, height * width, topk, dtype=torch.long)
    for b in range(n):
        for y in range(height):
            for x in range(width):
                found = []
                for yy in range(max(0, y - radius), min(height, y + radius + 1)):
                    for xx in range(max(0, x - radius), min(width, x + radius + 1)):
                        if (yy, xx) != (y, x):
                            cos = torch.cosine_similarity(query[b, y, x], key[b, yy, xx], dim=0)
                            found.append((-cos.item(), yy * width + xx))
                best = [i for _, i in sorted(found)[:topk]]
                best += [y * width + x] * (topk - len(best))
                index[b, y * width + x] = torch.tensor(best)
    return index


@pytest.mark.parametrize(("height", "width"), [(1, 1), (1, 3), (4, 5)])
def test_chosen_windows_are_the_most_similar_ones_within_reach(height, width):
    torch.manual_seed(0)
    query, key = torch.randn(2, height, width, 6), torch.randn(2, height, width, 6)
    index, score = similar_windows(query, key, topk=3, radius=1)
    assert torch.equal(index, similar_windows_slowly(query, key, topk=3, radius=1))
    assert (score.abs() <= 1 + 1e-5).all()


def test_layer_equals_dense_attention_over_the_chosen_windows():
    """The same layer computed densely: all query-key products of the picture, then a mask."""
    torch.manual_seed(1)
    layer = SparseAttention(dim=6, attn_dim=4, heads=1, window=2, topk=2, radius=1)
    x = torch.randn(1, 6, 6, 8)
    q, k, v = to_windows(layer.qkv(x), 2).flatten(1, 2)[0].chunk(3, dim=-1)  # (windows, tokens, A) each
    index, score = similar_windows(q.mean(1).view(1, 3, 4, 4), k.mean(1).view(1, 3, 4, 4), 2, 1)
    out = torch.empty_like(q)
    for w in range(12):
        gate = torch.zeros(12)
        gate[w] = 1
        gate[index[0, w]] = 0.5 + 0.5 * score[0, w]
        logits = (q[w] @ k.flatten(0, 1).T / 2).view(4, 12, 4)
        logits = logits.masked_fill((gate == 0)[None, :, None], float("-inf"))
        out[w] = logits.flatten(1).softmax(-1) @ (v * gate[:, None, None]).flatten(0, 1)
    expected = x + layer.proj(from_windows(out.view(1, 3, 4, 4, 4), 2))
    torch.testing.assert_close(layer(x), expected)


@pytest.mark.parametrize("scale", [2, 3, 4])
def test_base_image_is_matlab_bicubic_away_from_the_border(scale):
    x = torch.rand(2, 3, 9, 11)
    out, expected = BicubicUpsample(3, scale)(x), imresize(x, scale)
    inside = (..., slice(2 * scale, -2 * scale), slice(2 * scale, -2 * scale))
    torch.testing.assert_close(out[inside], expected[inside], atol=1e-5, rtol=0)
    assert (out - expected).abs().max() < 0.2


def test_untrained_network_is_bicubic():
    x = torch.rand(1, 3, 10, 13)
    torch.testing.assert_close(
        SparseSR(scale=2)(x)[..., 4:-4, 4:-4], imresize(x, 2)[..., 4:-4, 4:-4], atol=1e-5, rtol=0
    )


def test_choice_of_windows_is_trained():
    """A chosen window's similarity multiplies its values, so the descriptors get a gradient from it."""
    q = torch.randn(1, 2, 2, 4, requires_grad=True)
    _, score = similar_windows(q, torch.randn(1, 2, 2, 4), topk=2, radius=1)
    score.sum().backward()
    assert q.grad is not None
    assert q.grad.abs().sum() > 0
