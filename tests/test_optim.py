"""Muon, against timm's and torch's."""

import copy
import functools

import pytest
import torch
from timm.optim import Muon as TimmMuon
from timm.optim import muon as timm_muon
from torch import nn

from sr.errors import SRError
from sr.optim import Muon, orthogonalise


def network() -> nn.Sequential:
    torch.manual_seed(0)
    convs = [nn.Conv2d(6, 6, 3, padding=1) for _ in range(3)]
    return nn.Sequential(nn.Conv2d(3, 6, 3, padding=1), *convs, nn.Conv2d(6, 12, 1), nn.PReLU(12))


def test_orthogonalise_gives_nearly_orthonormal_rows_or_columns() -> None:
    torch.manual_seed(0)
    x = torch.randn(4, 8, 32, dtype=torch.float64)
    for wide in (x, x.mT):
        u, s, v = torch.linalg.svd(wide, full_matrices=False)
        out = orthogonalise(wide)
        assert torch.linalg.svdvals(out).sub(1).abs().max() < 0.35  # the published range
        along = torch.einsum("nri,nrc,nic->ni", u, out, v)  # the same singular vectors
        torch.testing.assert_close(along, torch.linalg.svdvals(out)[:, :1].expand_as(along), atol=0.5, rtol=0)
        assert (s > 0).all()


def test_orthogonalise_survives_a_gradient_of_zero() -> None:
    assert torch.equal(orthogonalise(torch.zeros(2, 3, 5)), torch.zeros(2, 3, 5))


def test_steps_are_those_of_timm(monkeypatch: pytest.MonkeyPatch) -> None:
    """timm takes one matrix after the other, and computes in bfloat16 unless told otherwise."""
    exact = functools.partial(timm_muon.zeropower_via_newtonschulz, dtype=torch.float32)
    monkeypatch.setattr(timm_muon, "zeropower_via_newtonschulz", exact)
    ours, theirs = network(), network()
    optimizers = Muon(ours.parameters(), lr=1e-2), TimmMuon(theirs.parameters(), lr=1e-2, ns_coefficients="original")
    start = copy.deepcopy(ours)
    for step in range(3):
        for net, optimizer in zip((ours, theirs), optimizers, strict=True):
            torch.manual_seed(step)
            for p in net.parameters():
                p.grad = torch.randn_like(p)
            optimizer.step()
    for p, q, old in zip(ours.parameters(), theirs.parameters(), start.parameters(), strict=True):
        assert (p - old).norm() > 0.01
        torch.testing.assert_close(p, q)


def test_vectors_are_moved_by_adam() -> None:
    ours, theirs = (nn.Parameter(torch.ones(5)) for _ in range(2))
    optimizers = Muon([ours], lr=1e-2, betas=(0.9, 0.99)), torch.optim.Adam([theirs], lr=1e-2, betas=(0.9, 0.99))
    for step in range(4):
        for p, optimizer in zip((ours, theirs), optimizers, strict=True):
            torch.manual_seed(step)
            p.grad = torch.randn(5)
            optimizer.step()
    torch.testing.assert_close(ours, theirs)


def test_weight_decay_shrinks_matrices_only() -> None:
    net = network()
    before = copy.deepcopy(net)
    for p in net.parameters():
        p.grad = torch.zeros_like(p)
    Muon(net.parameters(), lr=0.1, weight_decay=0.5).step()
    for p, old in zip(net.parameters(), before.parameters(), strict=True):
        torch.testing.assert_close(p, old * 0.95 if p.ndim > 1 else old)


def test_state_is_restored_exactly() -> None:
    first = network()
    optimizer = Muon(first.parameters(), lr=1e-2)

    def steps(net: nn.Module, optimizer: Muon, seeds: range) -> None:
        for seed in seeds:
            torch.manual_seed(seed)
            for p in net.parameters():
                p.grad = torch.randn_like(p)
            optimizer.step()

    steps(first, optimizer, range(2))
    second = copy.deepcopy(first)
    resumed = Muon(second.parameters(), lr=1e-2)
    resumed.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    steps(first, optimizer, range(2, 4))
    steps(second, resumed, range(2, 4))
    assert all(torch.equal(p, q) for p, q in zip(first.parameters(), second.parameters(), strict=True))


def test_closure_and_unused_parameters() -> None:
    used, unused = nn.Parameter(torch.randn(3, 3)), nn.Parameter(torch.randn(3, 3))
    optimizer = Muon([used, unused], lr=1e-2)
    old = unused.detach().clone()

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = used.square().sum()
        loss.backward()
        return loss

    losses = [optimizer.step(closure).item() for _ in range(5)]
    assert losses == sorted(losses, reverse=True)
    assert torch.equal(unused, old)


@pytest.mark.parametrize("bad", [{"lr": -1.0}, {"momentum": 1.0}, {"betas": (0.9, 1.5)}, {"weight_decay": -0.1}])
def test_bad_settings_are_refused(bad: dict) -> None:
    with pytest.raises(SRError):
        Muon([nn.Parameter(torch.zeros(2, 2))], **bad)


def test_sharded_weights_are_refused() -> None:
    import torch.distributed as dist
    from torch.distributed.tensor import distribute_tensor, init_device_mesh

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        whole = torch.randn(4, 4)
        sharded = nn.Parameter(distribute_tensor(whole, init_device_mesh("cpu", (1,))))
        with pytest.raises(SRError, match="sharded"):
            Muon([sharded])
    finally:
        dist.destroy_process_group()
