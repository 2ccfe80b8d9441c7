//! [`tensor_tree!`](crate::tensor_tree): implements `TensorTree` for user-defined structs and enums.

/// Implements [`TensorTree`](crate::fsdp::TensorTree) for structs and enums, so that units can take and return
/// them.
///
/// Name the fields as in a pattern. Each named field must implement `TensorTree` too. Omitting a field is a compile
/// error. Fields behind `..` are passed through unchanged.
///
/// ```
/// use burn::module::Module;
/// use burn::nn::{Linear, LinearConfig};
/// use burn::tensor::{Bool, Device, Tensor};
/// use burn_dtensor::fsdp::unit;
/// use burn_dtensor::tensor_tree;
///
/// struct Batch {
///     tokens: Tensor<2>,
///     mask: Option<Tensor<2, Bool>>,
///     source: std::path::PathBuf,
/// }
///
/// struct Pair<T>(T, T);
///
/// enum Heads {
///     One(Tensor<2>),
///     Two { left: Tensor<2>, right: Tensor<2> },
///     None,
/// }
///
/// tensor_tree! {
///     struct Batch { tokens, mask, .. }
///     [T: TensorTree] struct Pair<T>(first, second);
///     enum Heads { One(x), Two { left, right }, None }
/// }
///
/// fn forward(layer: &Linear, batch: Batch) -> (Batch, Heads) {
///     unit(layer, batch, |layer, batch| {
///         let tokens = layer.forward(batch.tokens);
///         (Batch { tokens: tokens.clone(), ..batch }, Heads::One(tokens))
///     })
/// }
/// # let device = Device::flex();
/// # let batch = Batch { tokens: Tensor::zeros([2, 3], &device), mask: None, source: "a".into() };
/// # let (batch, heads) = forward(&LinearConfig::new(3, 4).init(&device), batch);
/// # assert_eq!(batch.source, std::path::PathBuf::from("a"));
/// # assert!(matches!(heads, Heads::One(x) if x.dims() == [2, 4]));
/// ```
///
/// Omitting a field:
///
/// ```compile_fail,E0027
/// # use burn::tensor::Tensor;
/// struct Batch {
///     tokens: Tensor<2>,
///     mask: Tensor<2>,
/// }
///
/// burn_dtensor::tensor_tree! { struct Batch { tokens } }
/// ```
#[macro_export]
macro_rules! tensor_tree {
    () => {};
    ($([$($generics:tt)*])? struct $name:ident $(<$($argument:tt),*>)? { $($field:ident,)+ .. } $($rest:tt)*) => {
        $crate::tensor_tree!(@impl [$($($generics)*)?] $name $(<$($argument),*>)?, self, f, Self {
            $($field: TensorTree::map_tensors(self.$field, f),)+
            ..self
        });
        $crate::tensor_tree! { $($rest)* }
    };
    ($([$($generics:tt)*])? struct $name:ident $(<$($argument:tt),*>)? { $($field:ident),* $(,)? } $($rest:tt)*) => {
        $crate::tensor_tree!(@impl [$($($generics)*)?] $name $(<$($argument),*>)?, self, f, {
            let Self { $($field),* } = self;
            Self { $($field: TensorTree::map_tensors($field, f)),* }
        });
        $crate::tensor_tree! { $($rest)* }
    };
    ($([$($generics:tt)*])? struct $name:ident $(<$($argument:tt),*>)? ( $($field:ident),* $(,)? ); $($rest:tt)*) => {
        $crate::tensor_tree!(@impl [$($($generics)*)?] $name $(<$($argument),*>)?, self, f, {
            let Self($($field),*) = self;
            Self($(TensorTree::map_tensors($field, f)),*)
        });
        $crate::tensor_tree! { $($rest)* }
    };
    ($([$($generics:tt)*])? enum $name:ident $(<$($argument:tt),*>)? {
        $($variant:ident $(($($value:ident),* $(,)?))? $({ $($field:ident),* $(,)? })?),* $(,)?
    } $($rest:tt)*) => {
        $crate::tensor_tree!(@impl [$($($generics)*)?] $name $(<$($argument),*>)?, self, f, match self {
            $(Self::$variant $(($($value),*))? $({ $($field),* })? =>
                Self::$variant $(($(TensorTree::map_tensors($value, f)),*))?
                    $({ $($field: TensorTree::map_tensors($field, f)),* })?,)*
        });
        $crate::tensor_tree! { $($rest)* }
    };
    (@impl [$($generics:tt)*] $name:ident $(<$($argument:tt),*>)?, $self:ident, $f:ident, $body:expr) => {
        const _: () = {
            #[allow(unused_imports)]
            use $crate::fsdp::{TensorMapFn, TensorTree};

            impl<$($generics)*> TensorTree for $name $(<$($argument),*>)? {
                #[allow(unused_variables)]
                fn map_tensors($self, $f: TensorMapFn<'_>) -> Self {
                    $body
                }
            }
        };
    };
}
