"""Buffers of gradients, as autograd's engine shares them and adds them up (input_buffer.cpp)."""

from costmodel.memory.block.gradients import Gradients


def arriving():
    """The gradient of y, of 10 bytes, which a sum's backward hands on to a as it is."""
    grads = Gradients()
    grads.allocate("y", 10)
    grads.share("a", "y")
    return grads


def test_a_shared_buffer_is_freed_with_its_last_tensor():
    grads = arriving()
    assert grads.live == 10
    assert not grads.is_own("a")
    grads.free("y")
    assert grads.is_own("a")
    grads.free("a")
    assert grads.live == 0


def test_a_second_gradient_is_added_in_place_where_nobody_else_has_the_first():
    grads = arriving()
    grads.free("y")
    grads.allocate("a", 10)
    assert (grads.live, grads.add_up("a", 10)) == (20, 0)
    assert grads.live == 10


def test_a_second_gradient_of_a_shared_buffer_takes_a_buffer_more():
    grads = arriving()
    grads.allocate("a", 10)
    assert grads.add_up("a", 10) == 10
    assert grads.live == 20, "y's, and the sum"


def test_a_view_with_gaps_is_not_added_to_in_place():
    grads = Gradients()
    grads.allocate("cat", 20)
    grads.share("part", "cat", gaps=True)
    grads.free("cat")
    assert not grads.is_own("part")
