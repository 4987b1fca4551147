"""A batch in pieces, in parallel, is a batch; what threads inherit; faults come through."""

import os
import threading

import pytest
import torch

from sr.degradations.pieces import _pool, by_kind, by_pieces


@pytest.fixture(params=[1, 2])
def threads(request):
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch):
    monkeypatch.setattr("sr.degradations.pieces._PIECE", 2 * 3 * 4 * 4)


def test_pieces_are_put_together_in_order(threads):
    x, factor = torch.rand(7, 3, 4, 4), torch.arange(7.0)[:, None, None, None]
    sizes: list[int] = []

    def double(x: torch.Tensor, factor: torch.Tensor) -> torch.Tensor:
        sizes.append(len(x))
        return (x * factor).repeat(1, 1, 2, 1)

    assert torch.equal(by_pieces(double, x, factor, size=(8, 4)), (x * factor).repeat(1, 1, 2, 1))
    assert sorted(sizes) == [1, 2, 2, 2]


def test_each_picture_goes_where_its_kind_says(threads):
    x, kind = torch.rand(9, 3, 4, 4), torch.tensor([0, 2, 2, 0, 0, 2, 0, 0, 2])
    result = by_kind((lambda x: x + 1, lambda x: x / 0, lambda x: -x), kind, x)
    assert torch.equal(result, torch.where(kind[:, None, None, None] == 0, x + 1, -x))


def test_threads_run_alone_and_leave_the_setting_as_it_is():
    _pool.cache_clear()
    torch.set_num_threads(2)
    seen: set[tuple[str, int]] = set()

    def look(x: torch.Tensor) -> torch.Tensor:
        seen.add((threading.current_thread().name, torch.get_num_threads()))
        return x

    by_pieces(look, torch.rand(40, 3, 4, 4))
    assert seen and all(count == 1 for _, count in seen)
    assert threading.current_thread().name not in {name for name, _ in seen}
    started = []
    later = threading.Thread(target=lambda: started.append(torch.get_num_threads()))
    later.start()
    later.join()
    assert torch.get_num_threads() == 2 and started == [2]


@pytest.mark.parametrize("inference", [False, True])
def test_pieces_record_no_gradients_and_may_be_inference_tensors(threads, inference):
    with torch.inference_mode(inference), torch.no_grad():
        result = by_pieces(lambda x: x * 2, torch.rand(5, 3, 4, 4).requires_grad_(not inference))
    assert not result.requires_grad and result.is_inference() == inference


def test_a_fault_in_a_piece_comes_through(threads):
    def fail(x: torch.Tensor) -> torch.Tensor:
        raise ArithmeticError("piece")

    with pytest.raises(ArithmeticError, match="piece"):
        by_pieces(fail, torch.rand(5, 3, 4, 4))


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork on this system")
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_forked_process_makes_its_own_threads():
    torch.set_num_threads(2)
    x = torch.rand(5, 3, 4, 4)
    by_pieces(lambda x: x + 1, x)  # the parent has its threads
    child = os.fork()
    if child == 0:
        os._exit(0 if torch.equal(by_pieces(lambda x: x + 1, x), x + 1) else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
