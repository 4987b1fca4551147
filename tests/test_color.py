"""RGB <-> YCbCr against numbers from MATLAB's documentation and the definition of BT.601."""

import pytest
import torch

from sr.color import rgb_to_y, rgb_to_ycbcr, ycbcr_to_rgb
from sr.errors import SRError


def colour(*rgb: float, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    return torch.tensor(rgb, dtype=dtype).view(3, 1, 1)


@pytest.mark.parametrize(
    ("rgb", "ycbcr"),
    [
        ((0, 0, 0), (16, 128, 128)),
        ((1, 1, 1), (235, 128, 128)),
        ((1, 0, 0), (81.481, 90.203, 240)),
        ((0, 1, 0), (144.553, 53.797, 34.214)),
        ((0, 0, 1), (40.966, 240, 109.786)),
    ],
)
def test_corners_of_the_rgb_cube(rgb, ycbcr):
    expected = torch.tensor(ycbcr, dtype=torch.float64) / 255
    torch.testing.assert_close(rgb_to_ycbcr(colour(*rgb)).flatten(), expected, rtol=0, atol=1e-12)
    torch.testing.assert_close(rgb_to_y(colour(*rgb)).flatten(), expected[:1], rtol=0, atol=1e-12)


@pytest.mark.parametrize("shape", [(3, 5, 7), (2, 3, 4, 1), (2, 4, 3, 5, 6)])
def test_round_trip_and_shapes(shape):
    rgb = torch.rand(shape, dtype=torch.float64)
    ycbcr = rgb_to_ycbcr(rgb)
    assert ycbcr.shape == shape
    torch.testing.assert_close(ycbcr_to_rgb(ycbcr), rgb, rtol=0, atol=1e-13)
    assert rgb_to_y(rgb).shape == (*shape[:-3], 1, *shape[-2:])
    assert torch.equal(rgb_to_y(rgb), ycbcr[..., :1, :, :])


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("function", [rgb_to_y, rgb_to_ycbcr, ycbcr_to_rgb])
def test_dtype_is_kept_and_only_the_result_is_rounded(function, dtype):
    picture = torch.rand(3, 6, 5).to(dtype)
    result = function(picture)
    assert result.dtype == dtype
    exact = function(picture.double())
    torch.testing.assert_close(result.double(), exact, rtol=torch.finfo(dtype).eps, atol=1e-6)


def test_out_of_gamut_colours_survive_the_round_trip():
    rgb = colour(-0.2, 1.3, 0.5)
    torch.testing.assert_close(ycbcr_to_rgb(rgb_to_ycbcr(rgb)), rgb, rtol=0, atol=1e-13)


@pytest.mark.parametrize("function", [rgb_to_y, rgb_to_ycbcr, ycbcr_to_rgb])
def test_gradients(function):
    assert torch.autograd.gradcheck(function, torch.rand(3, 2, 2, dtype=torch.float64, requires_grad=True))


@pytest.mark.parametrize("function", [rgb_to_y, rgb_to_ycbcr, ycbcr_to_rgb])
def test_mistakes_are_explained(function):
    with pytest.raises(SRError, match=r"torch\.uint8"):
        function(torch.zeros(3, 4, 4, dtype=torch.uint8))
    with pytest.raises(SRError, match=r"\(1, 4, 4\)"):
        function(torch.zeros(1, 4, 4))
    with pytest.raises(SRError, match=r"\(3, 4\)"):
        function(torch.zeros(3, 4))
