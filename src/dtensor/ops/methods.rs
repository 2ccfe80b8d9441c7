//! Macros for methods with burn's names: each defines a sharding rule and runs burn's method on the
//! local tensor.

/// Defines elementwise methods of one tensor, with an optional scalar argument.
macro_rules! mapped {
    ($Output:ty; $($name:ident $(<$E:ident: $Bound:ident>($arg:ident))?: $partials:expr),* $(,)?) => {$(
        #[doc = concat!("Applies burn's [`", stringify!($name), "`](burn::tensor::Tensor::", stringify!($name), ") elementwise.")]
        #[must_use]
        #[track_caller]
        pub fn $name$(<$E: $Bound>)?(self $(, $arg: $E)?) -> $Output {
            apply(&const { EinsumRule::pointwise(stringify!($name), $partials) }, self, |x, _| x.$name($($arg)?))
        }
    )*};
}

/// Defines elementwise methods of two tensors, with broadcasting.
macro_rules! zipped {
    ($Output:ty; $($name:ident: $partials:expr),* $(,)?) => {$(
        #[doc = concat!("Applies burn's [`", stringify!($name), "`](burn::tensor::Tensor::", stringify!($name), ") elementwise, with broadcasting.")]
        #[must_use]
        #[track_caller]
        pub fn $name(self, other: Self) -> $Output {
            apply(&const { EinsumRule::pointwise(stringify!($name), $partials) }, (self, other), |(a, b), _| a.$name(b))
        }
    )*};
}

/// Defines methods along one dimension: name, output type, the rule's subscripts, and further calls
/// on the rule.
macro_rules! along {
    ($($name:ident -> $Output:ty: $text:literal $([$($more:tt)+])?);* $(;)?) => {$(
        #[doc = concat!("Applies burn's [`", stringify!($name), "`](Tensor::", stringify!($name), ") along `dim`. Sharding rule: `", $text, "`.")]
        #[must_use]
        #[track_caller]
        pub fn $name<I: AsIndex>(self, dim: I) -> $Output {
            let dim = dim_of(stringify!($name), dim, D);
            apply(&(&const { EinsumRule::new(stringify!($name), $text)$(.$($more)+)? }).at([dim]), self, |x, _| x.$name(dim))
        }
    )*};
}

/// Defines reductions: over all elements, along one dimension, and over several dimensions. The text
/// after the rule is a paragraph of the documentation of all three.
macro_rules! reductions {
    (@rule $name:ident $text:literal [$($rule:tt)+]) => { (&const { EinsumRule::new(stringify!($name), $text).$($rule)+ }) };
    ($($full:ident $dim:ident $($dims:ident)? -> $K:ty: $rule:tt $note:literal);* $(;)?) => {$(
        #[doc = concat!("Applies burn's [`", stringify!($full), "`](Tensor::", stringify!($full), ") to all elements. Shape: `[1]`.")]
        #[doc = ""]
        #[doc = $note]
        #[must_use]
        #[track_caller]
        pub fn $full(self) -> DTensor<1, $K> {
            apply(reductions!(@rule $full ".. -> 1" $rule), self, |x, _| x.$full())
        }

        #[doc = concat!("Applies burn's [`", stringify!($dim), "`](Tensor::", stringify!($dim), ") along `dim`, which then has length 1.")]
        #[doc = ""]
        #[doc = $note]
        #[must_use]
        #[track_caller]
        pub fn $dim<I: AsIndex>(self, dim: I) -> DTensor<D, $K> {
            let dim = dim_of(stringify!($dim), dim, D);
            apply(&reductions!(@rule $dim "..d.. -> ..1.." $rule).at([dim]), self, |x, _| x.$dim(dim))
        }

        $(
            #[doc = concat!("Applies burn's [`", stringify!($dims), "`](Tensor::", stringify!($dims), ") over `dims`, which then have length 1.")]
            #[doc = ""]
            #[doc = $note]
            #[must_use]
            #[track_caller]
            pub fn $dims<I: AsIndex>(self, dims: &[I]) -> DTensor<D, $K> {
                let dims = dims_of(stringify!($dims), dims, D);
                let rule = reductions!(@rule $dims "..d.. -> ..1.." $rule);
                apply(&rule.at(dims.iter().copied()), self, |x, _| x.$dims(&dims))
            }
        )?
    )*};
}

pub(super) use {along, mapped, reductions, zipped};
