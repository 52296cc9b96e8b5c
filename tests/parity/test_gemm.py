"""The packed matrix products against float64: every shape's corners, and the same bits for a row whatever its neighbours."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")

from weir_server.exec.gemm import ISA_NAMES, NativeKind, NativeLinear  # noqa: E402
from weir_server.exec.step import UnsupportedError  # noqa: E402
from weir_server.model.int8 import Int8Matrix, dense, quantize  # noqa: E402

pytestmark = pytest.mark.torch

SHAPES = [  # out, in: one, whole and broken panels, groups of 32 and lines of 4, depths beyond 256 and 2048, SmolLM2's
    (1, 1), (16, 4), (17, 3), (15, 33), (48, 32), (33, 63), (100, 70), (16, 257), (5, 2049), (40, 4100), (960, 576),
    (576, 1536),
]  # fmt: skip
ROWS = [1, 2, 3, 4, 5, 6, 7, 11, 12, 13, 16, 25, 32, 64, 96, 97, 130]


FORMATS = {"float32": lambda weight: weight, "int8": lambda weight: Int8Matrix.of(quantize(weight))}


def native(isa: int | None = None) -> NativeKind:
    try:
        return NativeKind(isa)
    except UnsupportedError as e:
        pytest.skip(str(e))


def instruction_sets() -> range:
    """Those of this processor."""
    try:
        return range(NativeKind().isa + 1)
    except UnsupportedError:
        return range(1)


@pytest.fixture(params=FORMATS)
def as_held(request):
    """float32 [out, in] → how it is held."""
    return FORMATS[request.param]


@pytest.fixture(params=instruction_sets(), ids=lambda isa: ISA_NAMES[isa])
def kind(request):
    return native(request.param)


@pytest.fixture(autouse=True)
def one_thread():
    """Threads do not change the bits, as one test shows; on a busy machine waiting for them is most of the time."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def random(*shape: int, seed: int = 1):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def assert_close(y, x, weight) -> None:
    """Within the bound of a chain of `in` roundings (Higham, Accuracy and Stability, §3.1)."""
    want = x.double() @ weight.double().T
    bound = (x.double().abs() @ weight.double().abs().T) * (x.shape[1] + 1) * 2.0**-24
    assert torch.isfinite(y).all()
    assert ((y.double() - want).abs() <= bound + 1e-42).all()


@pytest.mark.parametrize(("out", "width"), SHAPES)
def test_products_are_those_of_float64_to_rounding(kind, as_held, out, width):
    weight = as_held(random(out, width) * 0.05)
    linear = kind(weight)
    for rows in ROWS:
        x = random(rows, width, seed=rows)
        assert_close(linear(x), x, dense(weight))


@pytest.mark.parametrize(("out", "width"), SHAPES)
def test_8_bits_give_what_float32_gives_for_the_same_values_to_the_bit(kind, out, width):
    weight = FORMATS["int8"](random(out, width) * 0.05)
    held, wide = kind(weight), kind(weight.float32())
    for rows in ROWS:
        x = random(rows, width, seed=rows)
        assert torch.equal(held(x), wide(x)), rows


@pytest.mark.parametrize(("out", "width"), [(960, 576), (576, 1536), (50, 2100), (17, 35)])
def test_a_row_has_the_same_bits_at_any_row_count_and_place(kind, as_held, out, width):
    linear = kind(as_held(random(out, width)))
    x = random(200, width)
    alone = torch.cat([linear(row[None]) for row in x])
    for rows in [*range(1, 65), 96, 97, 200]:
        for first in (0, 200 - rows):
            part = x[first : first + rows]
            assert torch.equal(linear(part), alone[first : first + len(part)]), (rows, first)


def test_fused_instruction_sets_give_the_same_bits(as_held):
    fused = [isa for isa in instruction_sets() if isa >= 1]
    weight, x = as_held(random(130, 100)), random(20, 100)
    results = [native(isa)(weight)(x) for isa in fused]
    assert all(torch.equal(y, results[0]) for y in results)


@pytest.mark.parametrize("threads", [2, 3, 70])
def test_threads_do_not_change_the_bits(kind, as_held, threads):
    linear, x = kind(as_held(random(300, 576))), random(130, 576)
    want = [linear(x[:rows]) for rows in (1, 9, 130)]
    torch.set_num_threads(threads)
    for y in want:
        assert torch.equal(linear(x[: len(y)]), y)


def test_nothing_beyond_x_is_read_and_nothing_beyond_y_is_written(kind, as_held):
    for out, width, rows in [(17, 33, 1), (17, 33, 5), (16, 64, 13), (5, 7, 4), (31, 259, 8)]:
        weight = as_held(random(out, width))
        linear = kind(weight)
        outer = torch.full((rows + 2, width + 9), torch.nan)
        x = outer[1:-1, 3 : 3 + width]
        x.copy_(random(rows, width))
        y = torch.full((rows + 2, out + 5), 7.0)
        inner = y[1:-1, 2 : 2 + out]
        multiply = kind.library.weir_gemm_q8 if linear.int8 else kind.library.weir_gemm
        multiply(
            kind.isa, rows, out, width, x.data_ptr(), x.stride(0), linear.weight.data_ptr(), inner.data_ptr(), y.stride(0)
        )  # fmt: skip
        assert torch.equal(inner, linear(x.contiguous()))
        assert_close(inner, x, dense(weight))
        inner.fill_(7.0)
        assert (y == 7.0).all()


def test_a_row_that_is_not_finite_is_alone_with_it(kind, as_held):
    linear, x = kind(as_held(random(40, 70))), random(7, 70)
    want = linear(x)
    x[3, 5], x[5, 69] = torch.nan, torch.inf
    got = linear(x)
    assert got[3].isnan().all()
    assert not got[5].isfinite().any()
    others = [0, 1, 2, 4, 6]
    assert torch.equal(got[others], want[others])


def test_denormals_are_numbers():
    kind = native()
    weight = torch.tensor([[1.0], [0.5], [2.0**-100]])
    x = torch.tensor([[2.0**-140], [3 * 2.0**-149], [2.0**-30]])
    assert torch.equal(kind(weight)(x), x @ weight.T)
    assert kind(weight)(x)[2, 2] == 2.0**-130


def test_weights_of_zero_and_of_denormals_are_kept_in_8_bits(kind):
    weight = torch.zeros(3, 40)
    weight[1, :32], weight[2, 32:] = 2.0**-140, 1.0
    y = kind(FORMATS["int8"](weight))(torch.eye(40))
    assert (y[:, 0] == 0).all()
    assert torch.allclose(y[:32, 1], weight[1, :32], rtol=0.1, atol=0)
    assert torch.equal(y[:, 2], weight[2])


@pytest.mark.parametrize("shift", [4, 16, 36, 60])
def test_8_bits_at_any_address(kind, shift):
    """What lies in a mapped file need not begin at a cache line."""
    weight, x = FORMATS["int8"](random(50, 100)), random(9, 100)
    room = torch.empty(weight.lines.numel() + 32, dtype=torch.int32)
    first = (shift - room.data_ptr()) % 64 // 4
    lines = room[first : first + weight.lines.numel()].view(weight.lines.shape).copy_(weight.lines)
    assert lines.data_ptr() % 64 == shift
    assert torch.equal(kind(Int8Matrix(lines, weight.shape))(x), kind(weight)(x))


def test_no_rows_and_no_features(kind, as_held):
    assert kind(as_held(random(20, 10)))(torch.empty(0, 10)).shape == (0, 20)
    assert torch.equal(kind(as_held(torch.empty(20, 0)))(torch.empty(3, 0)), torch.zeros(3, 20))
    assert kind(as_held(torch.empty(0, 10)))(random(3, 10)).shape == (3, 0)


@pytest.mark.parametrize("bad", [torch.zeros(2, 9), torch.zeros(10), torch.zeros(2, 10, dtype=torch.float64)])
def test_what_c_would_misread_is_refused(bad):
    linear: NativeLinear = native()(random(4, 10))
    with pytest.raises(ValueError, match="10"):
        linear(bad)


def test_lines_of_another_matrix_are_refused():
    weight = FORMATS["int8"](random(40, 64))
    for wrong in (Int8Matrix(weight.lines, (49, 64)), Int8Matrix(weight.lines.transpose(2, 3), (40, 64))):
        with pytest.raises(ValueError, match="lines of"):
            native()(wrong)


def test_an_instruction_set_that_is_not_here_is_refused():
    native()
    with pytest.raises(ValueError, match="instruction set 9"):
        NativeKind(9)
