"""Names the operations that are linear in what they are given, so that means stay means, and sums stay sums."""

KEEP_MEANS = frozenset(
    {
        *("add", "add_", "sub", "sub_", "rsub", "neg", "neg_", "lerp", "addcmul", "addcdiv", "where", "nan_to_num"),
        *("to", "_to_copy", "clone", "copy_", "masked_fill", "masked_fill_", "zeros_like", "ones_like", "full_like"),
        *("fill", "fill_", "positive", "detach", "real", "imag", "view_as_real", "view_as_complex"),
    }
)
"""Pointwise operations that keep means, or take nothing of their argument but its shape."""
JOIN = frozenset(
    {
        *("sum", "nansum", "mean", "cumsum", "trace", "stack", "cat", "hstack", "vstack", "concat", "repeat", "flip"),
        *("roll", "index", "index_select", "gather", "index_put", "index_put_", "index_add", "index_add_", "scatter"),
        *("scatter_add", "scatter_add_", "select_scatter", "slice_scatter", "constant_pad_nd", "pad", "diag", "tile"),
        *("contiguous", "reshape", "flatten", "view_as", "expand_as", "type_as", "lift_fresh_copy", "_unsafe_view"),
        *("new_zeros", "new_ones", "new_full", "new_empty", "empty_like", "resolve_conj", "resolve_neg"),
    }
)
"""Operations that add numbers of an argument up, or put them elsewhere."""
VIEWS = frozenset(
    {
        *("view", "alias", "squeeze", "unsqueeze", "select", "slice", "expand", "permute", "transpose", "t", "narrow"),
        *("unbind", "split", "split_with_sizes", "chunk", "diagonal", "unflatten", "movedim", "broadcast_to"),
    }
)
"""Views of numbers."""
MULTIPLY, DIVIDE = frozenset({"mul", "mul_"}), frozenset({"div", "div_"})
PRODUCTS = frozenset(
    {"matmul", "mm", "bmm", "mv", "dot", "vdot", "inner", "linear", "addmm", "baddbmm", "einsum", "tensordot"}
)
"""Sums of products."""
SCALE = MULTIPLY | DIVIDE | PRODUCTS
"""Operations that are linear in each argument."""
ADD_UP = PRODUCTS | {
    "sum",
    "nansum",
    "count_nonzero",
    "trace",
    "index_add",
    "index_add_",
    "scatter_add",
    "scatter_add_",
}
"""Operations that add samples up, if they are what makes one of several."""
