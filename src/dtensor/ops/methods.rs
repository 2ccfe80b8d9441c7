//! Methods of one name with burn's: each is a rule, and burn's method on this rank's part.

/// Elementwise methods of one tensor, perhaps with a scalar.
macro_rules! mapped {
    ($Output:ty; $($name:ident $(<$E:ident: $Bound:ident>($arg:ident))?: $partials:expr),* $(,)?) => {$(
        #[doc = concat!("Elementwise, as burn's [`", stringify!($name), "`](burn::tensor::Tensor::", stringify!($name), ").")]
        #[must_use]
        #[track_caller]
        pub fn $name$(<$E: $Bound>)?(self $(, $arg: $E)?) -> $Output {
            apply(&const { EinsumRule::pointwise(stringify!($name), $partials) }, self, |x, _| x.$name($($arg)?))
        }
    )*};
}

/// Elementwise methods of two tensors, with broadcasting.
macro_rules! zipped {
    ($Output:ty; $($name:ident: $partials:expr),* $(,)?) => {$(
        #[doc = concat!("Elementwise with broadcasting, as burn's [`", stringify!($name), "`](burn::tensor::Tensor::", stringify!($name), ").")]
        #[must_use]
        #[track_caller]
        pub fn $name(self, other: Self) -> $Output {
            apply(&const { EinsumRule::pointwise(stringify!($name), $partials) }, (self, other), |(a, b), _| a.$name(b))
        }
    )*};
}

/// Methods along one dimension: what comes out, letters, and what else the rule says.
macro_rules! along {
    ($($name:ident -> $Output:ty: $text:literal $([$($more:tt)+])?);* $(;)?) => {$(
        #[doc = concat!("Along `dim`, as burn's [`", stringify!($name), "`](Tensor::", stringify!($name), "); by rule `", $text, "`.")]
        #[must_use]
        #[track_caller]
        pub fn $name<I: AsIndex>(self, dim: I) -> $Output {
            let dim = dim_of(stringify!($name), dim, D);
            apply(&(&const { EinsumRule::new(stringify!($name), $text)$(.$($more)+)? }).at([dim]), self, |x, _| x.$name(dim))
        }
    )*};
}

/// Reductions: of all elements, along one dimension, over several.
macro_rules! reductions {
    (@rule $name:ident $text:literal [$($rule:tt)+]) => { (&const { EinsumRule::new(stringify!($name), $text).$($rule)+ }) };
    ($($full:ident $dim:ident $($dims:ident)? -> $K:ty: $rule:tt);* $(;)?) => {$(
        #[doc = concat!("Of all elements, as burn's [`", stringify!($full), "`](Tensor::", stringify!($full), "): `[1]`.")]
        #[must_use]
        #[track_caller]
        pub fn $full(self) -> DTensor<1, $K> {
            apply(reductions!(@rule $full ".. -> 1" $rule), self, |x, _| x.$full())
        }

        #[doc = concat!("Along `dim`, which stays with length 1, as burn's [`", stringify!($dim), "`](Tensor::", stringify!($dim), ").")]
        #[must_use]
        #[track_caller]
        pub fn $dim<I: AsIndex>(self, dim: I) -> DTensor<D, $K> {
            let dim = dim_of(stringify!($dim), dim, D);
            apply(&reductions!(@rule $dim "..d.. -> ..1.." $rule).at([dim]), self, |x, _| x.$dim(dim))
        }

        $(
            #[doc = concat!("Over `dims`, which stay with length 1, as burn's [`", stringify!($dims), "`](Tensor::", stringify!($dims), ").")]
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
