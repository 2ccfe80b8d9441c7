//! What burn has and DTensors have not.

/// Names, and why.
pub const EXCEPTIONS: &[(&[&str], &str)] = &[
    (&["Tensor::rank"], "it is `D`, and a rank is a process here"),
    (
        &[
            "Tensor::from_data",
            "Tensor::from_floats",
            "Tensor::from_ints",
            "Tensor::from_bool",
        ],
        "data are no tensor of a mesh yet: `distribute_tensor` and `distribute_replicated` place a tensor made of them",
    ),
    (
        &[
            "Tensor::to_data",
            "Tensor::try_to_data",
            "Tensor::to_data_async",
            "Tensor::to_data_as",
            "Tensor::try_to_data_as",
            "Tensor::to_data_dtype",
            "Tensor::try_to_data_dtype",
            "Tensor::try_to_vec_as",
            "Tensor::into_data",
            "Tensor::try_into_data",
            "Tensor::into_data_async",
            "Tensor::into_data_as",
            "Tensor::try_into_data_as",
            "Tensor::into_data_dtype",
            "Tensor::try_into_data_dtype",
            "Tensor::try_into_vec_as",
        ],
        "whose data is for the program to say: of `full_tensor` or of `local`",
    ),
    (
        &[
            "Tensor::into_scalar_async",
            "Tensor::try_into_scalar",
            "Tensor::try_into_scalar_async",
            "Tensor::argwhere_async",
            "Tensor::nonzero_async",
            "Tensor::mask_select_async",
        ],
        "another way to wait for the same data, and ranks wait for each other: the method without the affix",
    ),
    (
        &[
            "Tensor::grad_remove",
            "Tensor::grad_replace",
            "Tensor::is_tracked",
            "Tensor::is_require_grad",
            "Tensor::set_require_grad",
            "Tensor::is_autodiff",
            "Tensor::autodiff",
            "Tensor::without_autodiff",
            "Tensor::inner",
            "Tensor::from_inner",
            "Tensor::gradient_checkpointing_strategy",
            "Tensor::with_gradient_checkpointing_strategy",
        ],
        "the autodiff graph is that of local tensors: of `local`, and of a loss's `full_tensor`",
    ),
    (
        &[
            "Tensor::into_bridge",
            "Tensor::from_bridge",
            "Tensor::into_dispatch",
            "Tensor::from_dispatch",
            "Tensor::try_into_primitive",
            "Tensor::from_primitive",
            "Tensor::extract",
            "Tensor::inplace",
            "Tensor::can_mut",
        ],
        "primitives and memory are of local tensors: `local`, `to_local` and `from_local`",
    ),
    (
        &[
            "Tensor::quantize",
            "Tensor::quantize_dynamic",
            "Tensor::dequantize",
            "quantization::compute_range",
            "quantization::compute_q_params",
        ],
        "quantized elements are none of a DTensor",
    ),
    (
        &[
            "Tensor::is_distributed",
            "Tensor::set_distributed",
            "distributed::all_reduce",
        ],
        "burn's own data parallelism: a DTensor's placements say what is reduced, and where",
    ),
    (
        &["Tensor::random"],
        "of integers it is `random_range`, which says of which",
    ),
    (
        &["tensor::capture"],
        "it records what a device does, not what tensors are",
    ),
    (
        &["tensor::set_print_options", "tensor::check_closeness"],
        "printing: of `full_tensor`",
    ),
    (
        &[
            "module::conv2d_weight_backward",
            "module::avg_pool2d_backward",
            "module::max_pool2d_with_indices_backward",
        ],
        "steps of backward, which burn takes on local tensors",
    ),
];
