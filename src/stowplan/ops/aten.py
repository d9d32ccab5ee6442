"""Op types of PyTorch by what they have in common, as the tables of this folder need them."""


def _aten(*names: str) -> tuple[str, ...]:
    return tuple(f"aten.{name}" if "." in name else f"aten.{name}.default" for name in names)


VIEWS = _aten(
    *("alias", "detach", "view", "_unsafe_view", "_reshape_alias", "as_strided", "expand", "permute", "t"),
    *("transpose.int", "unsqueeze", "squeeze", "squeeze.dim", "squeeze.dims", "slice.Tensor", "select.int"),
    *(
        "split.Tensor",
        "split_with_sizes",
        "unbind.int",
        "diagonal",
        "unfold",
        "view_as_real",
        "view_as_complex",
    ),
)
"""The output is the first input's memory under another shape."""

POINTWISE = _aten(
    *("abs", "neg", "sign", "ceil", "floor", "round", "trunc", "reciprocal", "sqrt", "rsqrt", "square"),
    *("exp", "exp2", "expm1", "log", "log1p", "log2", "sin", "cos", "tan", "tanh", "sigmoid", "erf"),
    *(
        "relu",
        "silu",
        "gelu",
        "elu",
        "leaky_relu",
        "hardswish",
        "hardsigmoid",
        "hardtanh",
        "softplus",
        "mish",
    ),
    *("clamp", "clamp_min", "clamp_max", "nan_to_num", "pow.Tensor_Scalar", "pow.Tensor_Tensor"),
    *("add.Tensor", "sub.Tensor", "mul.Tensor", "div.Tensor", "maximum", "minimum", "where.self"),
    *("addcmul", "addcdiv", "lerp.Scalar", "lerp.Tensor", "logical_not", "logical_and", "logical_or"),
    *("threshold_backward", "gelu_backward", "silu_backward", "sigmoid_backward", "tanh_backward"),
    *(
        "elu_backward",
        "leaky_relu_backward",
        "hardtanh_backward",
        "hardsigmoid_backward",
        "softplus_backward",
    ),
)
"""Each element of the output needs that element of the inputs alone; there is a form that writes over any."""

POINTWISE_FIRST = _aten(
    *("add.Scalar", "sub.Scalar", "mul.Scalar", "div.Scalar", "masked_fill.Scalar", "masked_fill.Tensor"),
)
"""The same, with a form that writes over the first input only."""

ROWWISE = _aten("_softmax", "_log_softmax", "_softmax_backward_data", "_log_softmax_backward_data")
"""Each row is read whole before it is written."""

SCATTERS = _aten(
    *(
        "index_put",
        "index_add",
        "index_copy",
        "index_fill.int_Scalar",
        "scatter_add",
        "scatter.src",
        "scatter.value",
    ),
    *("as_strided_scatter",),
)
"""The first input with some elements replaced or added to."""

FILLS = _aten("fill.Scalar", "fill.Tensor", "zero", "copy", "bernoulli.p", "normal_functional", "uniform")
"""The first input gives shape and place; its contents are not read."""

RANDOM = _aten(
    *(
        "bernoulli",
        "bernoulli.p",
        "bernoulli.Tensor",
        "native_dropout",
        "rand",
        "rand_like",
        "randn",
        "randn_like",
    ),
    *(
        "randint",
        "randint.low",
        "randint_like",
        "randint_like.low_dtype",
        "randperm",
        "multinomial",
        "uniform",
    ),
    *(
        "normal_functional",
        "normal.Tensor_Tensor",
        "normal.Tensor_float",
        "normal.float_Tensor",
        "exponential",
    ),
    *("poisson", "rrelu_with_noise_functional", "random", "random.from", "random.to", "geometric", "cauchy"),
    *("log_normal", "binomial", "_standard_gamma", "_sample_dirichlet", "_fused_dropout"),
    # Forms that write in place stand in graphs where the functional variant would change the layout.
    *("bernoulli_.float", "bernoulli_.Tensor", "uniform_", "normal_", "exponential_", "geometric_"),
    *("cauchy_", "log_normal_", "random_", "random_.from", "random_.to"),
    *("rrelu_with_noise", "rrelu_with_noise_", "normal.float_float", "randint_like.Tensor"),
    *(
        f"{name}.{kind}generator"
        for name, kinds in (("rand", ("",)), ("randn", ("",)), ("randperm", ("",)), ("randint", ("", "low_")))
        for kind in kinds
    ),
    *("rand_like.generator", "randn_like.generator", "randint_like.generator"),
    *("randint_like.Tensor_generator", "randint_like.low_generator_dtype"),
)
"""A second run draws other numbers."""

_ATTENTION_KINDS = ("flash_attention", "flash_attention_for_cpu", "efficient_attention", "cudnn_attention")

ATTENTIONS = _aten(*(f"_scaled_dot_product_{kind}" for kind in _ATTENTION_KINDS))
"""Queries, keys and values in, their product out; random where the attribute `dropout_p` is not zero."""

ATTENTION_ADJOINTS = _aten(*(f"_scaled_dot_product_{kind}_backward" for kind in _ATTENTION_KINDS))
