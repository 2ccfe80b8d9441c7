//! [`case!`](crate::case), and the names that its two expansions use.

/// Creates a [`Case`](crate::testing::prove::Case) of an operator that is written once and compiled
/// for both burn's tensors and DTensors.
///
/// ```
/// use burn_dtensor::testing::prove::{Case, case};
///
/// fn cases() -> Vec<Case> {
///     vec![
///         case!("matmul", (a: 2 = [3, 6], b: 2 = [6, 4]) => a.matmul(b)),
///         case!("log", (x: 2 positive = [3, 6]) => x.log()),
///         case!("asin", (x: 2 within(-0.9..0.9) = [3, 6]) => x.asin()),
///         case!("add", (i: 1 int(5) = [3], j: 1 int(5) = [3]) => i + j),
///     ]
/// }
/// # assert_eq!(cases().len(), 4);
/// ```
///
/// An input is written `name: dimensions = shape`, and consists of floats between -2 and 2 unless a
/// kind is given:
///
/// | | elements |
/// |---|---|
/// | `x: 2 = [3, 6]` | floats in -2..2, no two equal |
/// | `x: 2 positive = [3, 6]` | floats in 0.1..4 |
/// | `x: 2 within(-0.9..0.9) = [3, 6]` | floats in the range |
/// | `x: 2 nan = [3, 6]` | floats in -2..2 and NaN, without gradients |
/// | `x: 2 meeting = [3, 6]` | integral floats, never equal to those of other such inputs |
/// | | (local values under `P(max)` or `P(min)` may be equal) |
/// | `x: 2 tied(3) = [3, 6]` | floats -1, 0 and 1, without gradients |
/// | `i: 2 int(5) = [3, 6]` | integers from 0 to 4 |
/// | `i: 2 int(-3..5) = [3, 6]` | integers in the range |
/// | `m: 2 bool = [3, 6]` | booleans |
///
/// Floats have single precision and integers have 64 bits. For another dtype, give it as the last
/// argument in the parentheses: `float(BF16)`, `within(-0.9..0.9, F16)`, `int(0..256, U8)`.
///
/// In the expression, `Tensor` is the tensor type of either expansion, and `activation`, `grid`,
/// `linalg`, `loss`, `module` and `signal` are the modules of either. The expression returns a
/// tensor, or a tuple, array or `Vec` of tensors.
#[macro_export]
macro_rules! case {
    ($name:expr, ($($input:ident : $d:literal $($kind:ident $(($($arg:tt)*))?)? = $shape:expr),+ $(,)?) => $body:expr) => {
        $crate::testing::prove::Case::new(
            $name,
            [$($crate::case!(@input $input $d ($shape) $($kind $(($($arg)*))?)?)),+],
            |inputs| {
                #[allow(unused_imports)]
                use $crate::testing::prove::plain::*;
                let mut inputs = inputs.iter();
                $(let $input = inputs.next().unwrap().tensor::<$d, $crate::case!(@kind $($kind)?)>();)+
                $body
            },
            |inputs| {
                #[allow(unused_imports)]
                use $crate::testing::prove::sharded::*;
                let mut inputs = inputs.iter();
                $(let $input = inputs.next().unwrap().tensor::<$d, $crate::case!(@kind $($kind)?)>();)+
                $body
            },
        )
    };
    (@input $input:ident $d:literal ($shape:expr)) => {
        $crate::testing::prove::CaseInput::float::<$d>(stringify!($input), $shape)
    };
    (@input $input:ident $d:literal ($shape:expr) positive) => {
        $crate::testing::prove::CaseInput::float::<$d>(stringify!($input), $shape).with_range(0.1..4.0)
    };
    (@input $input:ident $d:literal ($shape:expr) within($range:expr $(, $dtype:ident)?)) => {
        $crate::testing::prove::CaseInput::float::<$d>(stringify!($input), $shape).with_range($range)$(.with_dtype($crate::case!(@dtype $dtype)))?
    };
    (@input $input:ident $d:literal ($shape:expr) float($dtype:ident)) => {
        $crate::testing::prove::CaseInput::float::<$d>(stringify!($input), $shape).with_dtype($crate::case!(@dtype $dtype))
    };
    (@input $input:ident $d:literal ($shape:expr) nan) => {
        $crate::testing::prove::CaseInput::nan::<$d>(stringify!($input), $shape)
    };
    (@input $input:ident $d:literal ($shape:expr) meeting) => {
        $crate::testing::prove::CaseInput::meeting::<$d>(stringify!($input), $shape)
    };
    (@input $input:ident $d:literal ($shape:expr) tied($count:expr)) => {
        $crate::testing::prove::CaseInput::tied::<$d>(stringify!($input), $shape, $count)
    };
    (@input $input:ident $d:literal ($shape:expr) int($range:expr $(, $dtype:ident)?)) => {
        $crate::testing::prove::CaseInput::int::<$d>(stringify!($input), $shape, $range)$(.with_dtype($crate::case!(@dtype $dtype)))?
    };
    (@input $input:ident $d:literal ($shape:expr) bool) => {
        $crate::testing::prove::CaseInput::bool::<$d>(stringify!($input), $shape)
    };
    (@kind) => { $crate::testing::prove::plain::Float };
    (@kind positive) => { $crate::testing::prove::plain::Float };
    (@kind within) => { $crate::testing::prove::plain::Float };
    (@kind float) => { $crate::testing::prove::plain::Float };
    (@kind nan) => { $crate::testing::prove::plain::Float };
    (@kind meeting) => { $crate::testing::prove::plain::Float };
    (@kind tied) => { $crate::testing::prove::plain::Float };
    (@kind int) => { $crate::testing::prove::plain::Int };
    (@kind bool) => { $crate::testing::prove::plain::Bool };
    (@dtype $dtype:ident) => { $crate::testing::prove::plain::DType::$dtype };
}

/// Names in scope where [`case!`](crate::case) compiles its expression for burn's tensors.
#[doc(hidden)]
pub mod plain {
    pub use burn::tensor::{Bool, DType, Float, Int, Tensor, activation, grid, loss, module};
    pub use burn::{linalg, signal};
}

/// Names in scope where [`case!`](crate::case) compiles its expression for DTensors.
#[doc(hidden)]
pub mod sharded {
    pub use burn::tensor::{Bool, Float, Int};

    pub use crate::dtensor::DTensor as Tensor;
    pub use crate::dtensor::ops::{activation, grid, linalg, loss, module, signal};
}
