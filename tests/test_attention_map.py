import pytest
import torch

import sr
from sr.archs.sparsesr import set_sparsity
from sr.attention_map import attention_map


@pytest.fixture
def network():
    torch.manual_seed(0)
    return sr.archs.SparseSR(scale=2, dim=8, groups=2, blocks=1, window=4, topk=1, radius=1, heads=2).eval()


def test_weights_are_shared_out_among_the_pixels_own_and_the_chosen_windows(network):
    weights = attention_map(network, torch.rand(3, 13, 18), row=6, column=9)
    assert weights.shape == (13, 18)
    assert (weights >= 0).all()
    assert weights.sum().item() == pytest.approx(0.99, abs=0.01)  # noise is as textured as it gets
    windows = torch.nn.functional.avg_pool2d(torch.nn.functional.pad(weights, (0, 2, 0, 3))[None], 4)[0] > 0
    assert windows[1, 2]  # its own
    assert windows.sum() == 2  # and one more, the same in both layers


def test_a_flat_window_looks_nowhere(network):
    assert attention_map(network, torch.full((3, 8, 8), 0.5), 0, 0).sum().item() == pytest.approx(0, abs=1e-4)


def test_where_no_window_attends_the_map_is_empty(network):
    set_sparsity(network, 0.5)
    assert attention_map(network, torch.full((3, 8, 8), 0.5), 0, 0).sum() == 0


def test_what_cannot_be_drawn_is_refused(network):
    with pytest.raises(sr.SRError, match="outside the picture of 8 x 9"):
        attention_map(network, torch.rand(3, 8, 9), 8, 0)
    with pytest.raises(sr.SRError, match="no sparse attention"):
        attention_map(sr.create_model("sparsesr_t", mixer="depthwise"), torch.rand(3, 8, 8), 0, 0)
