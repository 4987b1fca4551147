"""The sparse attention of SparseSR, against values worked out by hand and against dense attention."""

import pytest
import torch
import torch.nn.functional as F

from sr.archs import sparsesr
from sr.archs.sparsesr import (
    BicubicUpsample,
    SparseAttention,
    SparseSR,
    from_windows,
    similar_windows,
    texture,
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
        SparseSR(heads=3)


def test_more_windows_than_there_are_neighbours_are_refused():
    with pytest.raises(SRError, match="topk=9"):
        SparseSR(topk=9, radius=1)


def test_windows_there_and_back():
    x = torch.randn(2, 3, 8, 12)
    windows = to_windows(x, 4)
    assert windows.shape == (2, 2, 3, 16, 3)
    torch.testing.assert_close(windows[1, 1, 2, 5], x[1, :, 4 + 1, 8 + 1])  # token 5 of a 4x4 window: row 1, column 1
    torch.testing.assert_close(from_windows(windows, 4), x)


def similar_windows_slowly(descriptor, topk, radius):
    """The definition, one window after the other."""
    n, height, width, _ = descriptor.shape
    rows = []
    for b in range(n):
        for y in range(height):
            for x in range(width):
                found = []
                for yy in range(max(0, y - radius), min(height, y + radius + 1)):
                    for xx in range(max(0, x - radius), min(width, x + radius + 1)):
                        if (yy, xx) != (y, x):
                            cos = torch.cosine_similarity(descriptor[b, y, x], descriptor[b, yy, xx], dim=0)
                            found.append((-cos.item(), yy * width + xx))
                own = y * width + x
                best = [i for _, i in sorted(found)[:topk]]
                rows.append([b * height * width + i for i in [own, *best, *[own] * (topk - len(best))]])
    return torch.tensor(rows)


@pytest.mark.parametrize(("height", "width"), [(1, 1), (1, 3), (4, 5)])
def test_chosen_windows_are_the_most_similar_ones_within_reach(height, width):
    torch.manual_seed(0)
    descriptor = torch.randn(2, height, width, 6)
    index, weight = similar_windows(descriptor, topk=3, radius=1)
    assert torch.equal(index, similar_windows_slowly(descriptor, topk=3, radius=1))
    assert (weight[:, 0] == 1).all()
    assert ((weight >= 0) & (weight <= 1)).all()


def make_layer(**kwargs):
    torch.manual_seed(1)
    return SparseAttention(
        **{"dim": 6, "match_dim": 4, "value_dim": 4, "heads": 1, "window": 2, "topk": 2, "radius": 1, **kwargs}
    )


def densely(layer, x, gate):
    """The same layer computed densely: all query-key products of the picture, then a mask."""
    features = layer.features(x)
    value = F.relu(features[:, 4:])
    match = F.normalize(features[:, :4], dim=1) * layer.log_temperature.exp().sqrt()
    m, v = (to_windows(t, 2).flatten(1, 2)[0] for t in (match, value))  # (windows, tokens, channels)
    index, weight = similar_windows(m.mean(1).view(1, 3, 4, 4), 2, 1)
    out = torch.empty_like(v)
    for w in range(12):
        factor = torch.zeros(12)
        factor[index[w]] = weight[w]
        logits = (m[w] @ m.flatten(0, 1).T).view(4, 12, 4)
        logits = logits.masked_fill((factor == 0)[None, :, None], float("-inf"))
        out[w] = gate[w] * (logits.flatten(1).softmax(-1) @ (v * factor[:, None, None]).flatten(0, 1))
    found = from_windows(out.view(1, 3, 4, 4, 4), 2)
    return x + layer.proj(torch.cat((found, value), 1))


def test_layer_equals_dense_attention_over_the_chosen_windows():
    layer, x, gate = make_layer(), torch.randn(1, 6, 6, 8), torch.rand(12)
    out, _ = layer(x, gate, None, None)
    torch.testing.assert_close(out, densely(layer, x, gate))


def test_skipped_windows_cost_nothing_and_change_nothing():
    """Leaving out windows whose gate is zero is the same as computing them and multiplying by zero."""
    layer, x, gate = make_layer(), torch.randn(1, 6, 6, 8), torch.rand(12)
    gate[[0, 5, 6]] = 0
    kept = gate.nonzero()[:, 0]
    torch.testing.assert_close(layer(x, gate, None, kept)[0], layer(x, gate, None, None)[0])
    nothing = torch.zeros(0, dtype=torch.long)
    torch.testing.assert_close(layer(x, gate * 0, None, nothing)[0], layer(x, gate * 0, None, None)[0])


def test_texture_is_zero_where_flat_and_near_one_where_not():
    lq = torch.full((1, 3, 8, 16), 0.7)
    lq[..., 8:] += torch.randn(8, 8) * 0.1
    flat, busy = texture(lq, 8)[0, 0].tolist()
    assert flat == pytest.approx(0, abs=1e-3)
    assert busy == pytest.approx((0.1 * 255) ** 2 / ((0.1 * 255) ** 2 + 16), abs=0.01)
    noise = torch.full((1, 3, 64, 64), 0.2) + torch.randn(64, 64) * 4 / 255  # the strength that the formula names
    assert texture(noise, 64).item() == pytest.approx(0.5, abs=0.05)


@pytest.fixture
def network():
    torch.manual_seed(0)
    net = SparseSR(scale=2, dim=8, groups=2, blocks=1, window=4).eval()
    torch.nn.init.normal_(net.head.weight, std=0.1)
    return net


def test_sparsity_zero_is_the_network_without_it_and_flat_pictures_need_no_attention(network):
    x = torch.rand(1, 3, 12, 16)
    x[..., 8:] = 0.5  # half of it flat
    with torch.no_grad():
        full = network(x)
        network.sparsity = 1e-6
        torch.testing.assert_close(network(x), full)
        network.sparsity = 1.0  # no window at all
        assert (network(x) - full).abs().max() > 1e-4
        flat = torch.full((1, 3, 8, 8), 0.3)
        without = network(flat)
        network.sparsity = 0.0
        torch.testing.assert_close(network(flat), without)


def test_only_textured_windows_reach_attention(network, monkeypatch):
    seen = []
    original = window_attention
    monkeypatch.setattr(sparsesr, "window_attention", lambda q, *a, **k: seen.append(len(q)) or original(q, *a, **k))
    x = torch.full((1, 3, 8, 16), 0.5)
    x[..., :4, :8] = torch.rand(3, 4, 8)  # two of eight windows
    network.sparsity = 0.05
    with torch.no_grad():
        network(x)
    assert seen == [2, 2]


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
    descriptor = torch.randn(1, 2, 2, 4, requires_grad=True)
    similar_windows(descriptor, topk=2, radius=1)[1].sum().backward()
    assert descriptor.grad.abs().sum() > 0


def test_the_choice_of_windows_does_not_depend_on_autocast():
    descriptor = torch.rand(2, 9, 11, 16, generator=torch.Generator().manual_seed(0))
    index, weight = similar_windows(descriptor, 3, 2)
    with torch.autocast("cpu", torch.bfloat16):
        again, narrow = similar_windows(descriptor, 3, 2)
    assert torch.equal(again, index) and torch.equal(narrow, weight)
